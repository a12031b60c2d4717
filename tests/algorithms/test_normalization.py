"""The loss weights of each mode, compared with values computed by hand and with the means that they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from algorithms_support import episode, group, sample, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.normalization import NormalizationMode, loss_weights
from areal_agents.algorithms.samples import build_training_data

# three episodes, of which the last has no trained token
SAMPLES = [
    sample(range(6), [2, 3, 5], episode_id="a"),
    sample(range(4), [1], episode_id="b"),
    sample(range(3), [], episode_id="c"),
]
MODES: list[tuple[NormalizationMode, int | None]] = [
    ("token", None), ("sequence_mean", None), ("sequence_sum", None), ("constant", 64),
]  # fmt: skip


@pytest.mark.parametrize(
    "mode, constant, first, second",
    [
        ("token", None, 1 / 4, 1 / 4),
        ("sequence_mean", None, 1 / 6, 1 / 2),
        ("sequence_sum", None, 1 / 2, 1 / 2),
        ("constant", 10, 1 / 20, 1 / 20),
    ],
)
def test_weights_by_hand(mode: NormalizationMode, constant: int | None, first: float, second: float) -> None:
    got = loss_weights(SAMPLES, mode=mode, constant=constant)
    assert [len(weights) for weights in got] == [3, 1, 0]  # an episode without trained tokens does not count
    assert got[0].tolist() == pytest.approx([first] * 3) and got[1].tolist() == pytest.approx([second])
    assert all(weights.dtype == np.float32 for weights in got)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_weighted_sums_equal_the_means(lengths: list[int], seed: int) -> None:
    samples = [sample(range(n + 1), range(1, n + 1), episode_id=f"e{i}") for i, n in enumerate(lengths)]
    losses = [np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(lengths)]
    means = {
        "token": np.concatenate(losses).mean(),
        "sequence_mean": np.mean([each.mean() for each in losses]),
        "sequence_sum": np.mean([each.sum() for each in losses]),
        "constant": np.mean([each.sum() / 64 for each in losses]),
    }
    for mode, mean in means.items():
        weights = loss_weights(samples, mode=mode, constant=64 if mode == "constant" else None)  # type: ignore[arg-type]
        total = sum(np.dot(w, each) for w, each in zip(weights, losses, strict=True))
        assert total == pytest.approx(mean, rel=1e-5, abs=1e-6)


def total(
    samples: Sequence[object], losses: dict[int, float], mode: NormalizationMode, constant: int | None
) -> float:
    """Σ_t c_t x_t, where x_t is looked up by token id."""
    weights = loss_weights(samples, mode=mode, constant=constant)  # type: ignore[arg-type]
    return sum(
        float(np.dot(c, [losses[int(i)] for i in s.token_ids[s.loss_mask]]))  # type: ignore[attr-defined]
        for c, s in zip(weights, samples, strict=True)
    )


@pytest.mark.parametrize("mode, constant", MODES)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
@settings(derandomize=True, deadline=None, max_examples=25)
def test_an_episode_in_several_samples_has_the_weight_of_one_sequence(
    mode: NormalizationMode, constant: int | None, lengths: list[list[int]], seed: int
) -> None:
    """Compare the same tokens, cut into samples in random order and with one sample per episode."""
    rng, start = np.random.default_rng(seed), 1
    whole, cut, losses = [], [], {}
    for index, parts in enumerate(lengths):
        ids = list(range(start, start + sum(parts)))
        losses |= dict(zip(ids, rng.normal(size=len(ids)), strict=True))
        whole.append(sample([0, *ids], range(1, len(ids) + 1), episode_id=f"e{index}"))
        for length in parts:
            mine, ids = ids[:length], ids[length:]
            cut.append(sample([0, *mine], range(1, length + 1), episode_id=f"e{index}"))
        start += sum(parts)
    shuffled = [cut[i] for i in rng.permutation(len(cut))]
    expected = total(whole, losses, mode, constant)
    assert total(shuffled, losses, mode, constant) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode, constant", MODES)
def test_splitting_an_episode_into_roots_does_not_change_its_share_of_the_gradient(
    mode: NormalizationMode, constant: int | None
) -> None:
    """Four turns are in one conversation or each in its own, with the same second episode in the group."""
    fields = {"loss_normalization": mode, "advantage_std": "none"}
    config = AlgorithmConfig(**fields | ({"loss_constant": constant} if constant else {}))  # type: ignore[arg-type]

    def shares(parents: Sequence[str | None]) -> tuple[int, dict[str, float]]:
        turns = [turn(f"{i}", parent, recorded_before=i) for i, parent in enumerate(parents)]
        data = build_training_data(
            [group([episode(turns, 1.0, id="long"), episode([turn("x")], 0.0, id="short")])], config
        )
        by_episode: dict[str, float] = {"long": 0.0, "short": 0.0}
        for s, c in zip(data.samples, config.loss_normalization.weights(data.samples), strict=True):
            by_episode[s.episode_id] += float((c * s.advantages[s.scored_mask]).sum())
        return len(data.samples), by_episode

    one, together = shares([None, "0", "1", "2"])
    four, apart = shares([None] * 4)
    assert (one, four) == (2, 5) and apart == pytest.approx(together, rel=1e-6)
    if mode == "sequence_mean":  # each of the two episodes has half; per root it would be 4/5 and 1/5
        assert apart == pytest.approx({"long": 0.25, "short": -0.25})


def test_a_long_episode_and_three_short_ones_have_equal_weights() -> None:
    """Counted by root, the long episode would have four of seven shares."""
    samples = [sample([0, 1], [1], episode_id="long")] * 4
    samples += [sample([0, 1], [1], episode_id=f"short {i}") for i in range(3)]
    weights = loss_weights(samples, mode="sequence_mean")
    assert sum(float(c.sum()) for c in weights[:4]) == pytest.approx(1 / 4)
    assert [float(c.sum()) for c in weights[4:]] == pytest.approx([1 / 4] * 3)


@pytest.mark.parametrize("mode, constant", MODES)
def test_a_token_that_another_sample_trains_has_weight_zero(
    mode: NormalizationMode, constant: int | None
) -> None:
    first, branch = sample(range(6), [2, 3, 5], episode_id="a"), sample(range(5), [4], episode_id="a")
    shared = replace(branch, prefix_mask=np.array([False, False, True, True, False]))
    plain = loss_weights([first, branch], mode=mode, constant=constant)
    scored = loss_weights([first, shared], mode=mode, constant=constant)
    assert scored[0].tolist() == plain[0].tolist()
    assert scored[1].tolist() == [0.0, 0.0, *plain[1].tolist()]


def test_no_samples_have_no_weights() -> None:
    assert loss_weights([], mode="token") == []


@pytest.mark.parametrize("mode, constant", [("constant", None), ("constant", 0), ("token", 8)])
def test_a_constant_that_does_not_fit_the_mode_is_refused(
    mode: NormalizationMode, constant: int | None
) -> None:
    with pytest.raises(ValueError, match=f"got {constant} with mode {mode}"):
        loss_weights(SAMPLES, mode=mode, constant=constant)
