"""Where a request goes and what it may reuse."""

from __future__ import annotations

import numpy as np

from areal_agents.core.completion import as_token_ids
from areal_agents.inference.embedded.slots import SlotTable


def fill(table: SlotTable, ids: list[int], *, release: bool = True) -> int:
    """Take a slot for `ids`, compute all of it, and give it back."""
    slot = table.take(as_token_ids(ids), max_reuse=len(ids) - 1).slot
    table.valid[slot] = len(ids)
    if release:
        table.release(slot)
    return slot


def test_a_continued_history_keeps_its_slot() -> None:
    table = SlotTable(3, 16)
    slot = fill(table, [1, 2, 3, 4])
    fill(table, [9, 9])
    place = table.take(as_token_ids([1, 2, 3, 4, 5, 6]), max_reuse=5)
    assert (place.slot, place.reused, place.source) == (slot, 4, slot)


def test_a_branch_is_copied_so_that_the_history_survives() -> None:
    table = SlotTable(3, 16)
    slot = fill(table, [1, 2, 3, 4])
    place = table.take(as_token_ids([1, 2, 7, 8]), max_reuse=3)
    assert place.slot != slot
    assert (place.reused, place.source) == (2, slot)
    assert table.valid[slot] == 4


def test_a_busy_slot_lends_its_prefix() -> None:
    table = SlotTable(2, 16)
    slot = fill(table, [1, 2, 3, 4], release=False)
    place = table.take(as_token_ids([1, 2, 3, 4]), max_reuse=3)
    assert place.slot != slot
    assert (place.reused, place.source) == (3, slot)


def test_the_slot_used_longest_ago_is_given_up_and_reused_in_place_if_it_matches_best() -> None:
    table = SlotTable(2, 16)
    first, second = fill(table, [1, 2, 3]), fill(table, [4, 5, 6])
    place = table.take(as_token_ids([1, 2, 9]), max_reuse=2)
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


def test_only_what_is_computed_is_reused() -> None:
    table = SlotTable(2, 16)
    slot = table.take(as_token_ids(np.arange(10)), max_reuse=9).slot
    table.valid[slot] = 4
    assert table.take(as_token_ids(np.arange(10)), max_reuse=9).reused == 4
