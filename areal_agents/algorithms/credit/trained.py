"""Chooses the turns of an episode that carry a gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn

Excluded = Literal["truncated", "constrained", "discarded", "aborted", "label", "greedy"]

_GREEDY_BELOW = 1e-5  # engines sample greedily below it: vLLM below 1e-5, SGLang below 1e-6


@dataclass(frozen=True, slots=True)
class TrainedTurns:
    """The rule that says which turns are trained.

    Attributes:
        constrained: train turns that were sampled under a grammar or with a sampling pin lifted.
        greedy: train turns sampled at temperature 0, which have no sampling distribution; for losses that
            do not need one.
        truncated: train the turns of truncated episodes.
        exclude_labels: patterns of labels whose turns are not trained; "sub-agent/*" is every sub-agent.
    """

    constrained: bool = False
    greedy: bool = False
    truncated: bool = True
    exclude_labels: Collection[str] = ()

    def of(self, episode: RecordedEpisode) -> list[Turn]:
        """The turns of an episode that are trained, in recording order."""
        return [turn for turn in episode.turns if self.excluded(turn, episode) is None]

    def includes(self, turn: Turn) -> bool:
        """Whether the sampled tokens of a turn carry a gradient, whatever its episode."""
        return self.excluded(turn) is None

    def excluded(self, turn: Turn, episode: RecordedEpisode | None = None) -> Excluded | None:
        """The reason why the sampled tokens of a turn carry no gradient; None if they do.

        A turn whose call was aborted, or whose client disconnected, is not trained, because the agent never
        received it.
        """
        if episode is not None and episode.status == "truncated" and not self.truncated:
            return "truncated"
        if turn.constrained and not self.constrained:
            return "constrained"
        if turn.discarded:
            return "discarded"
        if turn.completion.finish_reason == "abort":
            return "aborted"
        if any(fnmatchcase(turn.label, pattern) for pattern in self.exclude_labels):
            return "label"
        if not self.greedy and turn.sampling.temperature < _GREEDY_BELOW:
            return "greedy"
        return None
