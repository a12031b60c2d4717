"""The tree of an episode's model calls.

Each turn stores only the tokens it adds; a root-to-leaf path is exactly what the model saw and
sampled. A child's prompt is its parent's prompt, plus its parent's completion, plus
`new_prompt_ids`: true by construction, since nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import (
    Completion,
    Logprobs,
    SamplingParams,
    TokenIds,
    Versions,
    as_token_ids,
)
from areal_agents.core.messages import (
    Message,
    canonical_key,
    extend_digest,
    history_digests,
    reasoning_conflicts,
)

ForkReason = Literal[
    "new conversation",
    "edited",
    "reordered",
    "template strips reasoning",
    "template cannot extend",
    "tools changed",
    "context compacted",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a turn is a new root although the episode had turns already.

    Attributes:
        turn: id of the recorded turn with the longest common history, None if nothing is shared.
        reason: why its tokens could not be continued.
        diverged_at: index of the first message that is not shared.
    """

    turn: str | None
    reason: ForkReason
    diverged_at: int

    def __post_init__(self) -> None:
        if self.reason not in get_args(ForkReason):
            raise ValueError(f"unknown fork reason {self.reason!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call of the model: what was added to the prompt, and what was sampled.

    Attributes:
        id: unique; also the id of the completion that the client got.
        parent: id of the turn whose tokens this one continues, None for a root.
        new_messages: the messages added since the parent's reply.
        new_prompt_ids: [P] prompt tokens added since the parent's completion (all, for a root).
        completion: what the policy sampled.
        reply: the completion, parsed, as the client got it.
        sampling: the parameters it was drawn with.
        tools_id: digest of the tools that were offered.
        label: who called, for example a sub-agent; "" for the main agent.
        forked_from: set on a root that is not the first conversation of its episode.
        constrained: drawn under a grammar or with a sampling pin lifted (not trained by default).
        overrides: sampling fields of the request that were replaced by the pinned values.
    """

    id: str
    parent: str | None
    new_messages: tuple[Message, ...]
    new_prompt_ids: TokenIds
    completion: Completion
    reply: Message
    sampling: SamplingParams
    tools_id: str = ""
    label: str = ""
    forked_from: Fork | None = None
    constrained: bool = False
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "new_prompt_ids", as_token_ids(self.new_prompt_ids))
        if not self.id:
            raise ValueError("a turn needs an id")
        if not self.new_messages:
            raise ValueError(f"turn {self.id} adds no message to its conversation")
        if self.parent is None and not len(self.new_prompt_ids):
            raise ValueError(f"turn {self.id} is a root with an empty prompt")
        if self.parent is not None and self.forked_from is not None:
            raise ValueError(f"turn {self.id} continues {self.parent}, so it cannot also be a fork")
        if self.reply.role != "assistant":
            raise ValueError(f"the reply of a turn is an assistant message, got role {self.reply.role!r}")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a conversation goes on.

    Attributes:
        parent: the recorded turn whose reply it continues, None for a new root.
        new_messages: the messages after that reply (all of them for a new root).
        fork: why it is a new root, None if it has a parent or the episode was empty.
    """

    parent: Turn | None
    new_messages: tuple[Message, ...]
    fork: Fork | None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One root-to-leaf path, and its tokens in the order in which the model saw them."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a trajectory has at least one turn")
        for parent, turn in zip((None, *self.turns), self.turns, strict=False):
            if turn.parent != (parent.id if parent else None):
                raise ValueError(f"turn {turn.id} does not follow its parent {turn.parent}")

    @property
    def token_ids(self) -> TokenIds:
        """[L] prompt and sampled ids."""
        return self._concatenate(lambda t: t.new_prompt_ids, lambda t: t.completion.token_ids, np.int32)

    @property
    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        """[L] True where the token was sampled."""
        return self._concatenate(_zeros_prompt, lambda t: np.ones(len(t.completion)), np.bool_)

    @property
    def behavior_logprobs(self) -> Logprobs:
        """[L] behavior logprobs, 0 at prompt tokens."""
        return self._concatenate(_zeros_prompt, lambda t: t.completion.logprobs, np.float32)

    @property
    def versions(self) -> Versions:
        """[L] policy versions, -1 at prompt tokens."""
        return self._concatenate(lambda t: _zeros_prompt(t) - 1, lambda t: t.completion.versions, np.int32)

    @property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """[L] sampling temperature of each sampled token, 1 at prompt tokens."""
        return self._concatenate(
            lambda t: _zeros_prompt(t) + 1,
            lambda t: np.full(len(t.completion), t.sampling.temperature),
            np.float32,
        )

    @property
    def turn_index(self) -> npt.NDArray[np.int32]:
        """[L] index into `turns` of the turn that added each token."""
        sizes = [len(t.new_prompt_ids) + len(t.completion) for t in self.turns]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def _concatenate(self, prompt, completion, dtype):
        parts = [part(turn) for turn in self.turns for part in (prompt, completion)]
        return np.concatenate(parts).astype(dtype)


def _zeros_prompt(turn: Turn) -> npt.NDArray[np.float64]:
    return np.zeros(len(turn.new_prompt_ids))


