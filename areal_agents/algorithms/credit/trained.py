"""Chooses the turns of an episode that carry a gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn

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
        if episode.status == "truncated" and not self.truncated:
            return []
        return [turn for turn in episode.turns if self.includes(turn)]

    def includes(self, turn: Turn) -> bool:
        """Whether the sampled tokens of a turn carry a gradient, whatever its episode.

        A turn whose call was aborted, or whose client disconnected, is not trained, because the agent never
        received it.
        """
        if turn.constrained and not self.constrained:
            return False
        if turn.discarded or turn.completion.finish_reason == "abort":
            return False
        if any(fnmatchcase(turn.label, pattern) for pattern in self.exclude_labels):
            return False
        return self.greedy or turn.sampling.temperature >= _GREEDY_BELOW
