"""The mask of M2PO, compared with algorithm 1 of the paper, written as a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from losses_support import Tokens, evaluate

from areal_agents.algorithms.losses.trust_region import m2po_keep


def algorithm_1(behavior, proximal, advantages, threshold: float) -> list[bool]:  # type: ignore[no-untyped-def]
    moved = [p - b for p, b in zip(proximal, behavior, strict=True)]
    keep = [True] * len(moved)
    region = [i for i, a in enumerate(advantages) if (a > 0 and moved[i] > 0) or (a < 0 and moved[i] < 0)]
    while region and sum(moved[i] ** 2 for i in region) / len(region) > threshold:
        worst = max(region, key=lambda i: moved[i] ** 2)
        keep[worst] = False
        region.remove(worst)
    return keep


@pytest.mark.parametrize("threshold", [0.001, 0.04, 0.3, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_mask_equals_the_loop(seed: int, threshold: float) -> None:
    t = Tokens(seed)
    tensors = [torch.tensor(a) for a in (t.behavior, t.proximal, t.advantages)]
    keep = m2po_keep(*tensors, threshold=threshold)
    assert keep.tolist() == algorithm_1(t.behavior, t.proximal, t.advantages, threshold)


def test_only_tokens_that_a_clip_could_affect_are_dropped() -> None:
    behavior, advantages = torch.zeros(5), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    keep = m2po_keep(behavior, torch.tensor([3.0, -3.0, 3.0, -3.0, 3.0]), advantages, threshold=0.04)
    assert keep.tolist() == [False, True, True, False, True]
    # the mean square of the log-ratios 0.3, 0.2 and 0.1 is 0.0467, and without the first 0.025
    keep = m2po_keep(torch.zeros(3), torch.tensor([0.3, 0.2, 0.1]), torch.ones(3), threshold=0.04)
    assert keep.tolist() == [False, True, True]


def test_no_tokens_are_accepted_and_a_threshold_of_zero_is_refused() -> None:
    nothing = torch.zeros(0)
    assert m2po_keep(nothing, nothing, nothing, threshold=0.04).shape == (0,)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        m2po_keep(nothing, nothing, nothing, threshold=0)


def test_a_dropped_token_counts_only_in_the_denominator() -> None:
    t = Tokens(3)
    keep = m2po_keep(
        *(torch.tensor(a) for a in (t.behavior, t.proximal, t.advantages)), threshold=0.3
    ).numpy()
    assert 0 < (~keep).sum() < len(t)
    names = ("proximal", "behavior", "advantages", "loss_weights", "sequence_ids", "entropy")
    arrays = {name: getattr(t, name) for name in names}
    loss, gradient, statistics = evaluate(t.current, keep=keep, **arrays)
    kept_loss, kept_gradient, kept = evaluate(t.current[keep], **{n: a[keep] for n, a in arrays.items()})
    assert loss == pytest.approx(kept_loss) and (gradient[~keep] == 0).all()
    assert gradient[keep] == pytest.approx(kept_gradient)
    assert statistics == pytest.approx(kept | {"dropped_tokens": (~keep).sum()})
    # its values may even be infinite or NaN
    broken = np.where(keep, t.current, math.nan)
    again, gradient_again, _ = evaluate(
        broken, keep=keep, **(arrays | {"behavior": np.where(keep, t.behavior, math.inf)})
    )
    assert again == loss and (gradient_again == gradient).all()
