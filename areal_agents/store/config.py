"""Where the store lives, and how durable a commit is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Durability = Literal["process", "power"]


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
