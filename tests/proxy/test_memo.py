"""Parsed messages of a conversation are reused, and a conversation that only grows is kept once."""

from __future__ import annotations

from typing import Any

from areal_agents.core.messages import Message
from areal_agents.proxy.dialects.replayed import MessageMemo


def read(memo: MessageMemo, items: list[Any]) -> int:
    """Read a conversation as a dialect does, and return how many of its items were known."""
    history = memo.known(items)
    known = len(history.groups)
    for item in items[known:]:
        history.groups.append((Message("user", str(item["content"])),))
    memo.keep(history, items)
    assert [group[0].content for group in history.groups] == [str(item["content"]) for item in items]
    return known


def said(*texts: object) -> list[Any]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_conversation_that_grows_is_kept_once() -> None:
    memo = MessageMemo(2)
    assert read(memo, said("other")) == 0
    assert [read(memo, said(*range(n))) for n in (1, 2, 5, 5)] == [0, 1, 2, 5]
    # If the four readings had been kept separately, the first conversation would have been evicted.
    assert read(memo, said("other", "more")) == 1
    assert read(memo, said(*range(6))) == 5


def test_branches_of_a_conversation_are_kept_separately() -> None:
    memo = MessageMemo(3)
    for branch in "abc":
        read(memo, said("root", branch))
    assert [read(memo, said("root", branch, "next")) for branch in "abc"] == [2, 2, 2]
    assert read(memo, said("root", "d")) == 1


def test_items_that_only_compare_equal_are_read_again() -> None:
    memo = MessageMemo()
    read(memo, said(1))
    assert read(memo, said(True)) == 0
    assert read(memo, said(1.0)) == 0
    assert read(memo, said(1)) == 1
