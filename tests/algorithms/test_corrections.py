"""The off-policy weight at each level, truncated and masked, compared with plain Python in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from losses_support import Tokens, evaluate

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.correction import correct
from areal_agents.algorithms.losses.ratios import Sequences, log_ratio


def oracle(
    t: Tokens, level: str, action: str, cap: float, floor: float, veto: float | None
) -> dict[str, object]:
    weights, raws = np.zeros(len(t)), np.zeros(len(t))
    capped = rejected = wholly = vetoed = 0
    by_turn = np.zeros((2, len(t)))  # the product of the token's turn, and its geometric mean
    for at in t.turns():
        product = math.prod(math.exp(t.proximal[i] - t.behavior[i]) for i in at)
        by_turn[:, at] = [[product], [product ** (1 / len(at))]]
    for at in t.sequences():
        own = [math.exp(t.proximal[i] - t.behavior[i]) for i in at]
        product = math.prod(own)
        is_vetoed = veto is not None and min(own) < veto
        gone = 0
        for i, token in zip(at, own, strict=True):
            raw = {
                "token": token, "sequence": product, "geometric": product ** (1 / len(at)),
                "turn": by_turn[0, i], "turn_geometric": by_turn[1, i],
            }[level]  # fmt: skip
            out = action == "mask" and not floor <= raw <= cap
            raws[i] = raw
            weights[i] = 0 if out or is_vetoed else min(raw, cap)
            capped += action == "truncate" and raw > cap and not is_vetoed
            gone += out or is_vetoed
        rejected, wholly, vetoed = rejected + gone, wholly + (gone == len(at)), vetoed + is_vetoed
    return {
        "weights": weights, "weight_raw": raws.sum(), "weight_raw_max": raws.max(), "weight": weights.sum(),
        "weight_squared": (weights**2).sum(), "weight_capped": capped, "rejected_tokens": rejected,
        "rejected_sequences": wholly, "vetoed_sequences": vetoed,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("veto", [None, 0.1])
@pytest.mark.parametrize("action, floor", [("truncate", 0.0), ("mask", 0.0), ("mask", 0.5)])
@pytest.mark.parametrize("level", ["token", "turn", "turn_geometric", "sequence", "geometric"])
def test_weights_and_statistics_equal_the_oracle(
    level: str, action: str, floor: float, veto: float | None, seed: int
) -> None:
    t = Tokens(seed)
    want = oracle(t, level, action, 2.0, floor, veto)
    bounds = {"weight_cap": 2.0} | ({"weight_floor": floor} if action == "mask" else {})
    algorithm = AlgorithmConfig(correction_level=level, correction=action, veto=veto, **bounds)  # type: ignore[arg-type]
    _, gradient, statistics = evaluate(
        t.proximal, proximal=t.proximal, behavior=t.behavior, advantages=t.advantages,
        loss_weights=t.loss_weights, sequence_ids=t.sequence_ids, turn_ids=t.turn_ids, algorithm=algorithm,
    )  # fmt: skip
    # at ratio 1 the gradient is proportional to the weight; it is 0 at rejected tokens
    assert gradient == pytest.approx(-t.loss_weights * want.pop("weights") * t.advantages, rel=1e-9)
    assert {name: statistics[name] for name in want} == pytest.approx(want)
    assert statistics["tokens"] == len(t) and statistics["sequences"] == 7


def test_weights_by_hand() -> None:
    sequences = Sequences.of(torch.tensor([7, 7, 3]))
    log_weight = torch.tensor([2.0, 3.0, 0.25]).log()
    by_level = {
        level: correct(log_weight, sequences, level=level, cap=5.0).weight.tolist()  # type: ignore[arg-type]
        for level in ("token", "sequence", "geometric")
    }
    assert by_level["token"] == pytest.approx([2, 3, 0.25])
    assert by_level["sequence"] == pytest.approx([5, 5, 0.25])
    assert by_level["geometric"] == pytest.approx([6**0.5, 6**0.5, 0.25])
    turns = Sequences.of(torch.tensor([1, 2, 3]))
    for level in ("turn", "turn_geometric"):  # turns of one token each
        assert correct(log_weight, sequences, turns=turns, level=level).weight.tolist() == pytest.approx(  # type: ignore[arg-type]
            [2, 3, 0.25]
        )
    assert correct(log_weight, sequences, level="turn").weight.tolist() == pytest.approx(by_level["sequence"])
    icepop = correct(log_weight, sequences, action="mask", cap=2.5, floor=0.5)
    assert icepop.weight.tolist() == pytest.approx([2, 0, 0]) and icepop.rejected.tolist() == [
        False,
        True,
        True,
    ]
    vetoed = correct(log_weight, sequences, cap=2.5, veto=0.3)
    assert vetoed.weight.tolist() == pytest.approx([2, 2.5, 0]) and vetoed.capped.tolist() == [
        False,
        True,
        False,
    ]
    assert vetoed.vetoed.tolist() == [True, False]  # in the order of the ids, 3 before 7


def test_a_long_product_stays_finite() -> None:
    for sign in (1, -1):
        log_weight = torch.full((1000,), sign * 20.0)
        correction = correct(log_weight, Sequences.of(torch.zeros(1000).long()), level="sequence", cap=1e30)
        assert correction.weight.tolist() == pytest.approx([math.exp(sign * 20)] * 1000)


def test_a_turn_has_its_own_weight_and_is_vetoed_with_its_sequence() -> None:
    sequences, turns = Sequences.of(torch.tensor([7, 7, 7, 3])), Sequences.of(torch.tensor([0, 0, 1, 2]))
    log_weight = torch.tensor([0.5, 4.0, 0.01, 3.0]).log()
    by_turn = correct(log_weight, sequences, turns=turns, level="turn")
    assert by_turn.weight.tolist() == pytest.approx([2, 2, 0.01, 3])
    mean = correct(log_weight, sequences, turns=turns, level="turn_geometric", action="mask", floor=0.5)
    assert mean.weight.tolist() == pytest.approx([2**0.5, 2**0.5, 0, 3])
    vetoed = correct(log_weight, sequences, turns=turns, level="turn", veto=0.1)
    assert vetoed.weight.tolist() == pytest.approx([0, 0, 0, 3])


def test_a_token_that_is_not_kept_is_in_no_product_and_vetoes_nothing() -> None:
    keep = torch.tensor([True, False, True])
    sequences = Sequences.of(torch.tensor([0, 0, 0]), keep=keep)
    log_weight = torch.tensor([2.0, 1e-6, 3.0]).log()
    correction = correct(log_weight, sequences, level="geometric", veto=1e-4)
    assert correction.weight[keep].tolist() == pytest.approx([6**0.5] * 2) and not correction.vetoed.any()


def test_sums_and_means_by_sequence() -> None:
    keep = torch.tensor([True, True, False, False])
    sequences = Sequences.of(torch.tensor([9, 2, 9, 5]), keep=keep)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert len(sequences) == 3 and sequences.lengths.tolist() == [1, 0, 1]
    assert sequences.sums(values).tolist() == [2, 0, 1]
    assert sequences.means(values).tolist() == [2, 0, 1]  # 0 for a sequence without kept tokens
    assert sequences.any(values > 3).tolist() == [False, False, False]
    assert sequences.spread(torch.tensor([20.0, 50.0, 90.0])).tolist() == [90, 20, 90, 50]


def test_log_ratios_are_float32_clamped_and_masked_before_the_exponential() -> None:
    half = torch.tensor([-1.0, -2.0, -300.0], dtype=torch.bfloat16, requires_grad=True)
    ratio = log_ratio(half, torch.tensor([-1.5, -2.0, 0.0]), keep=torch.tensor([True, False, True]))
    assert ratio.dtype == torch.float32 and ratio.tolist() == [0.5, 0.0, -20.0]
    ratio.sum().backward()
    assert half.grad is not None and half.grad.tolist() == [1.0, 0.0, 0.0]
    nothing = log_ratio(torch.tensor([math.nan]), torch.tensor([math.inf]), keep=torch.tensor([False]))
    assert nothing.tolist() == [0.0]


def test_invalid_bounds_are_refused_with_their_values() -> None:
    sequences = Sequences.of(torch.zeros(1).long())
    with pytest.raises(ValueError, match="got floor 0.5, action truncate and cap 5.0"):
        correct(torch.zeros(1), sequences, floor=0.5)
    with pytest.raises(ValueError, match="got floor 6.0, action mask and cap 5.0"):
        correct(torch.zeros(1), sequences, action="mask", floor=6.0)
    with pytest.raises(ValueError, match=r"above e\^-20, the smallest weight after clamping, got 1e-10"):
        correct(torch.zeros(1), sequences, veto=1e-10)
