"""Sequences with merged prefixes keep their tokens, their positions and what they attend to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.packing.token_tree import (
    TokenTree,
    build_forest,
    build_tree,
    common_prefix,
    prefix_order,
)


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(s, np.int32) for s in sequences]


def visible(tree: TokenTree) -> np.ndarray:
    """[T, T] bool, which rows each row attends to, by the definition of segments."""
    size = len(tree.token_ids)
    seen = np.zeros((size, size), bool)
    for s in tree.segments:
        for row in range(s.start, s.end):
            seen[row, s.start : row + 1] = True
        seen[s.end : s.subtree_end, s.start : s.end] = True
    return seen


def test_shared_prefixes_are_stored_once() -> None:
    tree = build_tree(arrays([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4, 7]), min_saved=1)
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 7, 5, 6]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert [r.tolist() for r in tree.rows] == [[0, 1, 2, 3], [0, 1, 2, 5, 6], [0, 1, 2, 3, 4]]
    assert [(s.start, s.end, s.subtree_end, s.position) for s in tree.segments] == [
        (0, 3, 7, 0), (3, 4, 5, 3), (4, 5, 5, 4), (5, 7, 7, 3),
    ]  # fmt: skip
    assert sum(map(len, tree.rows)) - len(tree.token_ids) == 7


def test_small_savings_are_skipped_and_larger_ones_deeper_in_the_tree_are_found() -> None:
    sequences = arrays([1, 2, *[7] * 20, 3], [1, 2, *[7] * 20, 4], [1, 2, 9])
    tree = build_tree(sequences, min_saved=10)
    # the first two are merged (22 tokens); merging the third with them would save only 2 · 2 tokens
    assert len(tree.token_ids) == 22 + 1 + 1 + 3
    assert len(build_tree(sequences, min_saved=None).token_ids) == 23 + 23 + 3


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([None, 1, 4]))
def test_every_sequence_keeps_its_tokens_and_attends_only_to_them(
    sequences: list[list[int]], min_saved: int | None
) -> None:
    tree = build_tree(arrays(*sequences), min_saved=min_saved)
    seen = visible(tree)
    for sequence, rows in zip(sequences, tree.rows, strict=True):
        assert tree.token_ids[rows].tolist() == sequence
        assert tree.position_ids[rows].tolist() == list(range(len(sequence)))
        for position, row in enumerate(rows):
            assert np.flatnonzero(seen[row]).tolist() == sorted(rows[: position + 1])
    covered = [row for s in tree.segments for row in range(s.start, s.end)]
    assert covered == list(range(len(tree.token_ids)))
    if min_saved == 1:  # a full trie: one row per distinct prefix
        assert len(tree.token_ids) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([None, 1, 3]), st.data())
def test_sequences_of_a_partial_layout_keep_their_tokens_and_attention(
    sequences: list[list[int]], min_saved: int | None, data: st.DataObject
) -> None:
    forest = build_forest(arrays(*sequences), min_saved=min_saved)
    members = data.draw(st.permutations(range(len(sequences))))[: data.draw(st.integers(1, len(sequences)))]
    tree = forest.layout(members)
    seen = visible(tree)
    for member, rows in zip(members, tree.rows, strict=True):
        assert tree.token_ids[rows].tolist() == sequences[member]
        for position, row in enumerate(rows):
            assert np.flatnonzero(seen[row]).tolist() == sorted(rows[: position + 1])
    used = {node for member in members for node in forest.path(member)}
    assert len(tree.token_ids) == sum(forest.nodes[n].end - forest.nodes[n].start for n in used)


def test_a_path_without_branches_is_one_segment() -> None:
    forest = build_forest(arrays([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]), min_saved=1)
    assert len(forest.layout([0]).segments) == 1
    assert len(forest.layout([0, 1]).segments) == 3  # [1, 2, 3], [4] and [5]
    assert [s.pairs for s in forest.layout([0, 1]).segments] == [6, 4, 4]


def test_equal_ids_with_different_keys_are_not_merged() -> None:
    sequences, keys = arrays([1, 7, 7, 2], [1, 7, 7, 2]), arrays([1, 90, 90, 2], [1, 91, 91, 2])
    tree = build_forest(sequences, min_saved=1, keys=keys).layout([0, 1])
    assert tree.token_ids.tolist() == [1, 7, 7, 2, 7, 7, 2]


def test_a_thousand_nested_branches_are_merged() -> None:
    trunk = np.arange(1100)
    sequences = [np.append(trunk[: i + 1], 5000 + i).astype(np.int32) for i in range(1100)]
    tree = build_tree(sequences, min_saved=1)
    assert len(tree.token_ids) == 2200
    assert tree.token_ids[tree.rows[700]].tolist() == sequences[700].tolist()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=8))
def test_prefix_order_is_lexicographic(sequences: list[list[int]]) -> None:
    order = prefix_order(arrays(*sequences))
    assert [sequences[i] for i in order] == sorted(sequences)


def test_common_prefix() -> None:
    assert common_prefix(*arrays([1, 2, 3], [1, 2, 4])) == 2
    assert common_prefix(*arrays([1, 2], [1, 2, 4])) == 2
    assert common_prefix(*arrays([3], [1])) == 0


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        build_tree(arrays([1], []))
