"""The continuations of a recorded turn that `areal-agents fork` has sampled, compared with the recorded one.

Forks are episodes in a separate store. Their metadata name the episode and the turn that they leave:

    forked_from   the id of the recorded episode
    turn_id, turn the recorded turn that is sampled again, and its number in that episode, from 1
    given         how many turns of the fork are copies of recorded ones
    fork          the number of the continuation, from 1
    policy, seed  the weights, as they were named, and the seed of all continuations
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import EpisodeRow, Store

LONGEST_REPLY = 200  # characters of a reply that are kept


@dataclass(frozen=True, slots=True)
class Leaving:
    """The first place where a continuation differs from the recorded one.

    Attributes:
        turn: the number of the turn in the recorded episode.
        token: the index of the sampled token; None: the request of the turn differs, or only one of the two
            has such a turn.
    """

    turn: int
    token: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed a turn: in a fork or, with number 0, in the recorded episode.

    Attributes:
        episode: the id of the episode.
        status: that of the episode.
        error: why the fork failed, so that its score does not count; None if it did not.
        score: the sum of the rewards; None without any.
        turns, tokens: the number of calls and of sampled tokens, from the forked turn on.
        logprob: the sum of the logprobs of these tokens, in nats; None if they were imported.
        reply: the beginning of the reply of the forked turn.
        leaves: where it first differs from the recorded continuation; None: nowhere.
        logprobs: the text and the logprob, in nats, of each token of the forked turn; () if not requested.
    """

    number: int
    episode: str
    status: str
    error: str | None
    score: float | None
    turns: int
    tokens: int
    logprob: float | None
    reply: str
    leaves: Leaving | None
    logprobs: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Forks:
    """The continuations of one turn.

    Attributes:
        episode, turn: the recorded episode, and the number of the turn in it, from 1.
        temperature: the temperature at which the turn was sampled again.
        store: the file that has the forks.
    """

    episode: str
    turn: int
    policy: str
    seed: int
    temperature: float
    recorded: Continuation
    continuations: Sequence[Continuation]
    store: str

    @property
    def mean_score(self) -> float | None:
        """The mean score of the continuations that did not fail; None if none of them has one."""
        scores = [c.score for c in self.continuations if c.score is not None and c.error is None]
        return math.fsum(scores) / len(scores) if scores else None


@dataclass(frozen=True, slots=True, eq=False)
class ForkedTurn:
    """A recorded turn that is sampled again.

    Attributes:
        number: its number among all turns of the episode, from 1.
    """

    row: EpisodeRow
    episode: RecordedEpisode
    number: int

    @property
    def turn(self) -> Turn:
        """The turn."""
        return self.episode.turns[self.number - 1]

    @property
    def before(self) -> dict[int, Turn]:
        """The turns that a fork repeats, by number: the earlier ones that reached the agent, and parents."""
        turns = self.episode.turns[: self.number]
        needed: set[str] = set()
        for turn in reversed(turns):  # a parent comes before its children
            if turn is turns[-1] or turn.id in needed or not turn.discarded:
                needed |= {turn.id, *([turn.parent] if turn.parent is not None else [])}
        return {n: turn for n, turn in enumerate(turns[:-1], 1) if turn.id in needed}

    def continuation(self) -> Continuation:
        """Return what followed in the recorded episode."""
        turns = [turn for turn in self.episode.turns[self.number - 1 :] if not turn.discarded]
        return continuation_of(
            0, self.episode, turns, status=self.row.status, error=self.row.error, leaves=None
        )


def forked_turn(store: Store, episode_id: str, name: str) -> ForkedTurn:
    """Return the turn of an episode that a number, from 1, or an id names.

    Raises:
        NotFound: there is no such episode.
        ConfigError: there is no such turn, its texts were deleted, or it never reached the agent.
    """
    row, episode = store.episode_row(episode_id), store.load_episode(episode_id)
    ids = [turn.id for turn in episode.turns]
    if not ids:
        raise ConfigError(f"episode {episode_id} has no turn; its turns may have been deleted (store.retain)")
    if name in ids:
        number = ids.index(name) + 1
    elif name.isdecimal() and 1 <= int(name) <= len(ids):
        number = int(name)
    else:
        raise ConfigError(
            f"--turn: episode {episode_id} has the turns 1 to {len(ids)}, got {name}; give a number or an id"
        )
    found = ForkedTurn(row, episode, number)
    if found.turn.discarded:
        raise ConfigError(
            f"--turn: turn {number} never reached the agent ({found.turn.discarded}), so nothing followed it"
        )
    return found


def continuation_of(
    number: int,
    episode: RecordedEpisode,
    turns: Sequence[Turn],
    *,
    status: str,
    error: str | None,
    leaves: Leaving | None,
    logprobs: Sequence[tuple[str, float]] = (),
) -> Continuation:
    """Return a continuation whose turns, from the forked one on, are `turns`."""
    first = turns[0].reply if turns else None
    calls = [f"{call.name}({call.arguments})" for call in first.tool_calls] if first is not None else []
    text = "" if first is None else " ".join([first.content, *calls]).strip()
    return Continuation(
        number=number,
        episode=episode.id,
        status=status,
        error=error,
        score=episode.score if episode.rewards else None,
        turns=len(turns),
        tokens=sum(len(turn.completion) for turn in turns),
        logprob=_sum_of_logprobs(turns),
        reply=text[:LONGEST_REPLY],
        leaves=leaves,
        logprobs=logprobs,
    )


def _sum_of_logprobs(turns: Sequence[Turn]) -> float | None:
    if any(turn.completion.is_imported for turn in turns):
        return None
    return math.fsum(float(turn.completion.behavior_logprobs.sum(dtype=np.float64)) for turn in turns)


def first_leaving(recorded: Sequence[Turn], turns: Sequence[Turn], *, number: int) -> Leaving | None:
    """Return where `turns` leave the recorded ones, both from turn `number` on; None if they are the same."""
    for index in range(max(len(recorded), len(turns))):
        if index >= len(recorded) or index >= len(turns):
            return Leaving(number + index, None)
        then, now = recorded[index], turns[index]
        if not np.array_equal(then.new_prompt_ids, now.new_prompt_ids):
            return Leaving(number + index, None)
        ids, other = then.completion.token_ids, now.completion.token_ids
        shared = min(len(ids), len(other))
        differing = np.flatnonzero(ids[:shared] != other[:shared])
        if len(differing) or len(ids) != len(other):
            return Leaving(number + index, int(differing[0]) if len(differing) else shared)
    return None


def forks_folder(run: Path) -> RunFolder:
    """Return the folder that has the forks of a run, or of a store file, by default."""
    return RunFolder((run if run.is_dir() else run.parent).resolve() / "forks")


def metadata_of(forked: ForkedTurn, *, given: int, number: int, policy: str, seed: int) -> dict[str, Any]:
    """Return the metadata of a fork."""
    return {
        "forked_from": forked.episode.id,
        "turn": forked.number,
        "turn_id": forked.turn.id,
        "given": given,
        "fork": number,
        "policy": policy,
        "seed": seed,
    }
