"""Which slot a request gets and which keys and values it may reuse."""

from __future__ import annotations

import numpy as np

from areal_agents.core.completion import as_token_ids
from areal_agents.inference.embedded.scheduling.slots import WORTH_WAITING, SlotTable


def fill(table: SlotTable, ids: list[int], *, release: bool = True) -> int:
    """Take a slot for `ids`, mark all of them as computed, and release it if `release`."""
    place = table.take(as_token_ids(ids), max_reuse=len(ids) - 1)
    assert place is not None
    slot = place.slot
    table.valid[slot] = len(ids)
    if release:
        table.release(slot)
    return slot


def test_a_continued_history_keeps_its_slot() -> None:
    table = SlotTable(3, 16)
    slot = fill(table, [1, 2, 3, 4])
    fill(table, [9, 9])
    place = table.take(as_token_ids([1, 2, 3, 4, 5, 6]), max_reuse=5)
    assert place is not None
    assert (place.slot, place.reused, place.source) == (slot, 4, slot)


def test_a_branch_gets_a_copy_of_the_prefix_and_the_history_stays() -> None:
    table = SlotTable(3, 16)
    slot = fill(table, [1, 2, 3, 4])
    place = table.take(as_token_ids([1, 2, 7, 8]), max_reuse=3)
    assert place.slot != slot
    assert (place.reused, place.source) == (2, slot)
    assert table.valid[slot] == 4


def test_the_prefix_of_a_busy_slot_is_copied() -> None:
    table = SlotTable(2, 16)
    slot = fill(table, [1, 2, 3, 4], release=False)
    place = table.take(as_token_ids([1, 2, 3, 4]), max_reuse=3)
    assert place.slot != slot
    assert (place.reused, place.source) == (3, slot)


def test_the_least_recently_used_slot_is_replaced_or_reused_in_place_if_it_matches_best() -> None:
    table = SlotTable(2, 16)
    first, second = fill(table, [1, 2, 3]), fill(table, [4, 5, 6])
    place = table.take(as_token_ids([1, 2, 9]), max_reuse=2)
    assert place is not None
    assert (place.slot, place.reused, place.source) == (first, 2, first)
    table.release(place.slot)
    assert table.take(as_token_ids([8, 8]), max_reuse=1).slot == second


def test_nothing_of_another_version_is_reused() -> None:
    table = SlotTable(3, 16)
    fill(table, [1, 2, 3, 4])
    running = fill(table, [5, 6, 7, 8], release=False)
    table.invalidate()
    assert table.take(as_token_ids([1, 2, 3, 4]), max_reuse=3).reused == 0
    assert table.take(as_token_ids([5, 6, 7, 8]), max_reuse=3).reused == 0
    table.release(running)
    assert table.take(as_token_ids([5, 6, 7, 8]), max_reuse=3).reused == 0


def test_a_request_waits_for_a_prefix_that_is_being_computed_unless_it_is_short() -> None:
    table = SlotTable(3, 128)
    ids = as_token_ids(np.arange(100))
    first = table.take(ids, max_reuse=99)
    assert first is not None
    assert table.take(ids, max_reuse=99) is None
    table.valid[first.slot] = 99 - WORTH_WAITING
    assert table.take(ids, max_reuse=99) is None
    table.valid[first.slot] += 1
    second = table.take(ids, max_reuse=99)
    assert second is not None and second.reused == 100 - WORTH_WAITING


def test_a_prefix_that_was_copied_twice_is_read_where_it_was_computed() -> None:
    """Slot 0 has the prefix, 1 copies it from 0, and 2 from 1: both read it in 0 until 0 has another one."""
    table = SlotTable(4, 128)
    root = fill(table, [*range(70), 100, 101])
    left = fill(table, [*range(70), 102, 103])
    right = fill(table, [*range(70), 102, 104])
    assert table.prefix_slot[[left, right]].tolist() == [root, root]
    assert table.prefix_length[[left, right]].tolist() == [70, 70]
    assert table.prefix_length[root] == 0

    place = table.take(as_token_ids([*range(70), 102, 103, 105]), max_reuse=72)
    assert place is not None and place.slot == left
    assert (table.prefix_slot[left], table.prefix_length[left]) == (root, 70)
    table.release(left)
    fill(table, [7, 7, 7])  # takes the slot that was never used
    replaced = fill(table, [*range(30), 9, 9])
    assert replaced == root
    assert table.prefix_length[[left, right]].tolist() == [30, 30]


def test_only_computed_tokens_are_reused() -> None:
    table = SlotTable(2, 16)
    slot = table.take(as_token_ids(np.arange(10)), max_reuse=9).slot
    table.valid[slot] = 4
    assert table.take(as_token_ids(np.arange(10)), max_reuse=9).reused == 4
