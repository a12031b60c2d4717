"""Settings of the store: its URL, durability and retention, and the disk space that must stay free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from areal_agents.core.settings import Settings

Durability = Literal["process", "power"]


class RetainConfig(Settings):
    """How long the turns of groups are kept after the trainer trained or dropped the groups.

    After their texts and tokens are deleted, a summary remains: episodes, rewards, and the size, versions and
    finish reason of every turn.
    """

    versions: int | None = Field(
        default=None,
        ge=1,
        description="Keep the turns of the groups of this many last versions, and delete the texts and "
        "tokens of older ones. Absent: keep all.",
    )
    export: str = Field(
        default="",
        description="Folder to write turns to, as Parquet files, before they are deleted; empty: none.",
    )

    @model_validator(mode="after")
    def _export_needs_versions(self) -> RetainConfig:
        if self.export and self.versions is None:
            raise ValueError(
                "export writes turns before they are deleted, and without versions no turns are deleted; set "
                "versions: N, or leave export out"
            )
        return self


class StoreConfig(Settings):
    """Settings of the durable store between rollout and training."""

    url: str | None = Field(
        default=None,
        description="Path of the store's SQLite file, or postgresql://user@host/database?schema=name; "
        "default: store.db in the run's folder. docs/async.md.",
    )
    durability: Durability = Field(
        default="process",
        description="process: a commit survives the death of any process; power: a commit also survives a "
        "power failure. PostgreSQL does what its server is configured to.",
    )
    retain: RetainConfig = Field(
        default_factory=RetainConfig,
        description="Which turns of trained groups are kept: all, or {versions: N, export: FOLDER}.",
    )
    min_free_gb: float = Field(
        default=1.0,
        ge=0,
        description="No groups are submitted while a disk of the run has less free space than this, in GB, "
        "plus the size of the next checkpoint and weights.",
    )

    @field_validator("retain", mode="before")
    @classmethod
    def _accept_all(cls, value: object) -> object:
        if isinstance(value, str):
            if value != "all":
                raise ValueError(f"must be all or {{versions: N}}, got {value!r}")
            return RetainConfig()
        return value
