"""Settings of replay: whether trained groups are trained on again within the staleness bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_agents.algorithms.parts import Part


class NoReplay(Part):
    """Each group is trained on once."""

    kind: Literal["none"] = "none"


class RecentReplay(Part):
    """Groups on which earlier batches were trained are added to a batch, the most recently submitted first.

    The weight π_prox/μ corrects for the age of their tokens, which `rollout.max_staleness` bounds.
    """

    kind: Literal["recent"] = "recent"
    replay_groups: int = Field(default=4, ge=1, description="Largest number of reused groups in a batch.")
    replay_uses: int = Field(
        default=2,
        ge=2,
        description="Maximum number of times that a group is trained on, including the first time.",
    )


Replay = Annotated[NoReplay | RecentReplay, Field(discriminator="kind")]
