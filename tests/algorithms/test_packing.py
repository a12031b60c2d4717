"""Micro-batches: every token is trained once, within the budget, and each rank has the same number."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from algorithms_support import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.packing.balance import imbalance
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.packing.minibatches import split_minibatches
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingSample]:
    made = []
    for group in range(draw(st.integers(1, 4))):
        prompt = list(range(100 * group, 100 * group + draw(st.integers(1, 90))))
        for index in range(draw(st.integers(1, 4))):
            tail = draw(st.lists(st.integers(500, 502), min_size=1, max_size=30))
            length = len(prompt) + len(tail)
            trained = draw(st.sets(st.integers(len(prompt), length - 1), min_size=1))
            made.append(
                sample([*prompt, *tail], sorted(trained), group_id=f"g{group}", episode_id=f"{group}.{index}")
            )
    return made


@settings(derandomize=True, deadline=None, max_examples=80)
@given(batches(), st.integers(130, 400), st.integers(1, 3), st.booleans())
def test_packing_keeps_every_trained_token(
    samples: list[TrainingSample], budget: int, ranks: int, share: bool
) -> None:
    packed = pack(samples, token_budget=budget, ranks=ranks, share_prefixes=share)
    assert len(packed) % ranks == 0
    entries = Counter()
    for batch in packed:
        assert 1 <= len(batch.input_ids) <= budget
        assert batch.segments[0].start == 0 and max(s.end for s in batch.segments) == len(batch.input_ids)
        for row, target, index in zip(
            batch.predictor_rows, batch.target_ids, batch.sample_index, strict=True
        ):
            position = int(batch.position_ids[row]) + 1
            owner = samples[int(index)]
            assert owner.token_ids[position] == target
            assert owner.token_ids[position - 1] == batch.input_ids[row]
            entries[(int(index), position)] += 1
    expected = {(i, int(p)) for i, s in enumerate(samples) for p in np.flatnonzero(s.loss_mask)}
    assert entries == Counter(expected)


def test_the_prompt_of_a_group_is_in_a_micro_batch_once() -> None:
    prompt = list(range(100))
    samples = [sample([*prompt, 200 + i, 300], [100, 101]) for i in range(8)]
    (batch,) = pack(samples, token_budget=1000)
    assert len(batch.input_ids) == 108 and batch.sample_tokens == 808 and batch.scored_tokens == 16
    (flat,) = pack(samples, token_budget=1000, share_prefixes=False)
    assert len(flat.input_ids) == 808
    # the last row of the prompt predicts the first sampled token of all eight samples
    assert sorted(batch.predictor_rows.tolist()).count(99) == 8


def test_arrays_follow_their_tokens() -> None:
    one = TrainingSample(
        token_ids=np.array([5, 6, 7, 8], np.int32),
        loss_mask=np.array([False, True, False, True]),
        behavior_logprobs=np.array([0, -1, 0, -2], np.float32),
        versions=np.array([-1, 3, -1, 4], np.int32),
        temperatures=np.array([1, 0.5, 1, 0.7], np.float32),
        advantages=np.array([0, 10, 0, 20], np.float32),
        turn_index=np.array([-1, 0, -1, 1], np.int32),
        episode_id="e",
        group_id="g",
    )
    (batch,) = pack([one], token_budget=10)
    assert batch.input_ids.tolist() == [5, 6, 7]  # the last token is only predicted
    assert batch.predictor_rows.tolist() == [0, 2] and batch.target_ids.tolist() == [6, 8]
    assert batch.behavior_logprobs.tolist() == [-1, -2] and batch.versions.tolist() == [3, 4]
    assert batch.temperatures.tolist() == pytest.approx([0.5, 0.7]) and batch.advantages.tolist() == [10, 20]


def test_ranks_without_samples_get_micro_batches_that_train_nothing() -> None:
    packed = pack([sample([1, 2, 3], [2])], token_budget=16, ranks=3)
    assert [b.scored_tokens for b in packed] == [1, 0, 0]
    assert [len(b.input_ids) for b in packed] == [2, 1, 1]


def test_costs_are_balanced() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(0, 1000, n).tolist(), [n - 1]) for n in rng.integers(20, 200, 200)]
    sizes = [len(b.input_ids) for b in pack(samples, token_budget=2000)]
    assert max(sizes) <= 2000 and min(sizes) >= 0.8 * max(sizes)


def test_a_sample_beyond_the_budget_is_named() -> None:
    long = sample(list(range(50)), [49], group_id="g7", episode_id="e3")
    with pytest.raises(TrainingError, match="group g7, episode e3: a sample of 49 tokens.*micro-batch of 48"):
        pack([long], token_budget=48)
    assert len(pack([long], token_budget=49)) == 1


# The shape of Qwen3-1.7B.
SHAPE = ModelShape(
    layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=151_936
)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_log_normal_lengths_fill_the_budget_and_keep_the_ranks_equally_busy(ranks: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1500), 0.8, 512), 50, 16_000).astype(int)
    samples = [sample(rng.integers(0, 150_000, n).tolist(), [*range(n // 2, n)]) for n in lengths]
    packed = pack(samples, token_budget=32_768, ranks=ranks, shape=SHAPE)
    assert sum(len(b.input_ids) for b in packed) / (len(packed) * 32_768) >= 0.95
    costs = [b.forward_flops(SHAPE) for b in packed]
    assert imbalance([sum(costs[rank::ranks]) for rank in range(ranks)]) <= 0.03


def groups(count: int, size: int, prompt: int, response: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    made = []
    for group in range(count):
        start = rng.integers(0, 10**6, prompt).tolist()
        for index in range(size):
            tokens = start + rng.integers(0, 10**6, response + 1).tolist()
            made.append(
                sample(
                    tokens, range(prompt, len(tokens)), group_id=f"g{group}", episode_id=f"{group}.{index}"
                )
            )
    return made


def tokens_of(samples: list[TrainingSample], **options: object) -> list[int]:
    return [len(batch.input_ids) for batch in pack(samples, **options)]  # type: ignore[arg-type]


def test_groups_that_fit_are_not_cut() -> None:
    # 12 groups of 100 + 4 · 30 tokens, two of them per micro-batch
    assert tokens_of(groups(12, 4, 100, 30), token_budget=450) == [440] * 6


def test_a_group_beyond_the_budget_is_cut_into_as_few_parts_as_fit() -> None:
    # six responses of 30 fit with a prompt of 100, so 20 of them need four micro-batches, of equal size
    assert tokens_of(groups(1, 20, 100, 30), token_budget=300) == [250] * 4


def test_parts_of_a_group_are_packed_with_one_copy_of_its_prompt() -> None:
    # eight responses fit with a prompt, so each of four groups of sixteen is in two micro-batches
    assert tokens_of(groups(4, 16, 100, 30), token_budget=340) == [340] * 8


def test_a_group_is_cut_if_a_rank_would_otherwise_be_idle() -> None:
    assert tokens_of(groups(1, 8, 100, 30), token_budget=1000, ranks=2) == [220, 220]
    assert tokens_of(groups(2, 8, 100, 30), token_budget=1000, ranks=2) == [340, 340]


def test_groups_that_share_a_system_prompt_are_not_cut() -> None:
    system = list(range(2_000_000, 2_000_050))
    samples = [
        sample([*system, *s.token_ids.tolist()], 50 + np.flatnonzero(s.loss_mask), group_id=s.group_id)
        for s in groups(12, 4, 100, 30)
    ]
    assert tokens_of(samples, token_budget=500) == [490] * 6


def test_gaps_are_filled_with_parts_of_groups() -> None:
    # two groups of 340 do not fit into one micro-batch; three fit into two if one of them is cut
    sizes = tokens_of(groups(3, 8, 100, 30), token_budget=600)
    assert len(sizes) == 2 and sum(sizes) == 3 * 340 + 100


def test_weights_follow_their_tokens() -> None:
    samples = groups(3, 2, 40, 2)
    weights = [np.array([i, i + 0.25, i + 0.5], np.float32) for i in range(6)]
    for batch in pack(samples, token_budget=60, weights=weights):
        for index in set(batch.sample_index.tolist()):
            assert batch.loss_weights[batch.sample_index == index].tolist() == weights[index].tolist()
    (batch,) = pack(samples, token_budget=1000)
    assert batch.loss_weights.tolist() == pytest.approx([1 / 18] * 18)
    with pytest.raises(ValueError, match="one number per scored token"):
        pack(samples, token_budget=60, weights=weights[:5])


def test_long_samples_are_packed_quickly() -> None:
    """In less processor time than a loop over all of their tokens takes."""
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(0, 1000, 4096), range(2000, 4096)) for _ in range(512)]
    start = time.process_time()
    pack(samples, token_budget=32_768, ranks=8, shape=SHAPE)
    packed_s = time.process_time() - start
    start = time.process_time()
    Counter((index, token) for index, s in enumerate(samples[:128]) for token in s.token_ids.tolist())
    assert packed_s < 4 * (time.process_time() - start)  # a quarter of the samples is counted


def test_packing_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        pack([], token_budget=10)


def test_minibatches_keep_groups_whole_and_contain_every_sample() -> None:
    samples = [sample([1, 2], [1], group_id=f"g{i // 3}", episode_id=str(i)) for i in range(12)]
    parts = split_minibatches(samples, 2, seed=1)
    assert [len(part) for part in parts] == [6, 6]
    assert sorted(s.episode_id for part in parts for s in part) == sorted(s.episode_id for s in samples)
    assert {s.group_id for s in parts[0]}.isdisjoint(s.group_id for s in parts[1])
    again = split_minibatches(samples, 2, seed=1)
    assert [[s.episode_id for s in part] for part in again] == [
        [s.episode_id for s in part] for part in parts
    ]


def test_fewer_groups_than_minibatches_are_split_by_sample() -> None:
    samples = [sample([1, 2], [1], episode_id=str(i)) for i in range(3)]
    assert sorted(len(part) for part in split_minibatches(samples, 4, seed=0)) == [1, 1, 1]
    assert [len(part) for part in split_minibatches(samples, 1, seed=0)] == [3]
    assert split_minibatches([], 4, seed=0) == []