class Forest:
    """The turns of one episode, indexed by the conversations they hold.

    Not thread-safe: one owner per episode records and searches.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[str, Turn] = {}
        self._children: dict[str, int] = {}
        self._after_reply: dict[bytes, list[str]] = {}  # digest of history + reply → turn ids
        self._digest: dict[str, bytes] = {}
        for turn in turns:
            self.record(turn)

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._turns

    def __getitem__(self, turn_id: str) -> Turn:
        return self._turns[turn_id]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn, in the order of recording."""
        return tuple(self._turns.values())

    def record(self, turn: Turn) -> None:
        """Add a turn. ValueError if its id is taken, or its parent is unknown or has other tools."""
        if turn.id in self._turns:
            raise ValueError(f"turn {turn.id} is recorded already")
        if turn.parent is None:
            digest = history_digests(turn.new_messages, turn.tools_id)[-1]
        else:
            if turn.parent not in self._turns:
                raise ValueError(f"turn {turn.id} continues {turn.parent}, which is not recorded")
            if self._turns[turn.parent].tools_id != turn.tools_id:
                raise ValueError(f"turn {turn.id} offers other tools than its parent {turn.parent}")
            digest = self._digest[turn.parent]
            for message in turn.new_messages:
                digest = extend_digest(digest, message)
        digest = extend_digest(digest, turn.reply)
        self._turns[turn.id] = turn
        self._digest[turn.id] = digest
        self._after_reply.setdefault(digest, []).append(turn.id)
        if turn.parent is not None:
            self._children[turn.parent] = self._children.get(turn.parent, 0) + 1

    def continuation(self, messages: Sequence[Message], tools_id: str = "") -> Continuation:
        """The recorded turn that `messages` goes on from, or the reason why there is none.

        The longest recorded history wins. Among siblings whose replies read the same, the one whose
        tool-call ids are replayed wins, then the latest.
        """
        digests = history_digests(messages, tools_id)
        for index in range(len(messages) - 2, -1, -1):
            if messages[index].role != "assistant":
                continue
            candidates = [self._turns[i] for i in self._after_reply.get(digests[index], ())]
            parent = _choose(candidates, messages[index])
            if parent is not None:
                return Continuation(parent, tuple(messages[index + 1 :]), None)
        return Continuation(None, tuple(messages), self._explain(messages, tools_id))

    def fork(
        self, parent: Turn, messages: Sequence[Message], new_messages: Sequence[Message], reason: ForkReason
    ) -> Continuation:
        """A continuation that starts a new root although `parent` was found."""
        return Continuation(None, tuple(messages), Fork(parent.id, reason, len(messages) - len(new_messages)))

    def path(self, turn_id: str) -> Trajectory:
        """The trajectory from the root to `turn_id`. KeyError if it is unknown."""
        turns = [self._turns[turn_id]]
        while turns[-1].parent is not None:
            turns.append(self._turns[turns[-1].parent])
        return Trajectory(tuple(reversed(turns)))

    def prompt_ids(self, turn_id: str) -> TokenIds:
        """[P] the whole prompt of a turn, as it was sent to the engine."""
        path = self.path(turn_id).token_ids
        return path[: len(path) - len(self._turns[turn_id].completion)]

    def history(self, turn_id: str) -> tuple[Message, ...]:
        """The messages that a turn answered, oldest first, its own reply not included."""
        turns = self.path(turn_id).turns
        earlier = [m for turn in turns[:-1] for m in (*turn.new_messages, turn.reply)]
        return (*earlier, *turns[-1].new_messages)

    def leaves(self) -> tuple[Turn, ...]:
        """The turns that no other turn continues."""
        return tuple(turn for turn in self._turns.values() if turn.id not in self._children)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory per leaf."""
        return tuple(self.path(leaf.id) for leaf in self.leaves())

    def _explain(self, messages: Sequence[Message], tools_id: str) -> Fork | None:
        if not self._turns:
            return None
        keys = [canonical_key(message) for message in messages]
        best, shared = None, 0
        for leaf in self.leaves():
            turn, common = _common_history(self.path(leaf.id).turns, messages, keys)
            if common > shared:
                best, shared = turn, common
        if best is None or (shared == 1 and messages[0].role == "system"):
            return Fork(None, "new conversation", shared)
        if best.tools_id != tools_id:
            return Fork(best.id, "tools changed", shared)
        if shared == len(messages):
            return Fork(best.id, "unknown", shared)
        return Fork(best.id, "edited", shared)


def _choose(candidates: Sequence[Turn], replayed: Message) -> Turn | None:
    fitting = [turn for turn in candidates if not reasoning_conflicts(replayed, turn.reply)]
    ids = [call.id for call in replayed.tool_calls]
    same_ids = [turn for turn in fitting if [call.id for call in turn.reply.tool_calls] == ids]
    chosen = same_ids or fitting
    return chosen[-1] if chosen else None


def _common_history(
    turns: Sequence[Turn], messages: Sequence[Message], keys: Sequence[str]
) -> tuple[Turn, int]:
    """The turn of a path that holds the last message shared with a conversation, and how many are shared."""
    reached, count = turns[0], 0
    for turn in turns:
        for recorded in (*turn.new_messages, turn.reply):
            if count == len(keys) or canonical_key(recorded) != keys[count]:
                return reached, count
            if reasoning_conflicts(messages[count], recorded):
                return reached, count
            reached, count = turn, count + 1
    return reached, count
