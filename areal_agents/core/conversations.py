"""The conversations of a recorded episode, from its description in the control API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def conversations(turns: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return every conversation of an episode, in the order in which their last replies were recorded.

    Args:
        turns: `turns` of GET /episodes/{id}.
    """
    by_id = {turn["id"]: turn for turn in turns}
    parents = {turn["parent"] for turn in turns}
    return [_conversation(by_id, turn) for turn in turns if turn["id"] not in parents]


def _conversation(turns: Mapping[str, Mapping[str, Any]], leaf: Mapping[str, Any]) -> list[dict[str, Any]]:
    path = [leaf]
    while path[-1]["parent"] is not None:
        path.append(turns[path[-1]["parent"]])
    return [message for turn in reversed(path) for message in (*turn["new_messages"], turn["reply"])]
