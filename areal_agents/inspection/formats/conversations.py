"""Conversations as other trainers read them: messages of OpenAI, and rows of TRL for SFT and for preferences.

A conversation is kept whole and as the agent had it; what the policy sampled are its assistant messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from areal_agents.core.conversations import conversations

_OF_OPENAI = ("role", "content", "tool_calls", "tool_call_id", "name")


def messages_rows(episode: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row of OpenAI's format for fine-tuning for each conversation; it has no place for reasoning."""
    for conversation in conversations(episode["turns"]):
        kept = [{k: m[k] for k in _OF_OPENAI if m.get(k) is not None} for m in conversation]
        yield {"messages": kept}


def sft_rows(episode: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each conversation: `messages`, and where it is from."""
    for conversation in conversations(episode["turns"]):
        yield {"messages": [_full(message) for message in conversation], **_origin(episode)}


def preference_rows(episodes: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a pair for each group, or task of episodes without a group, whose scores differ.

    `prompt` has the messages before the first reply, `chosen` the rest of the last conversation of the best
    episode, `rejected` that of the worst; among equals the first. Two episodes that do not begin with the
    same messages cannot be compared, and make no pair.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for episode in episodes:
        if episode["score"] is not None and episode["turns"]:
            key = episode["group"] or f"task/{episode['task']['id']}"
            groups.setdefault(key, []).append(episode)
    for group in groups.values():
        best = max(group, key=lambda episode: episode["score"])
        worst = min(group, key=lambda episode: episode["score"])
        if best["score"] == worst["score"]:
            continue
        (prompt, chosen), (other, rejected) = _split(best), _split(worst)
        if prompt == other:
            yield {
                "prompt": prompt,
                "chosen": chosen,
                "rejected": rejected,
                "score_chosen": best["score"],
                "score_rejected": worst["score"],
                "task": best["task"]["id"],
            }


def _split(episode: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages before the first reply of the last conversation, and the others."""
    messages = [_full(message) for message in conversations(episode["turns"])[-1]]
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:first], messages[first:]


def _full(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the same fields as every other one, as the columns of a data set need them."""
    content = message.get("content")
    return {
        "role": message["role"],
        "content": content if isinstance(content, str) else None,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": message.get("tool_calls"),
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _origin(episode: Mapping[str, Any]) -> dict[str, Any]:
    return {"episode": episode["id"], "task": episode["task"]["id"], "score": episode["score"]}
