"""Determines why a conversation continues no recorded turn, as one of a few fixed reasons."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

from areal_agents.core.messages import Message, reasoning_conflicts
from areal_agents.core.trajectory import Fork, ForkReason, Trajectory, Turn


def explain(trajectories: Sequence[Trajectory], messages: Sequence[Message], tools_id: str) -> Fork:
    """The fork of a conversation that continues none of the recorded ones.

    The conversation is compared with the recorded path with which it shares the longest prefix.
    """
    best, path, shared = None, trajectories[0], 0
    for trajectory in trajectories:
        turn, common = _common_history(trajectory.turns, messages)
        if common > shared:
            best, path, shared = turn, trajectory, common
    if best is None or (shared == 1 and messages[0].role == "system"):
        return _without_common_history(trajectories, messages, shared)
    if best.tools_id != tools_id:
        return Fork(best.id, "tools changed", shared)
    return Fork(best.id, _moved(path, messages, shared) or _changed(path, messages, shared), shared)


def _without_common_history(
    trajectories: Sequence[Trajectory], messages: Sequence[Message], shared: int
) -> Fork:
    """The fork of a conversation that shares at most a system prompt with the beginning of any path.

    A reply that the client sends back shows that it continues a recorded conversation, whatever precedes the
    reply. A user's message does not: auxiliary calls, for a title or a summary, have it too.
    """
    said = {message.digest for message in messages if message.role == "assistant"}
    called = {call.id for message in messages for call in message.tool_calls}
    if not shared and not said and not called:  # what follows looks at every path, and an episode may have
        return Fork(None, "new conversation", 0)  # thousands: of sub-agents that are asked once each
    asked = {message.digest for message in messages if message.role != "system"}
    path = max(trajectories, key=lambda path: (_kept_replies(path, said, called), _overlap(path, asked)))
    moved = _moved(path, messages, shared)
    if _kept_replies(path, said, called):
        return Fork(path.turns[0].id, moved or "edited", shared)
    if shared and moved == "context compacted":
        return Fork(path.turns[0].id, moved, shared)
    return Fork(None, "new conversation", shared)


def _kept_replies(path: Trajectory, said: Set[bytes], called: Set[str]) -> int:
    """The number of replies of a path that a conversation has, by their meaning or by their call ids."""
    replies = [turn.reply for turn in path.turns]
    return sum(
        reply.digest in said or any(call.id in called for call in reply.tool_calls) for reply in replies
    )


def _changed(path: Trajectory, messages: Sequence[Message], shared: int) -> ForkReason:
    """The reason if nothing was moved: "edited" if the first unshared messages have the same role."""
    recorded = [message for turn in path.turns for message in (*turn.new_messages, turn.reply)][shared:]
    if recorded and messages[shared:] and recorded[0].role == messages[shared].role:
        return "edited"
    return "unknown"  # the recorded message is gone, and another one is in its place


def _moved(path: Trajectory, messages: Sequence[Message], shared: int) -> ForkReason | None:
    """How the rest of a recorded path was moved within a conversation; None if too little of it remains."""
    recorded = _digests(path)[shared:]
    kept = _kept(recorded, [message.digest for message in messages[shared:]])
    if not kept:
        return None
    if any(before[0] > after[0] for before, after in pairwise(kept)):
        return "reordered"
    if len(kept) == len(recorded):
        return "edited" if len(kept) > 1 else None  # messages were inserted
    if all(place > index for place, index in kept):
        return "context compacted"  # later messages are in the place of dropped or summarised ones
    return "edited" if len(kept) > 1 else None


def _kept(recorded: Sequence[bytes], rest: Sequence[bytes]) -> list[tuple[int, int]]:
    """The messages that both have, as (index in `recorded`, index in `rest`), in the order of `rest`.

    Of equal messages, the first in `rest` is the first in `recorded`, and so on.
    """
    places: dict[bytes, list[int]] = {}
    for index in reversed(range(len(recorded))):
        places.setdefault(recorded[index], []).append(index)
    return [(places[digest].pop(), index) for index, digest in enumerate(rest) if places.get(digest)]


def _overlap(path: Trajectory, asked: Set[bytes]) -> int:
    return len(set(_digests(path)) & asked)


def _digests(path: Trajectory) -> list[bytes]:
    return [message.digest for turn in path.turns for message in (*turn.new_messages, turn.reply)]


def _common_history(turns: Sequence[Turn], messages: Sequence[Message]) -> tuple[Turn, int]:
    """The turn of a path with the last message shared with a conversation, and the number of shared ones."""
    reached, count = turns[0], 0
    for turn in turns:
        for recorded in (*turn.new_messages, turn.reply):
            if count == len(messages) or recorded.digest != messages[count].digest:
                return reached, count
            if reasoning_conflicts(messages[count], recorded):
                return reached, count
            reached, count = turn, count + 1
    return reached, count
