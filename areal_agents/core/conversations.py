"""The conversations of a recorded episode, from its description in the control API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def conversations(turns: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return every conversation of an episode, in the order in which their last replies were recorded.

    Args:
        turns: `turns` of GET /episodes/{id}.
    """
    return [
        [message for turn in path for message in (*turn["new_messages"], turn["reply"])]
        for path in _paths(turns)
    ]


def completions(turns: Sequence[Mapping[str, Any]]) -> list[list[str | None]]:
    """Return, for each message of `conversations`, its completion id, or None if it was not sampled."""
    return [
        [completion for turn in path for completion in (*[None] * len(turn["new_messages"]), turn["id"])]
        for path in _paths(turns)
    ]


def _paths(turns: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    by_id = {turn["id"]: turn for turn in turns}
    parents = {turn["parent"] for turn in turns}
    return [_path(by_id, turn) for turn in turns if turn["id"] not in parents]


def _path(turns: Mapping[str, Mapping[str, Any]], leaf: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    path = [leaf]
    while path[-1]["parent"] is not None:
        path.append(turns[path[-1]["parent"]])
    return path[::-1]
