"""The turns of one episode, and the search for the turn that a conversation continues.

A replayed reply is recognised by its meaning (see `Message.digest`), or by the handle or the tool-call ids
that it got. A message that names a recorded reply but differs from it never continues that turn: the
conversation branches there, as an edit. Neither the loss of the text beside calls is an edit, nor arguments
that a client adds with the default values that the tools declare.

Volatile text does not count when conversations are compared. The model reads it as it was first recorded at
its place in the conversation (see `Forest.as_first_seen`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_agents.core.completion import TokenIds
from areal_agents.core.forks import explain
from areal_agents.core.messages import (
    Message,
    ToolDefaults,
    adds_only_defaults,
    defaults_of_tools,
    empty_history,
    extend_digest,
    extend_prompt,
    reasoning_conflicts,
)
from areal_agents.core.trajectory import Continuation, Fork, ForkReason, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class _Followed:
    """The result of searching a conversation's first messages, with which a later request probably begins."""

    messages: tuple[Message, ...]
    tools_id: str
    digest: bytes
    last: Turn | None = None  # the last turn recognised in them
    parent: Turn | None = None  # the turn that following messages continue
    reached: int = 0  # the number of messages through the parent's reply
    edited: Fork | None = None


class Forest:
    """The turns of one episode, indexed by their conversations.

    Not thread-safe: a single owner records and searches.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[str, Turn] = {}
        self._children: dict[str, int] = {}
        self._answering: dict[bytes, list[str]] = {}  # digest of a conversation → turns that answered it
        self._after_reply: dict[bytes, list[str]] = {}  # digest of conversation and reply → turn ids
        self._before: dict[str, bytes] = {}  # turn id → digest of the conversation that it answered
        self._after: dict[str, bytes] = {}  # turn id → digest of that conversation and the reply
        self._by_call: dict[str, str] = {}  # tool-call id → turn id
        self._defaults: dict[str, ToolDefaults] = {}  # tools_id → what these tools declare, once searched for
        # The last message of a conversation, if that is volatile, by the digest of the conversation.
        self._first_seen: dict[bytes, Message] = {}
        self._followed: _Followed | None = None  # all messages but the last of the latest conversation
        self._end = b""  # digest of that conversation with its last message
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
            raise ValueError(f"turn {turn.id} is already recorded")
        if turn.parent is None:
            digest = empty_history(turn.tools_id)
        elif turn.parent not in self._turns:
            raise ValueError(f"turn {turn.id} continues {turn.parent}, which is not recorded")
        elif self._turns[turn.parent].tools_id != turn.tools_id:
            raise ValueError(f"turn {turn.id} must offer the same tools as its parent {turn.parent}")
        else:
            digest = self._after[turn.parent]
            self._children[turn.parent] = self._children.get(turn.parent, 0) + 1
        last = self._turns.get(turn.parent or "")
        # The messages are read as in `continuation`, which would otherwise not find this turn again.
        for message in turn.new_messages:
            known = self._recognised(digest, message, last, turn.tools_id)
            last = known or last
            digest = extend_prompt(digest, message) if known is None else self._after[known.id]
            if message.volatile:
                self._first_seen.setdefault(digest, message)
        if digest != self._end:  # a turn that answers the latest conversation changes nothing in `_followed`
            self._followed = None
        after = extend_digest(digest, turn.reply)
        self._turns[turn.id] = turn
        self._before[turn.id], self._after[turn.id] = digest, after
        self._answering.setdefault(digest, []).append(turn.id)
        self._after_reply.setdefault(after, []).append(turn.id)
        for call in turn.reply.tool_calls:
            self._by_call[call.id] = turn.id

    def continuation(
        self,
        messages: Sequence[Message],
        tools_id: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Continuation:
        """The recorded turn that `messages` continues, or the reason why there is none.

        The longest recorded history wins. Among siblings with equal replies, the one that the client names by
        its handle or its tool-call ids wins, then the latest. A reply whose calls are the recorded ones,
        including their ids, is recognised without its text, which some clients drop. So is one to whose
        calls a client added arguments with the defaults of `tools`.
        """
        self._learn_defaults(tools_id, tools)
        known = self._known(messages, tools_id)
        digest, last, edited = known.digest, known.last, known.edited
        parent, reached = known.parent, known.reached
        for index in range(len(known.messages), len(messages)):
            message, before = messages[index], digest
            if index == len(messages) - 1:
                known = _Followed(tuple(messages[:-1]), tools_id, digest, last, parent, reached, edited)
            turn = self._recognised(before, message, last, tools_id)
            if turn is not None:
                last, digest = turn, self._after[turn.id]
                if index < len(messages) - 1:
                    parent, reached = turn, index + 1
                continue
            digest = extend_prompt(before, message)
            if message.role == "assistant" and edited is None:
                edited = self._edited(before, message, index)
        self._followed, self._end = known, digest
        if parent is not None:
            return Continuation(parent, tuple(messages[reached:]), None)
        return Continuation(None, tuple(messages), edited or self._explain(messages, tools_id, digest))

    def as_first_seen(
        self,
        messages: Sequence[Message],
        tools_id: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[tuple[Message, ...], int]:
        """A conversation with its volatile text as first recorded, and the number of texts that differed.

        A message was recorded before if everything before it and all but its volatile text is the same.
        """
        self._learn_defaults(tools_id, tools)
        digest, last, replaced = empty_history(tools_id), None, 0
        out = list(messages)
        ends = [index + 1 for index, message in enumerate(messages) if message.volatile]
        for index, message in enumerate(messages[: ends[-1]] if ends else ()):
            turn = self._recognised(digest, message, last, tools_id)
            last = turn or last
            digest = extend_prompt(digest, message) if turn is None else self._after[turn.id]
            first = self._first_seen.get(digest) if message.volatile else None
            if first is not None and first.content != message.content:
                out[index] = replace(message, content=first.content, volatile=first.volatile)
                replaced += sum(map(operator.ne, first.volatile_texts, message.volatile_texts))
        return tuple(out), replaced

    def answers(
        self,
        messages: Sequence[Message],
        tools_id: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[Turn, ...]:
        """The turns that answered exactly this conversation, in the order of recording."""
        self._learn_defaults(tools_id, tools)
        digest, last = empty_history(tools_id), None
        for message in messages:
            turn = self._recognised(digest, message, last, tools_id)
            last = turn or last
            digest = extend_prompt(digest, message) if turn is None else self._after[turn.id]
        return tuple(self._turns[turn_id] for turn_id in self._answering.get(digest, ()))

    def fork(
        self, parent: Turn, messages: Sequence[Message], new_messages: Sequence[Message], reason: ForkReason
    ) -> Continuation:
        """A continuation that starts a new root although `parent` was found."""
        return Continuation(None, tuple(messages), Fork(parent.id, reason, len(messages) - len(new_messages)))

    def rewritten(
        self, parent: Turn, messages: Sequence[Message], new_messages: Sequence[Message], tools_id: str = ""
    ) -> Continuation:
        """A continuation that starts a new root although `parent` was found, because the client put replies
        behind it that are not recorded there: replies of its own, or recorded ones in another order."""
        fork = explain(self.trajectories(), messages, tools_id)
        if fork.reason in ("reordered", "context compacted"):
            return Continuation(None, tuple(messages), fork)
        return self.fork(parent, messages, new_messages, "edited")

    def path(self, turn_id: str) -> Trajectory:
        """The trajectory from the root to `turn_id`. KeyError if it is unknown."""
        turns = [self._turns[turn_id]]
        while turns[-1].parent is not None:
            turns.append(self._turns[turns[-1].parent])
        return Trajectory(tuple(reversed(turns)))

    def context(self, turn_id: str) -> TokenIds:
        """[L] all tokens that the model read and sampled up to the end of a turn."""
        parts: list[TokenIds] = []
        turn: Turn | None = self._turns[turn_id]
        while turn is not None:
            parts += (turn.completion.token_ids, turn.new_prompt_ids)
            turn = self._turns[turn.parent] if turn.parent is not None else None
        return np.concatenate(parts[::-1])

    def prompt_ids(self, turn_id: str) -> TokenIds:
        """[P] the whole prompt of a turn, as it was sent to the engine."""
        context = self.context(turn_id)
        return context[: len(context) - len(self._turns[turn_id].completion)]

    def history(self, turn_id: str) -> tuple[Message, ...]:
        """The messages that a turn answered, oldest first, without its own reply."""
        turns = self.path(turn_id).turns
        earlier = [m for turn in turns[:-1] for m in (*turn.new_messages, turn.reply)]
        return (*earlier, *turns[-1].new_messages)

    def leaves(self) -> tuple[Turn, ...]:
        """The turns that no other turn continues."""
        return tuple(turn for turn in self._turns.values() if turn.id not in self._children)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory per leaf."""
        return tuple(self.path(leaf.id) for leaf in self.leaves())

    def _known(self, messages: Sequence[Message], tools_id: str) -> _Followed:
        """The stored result for the beginning of `messages`, without the last; empty if there is none.

        The proxy reads replayed messages into the same objects at every call, so comparing identities is
        cheap. Equality would not suffice, because the handles of equal messages may differ.
        """
        known = self._followed
        if (
            known is None
            or known.tools_id != tools_id
            or len(known.messages) >= len(messages)
            or not all(map(operator.is_, known.messages, messages))
        ):
            return _Followed((), tools_id, empty_history(tools_id))
        return known

    def _learn_defaults(self, tools_id: str, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and tools_id not in self._defaults:
            self._defaults[tools_id] = defaults_of_tools(tools)

    def _recognised(self, before: bytes, message: Message, last: Turn | None, tools_id: str) -> Turn | None:
        """The turn whose reply `message` is, after the conversation with digest `before`; None without one.

        `last` is the turn recognised before this message.
        """
        if message.role != "assistant":
            return None
        turn_ids = self._after_reply.get(extend_digest(before, message), ())
        if turn_ids:
            return _choose([self._turns[turn_id] for turn_id in turn_ids], message, last)
        claimed = self._claimed(before, message)
        if claimed is None:
            return None
        defaults = self._defaults.get(tools_id, {})
        is_same = _lost_only_text(message, claimed.reply) or (
            bool(defaults) and adds_only_defaults(message, claimed.reply, defaults)
        )
        return claimed if is_same else None

    def _edited(self, before: bytes, message: Message, index: int) -> Fork | None:
        """The fork at a message that names a turn but differs from its reply; None if it names none."""
        claimed = self._claimed(before, message)
        return Fork(claimed.id, "edited", index) if claimed is not None else None

    def _claimed(self, before: bytes, message: Message) -> Turn | None:
        """The turn that a message names by its handle or by the ids of its calls, after the same history."""
        turn_ids = {self._by_call.get(call.id) for call in message.tool_calls}
        turn_id = message.handle or (turn_ids.pop() if len(turn_ids) == 1 else None)
        if turn_id not in self._turns or self._before[turn_id] != before:
            return None
        return self._turns[turn_id]

    def _explain(self, messages: Sequence[Message], tools_id: str, digest: bytes) -> Fork | None:
        if not self._turns:
            return None
        if same := self._answering.get(digest):
            return Fork(same[-1], "resampled", len(messages))
        return explain(self.trajectories(), messages, tools_id)


def _choose(candidates: Sequence[Turn], replayed: Message, last: Turn | None) -> Turn | None:
    """Choose among turns with equal replies: one that the message names, else one that continues `last`."""
    if len(candidates) == 1:  # nearly always; this runs for every reply of a conversation
        return None if reasoning_conflicts(replayed, candidates[0].reply) else candidates[0]
    fitting = [turn for turn in candidates if not reasoning_conflicts(replayed, turn.reply)]
    named = [turn for turn in fitting if turn.id == replayed.handle]
    ids = [call.id for call in replayed.tool_calls]
    same_ids = [turn for turn in fitting if [call.id for call in turn.reply.tool_calls] == ids]
    chosen = named or same_ids or fitting
    following = [turn for turn in chosen if last is not None and turn.parent == last.id]
    best = following or chosen
    return best[-1] if best else None


def _lost_only_text(replayed: Message, recorded: Message) -> bool:
    """Whether a message is a recorded reply with calls whose text the client dropped."""
    if replayed.content.strip() or not recorded.tool_calls or reasoning_conflicts(replayed, recorded):
        return False
    without_text = Message("assistant", tool_calls=recorded.tool_calls)
    ids = [call.id for call in replayed.tool_calls]
    return replayed.digest == without_text.digest and ids == [call.id for call in recorded.tool_calls]
