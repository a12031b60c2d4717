"""Anchors: values that represent a turn's input before it was sampled, by which turns are compared.

Turns of one group with equal anchors were sampled in the same situation, so their returns can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode

TurnAnchor = Literal["observation", "prompt", "label", "position"]
Anchor = bytes | str | int


def turn_anchors(episode: RecordedEpisode, by: TurnAnchor) -> tuple[Anchor, ...]:
    """The anchor of each turn of an episode, [T] in recording order.

    Args:
        by: "observation": the messages after the last reply in the turn's prompt, or all messages if there is
            no reply yet; two messages are the same if their canonical keys are equal (ids of tool calls do
            not count). "prompt": the token ids of the whole prompt. "label": the label of the turn.
            "position": its index in recording order.
    """
    if by == "observation":
        return tuple(_digest_of(_observation(turn.new_messages)) for turn in episode.turns)
    if by == "prompt":
        return _prompt_digests(episode)
    if by == "label":
        return tuple(turn.label for turn in episode.turns)
    return tuple(range(len(episode.turns)))


def _observation(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages after the last reply. An assistant message at the end is a prefix that the turn continues,
    so it is part of the input."""
    end = len(messages)
    while end and messages[end - 1].role == "assistant":
        end -= 1
    start = end
    while start and messages[start - 1].role != "assistant":
        start -= 1
    return messages[start:]


def _digest_of(messages: Sequence[Message]) -> bytes:
    return hashlib.blake2b(b"".join(message.digest for message in messages), digest_size=16).digest()


def _prompt_digests(episode: RecordedEpisode) -> tuple[bytes, ...]:
    """The digest of each turn's prompt, continued from the digest of its parent's prompt and completion."""
    after: dict[str, hashlib.blake2b] = {}
    digests = []
    for turn in episode.turns:
        state = hashlib.blake2b(digest_size=16) if turn.parent is None else after[turn.parent].copy()
        state.update(turn.new_prompt_ids.tobytes())
        digests.append(state.digest())
        state.update(turn.completion.token_ids.tobytes())
        after[turn.id] = state
    return tuple(digests)
