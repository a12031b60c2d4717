"""Settings of the store: location, durability of a commit, retention, and disk space to keep free."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Durability = Literal["process", "power"]


class RetainConfig(BaseModel):
    """What is kept of groups that were trained, or dropped by the trainer, some versions ago.

    Of the others a summary stays: episodes, rewards, and the size, versions and end of every turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: int | None = Field(
        default=None,
        ge=1,
        description="Turns of the groups of so many last versions are kept; texts and tokens of older go. "
        "Absent: all are kept.",
    )
    export: str = Field(
        default="", description="Folder that gets what goes, as Parquet files, before it does; empty: none."
    )

    @model_validator(mode="after")
    def _something_goes(self) -> RetainConfig:
        if self.export and self.versions is None:
            raise ValueError("export writes what goes, and nothing does without versions: N")
        return self


class StoreConfig(BaseModel):
    """Settings of the durable store between rollout and training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(
        default=None, description="SQLAlchemy URL or a path; by default store.db in the run's folder."
    )
    durability: Durability = Field(
        default="process",
        description="'process': a commit survives the death of any process; 'power': a power cut too.",
    )
    retain: RetainConfig = Field(
        default_factory=RetainConfig,
        description="all, or {versions: N, export: FOLDER}: what of trained groups is kept.",
    )
    min_free_gb: float = Field(
        default=1.0,
        ge=0,
        description="Nothing new is submitted while a disk of the run has less free than this, and room for "
        "the next checkpoint and weights.",
    )

    @field_validator("retain", mode="before")
    @classmethod
    def _all_is_a_word(cls, value: object) -> object:
        if isinstance(value, str):
            if value != "all":
                raise ValueError(f"expected all, or {{versions: N}}, got {value!r}")
            return RetainConfig()
        return value
