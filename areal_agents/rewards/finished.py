"""What a reward function is given: an episode that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """An episode whose agent has ended.

    Attributes:
        id: the id of the episode.
        task: the task, as the agent got it.
        branches: every conversation of the episode, in the order in which their last replies were recorded; a
            message is a dict in the form of chat completions. An episode without a model call has none.
        status: "finished", or "truncated" if a limit ended the episode.
        rewards: the rewards that the agent gave, by name; rewards of single turns are not among them.
        completions: of every message of `branches`, the completion id by which its turn is rewarded, or None
            if the policy did not sample it. Empty for an episode that was not recorded by a proxy.
        workdir: the folder in which a command-line agent worked, as it left it; it is removed when the
            function has returned. None for other agents, and in a function of a group.
    """

    id: str
    task: Mapping[str, Any]
    branches: Sequence[Sequence[Mapping[str, Any]]]
    status: str
    rewards: Mapping[str, float]
    workdir: Path | None = None
    completions: Sequence[Sequence[str | None]] = ()

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation whose reply was recorded last; empty without a model call."""
        return self.branches[-1] if self.branches else ()

    @property
    def answer(self) -> str:
        """The text of the last reply; empty if it has none."""
        content = self.messages[-1].get("content") if self.messages else None
        return content if isinstance(content, str) else ""
