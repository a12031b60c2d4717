"""Whether trained groups are trained on again, while they are within the staleness bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_agents.algorithms.parts import Part


class NoReplay(Part):
    """Each group is trained on once."""

    kind: Literal["none"] = "none"


class RecentReplay(Part):
    """A batch takes some groups more, which earlier batches were trained on: the newest first.

    The weight π_prox/μ corrects for their age as for that of any token, bounded by `rollout.max_staleness`.
    """

    kind: Literal["recent"] = "recent"
    replay_groups: int = Field(default=4, ge=1, description="Reused groups in a batch, at most.")
    replay_uses: int = Field(
        default=2, ge=2, description="How often a group is trained on at most, its first time included."
    )


Replay = Annotated[NoReplay | RecentReplay, Field(discriminator="kind")]
