"""How a loss is averaged: one coefficient per trained token, over a whole minibatch.

The loss is Σ_t c_t · l_t whatever the mode, so that micro-batches and ranks add up and the gradient
does not depend on how the minibatch was cut. A sequence is the trained tokens of one TrainingSample.
A token that a correction rejects later stays counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import LossNormalization
from areal_agents.core.sample import TrainingSample


def loss_weights(
    samples: Sequence[TrainingSample], *, mode: LossNormalization, constant: int | None = None
) -> list[npt.NDArray[np.float32]]:
    """c_t of every trained token, a [N_s] array per sample s.

        token          1 / Σ_s N_s       each token counts the same (DAPO, arXiv 2503.14476, eq. 8)
        sequence_mean  1 / (S · N_s)     each sequence counts the same (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum   1 / S             the sum over a sequence, averaged over sequences
        constant       1 / (S · C)       the same over a fixed length C (Dr.GRPO, arXiv 2503.20783)

    S counts the samples that have a trained token.

    Args:
        samples: all those of one optimizer step, over all ranks.
        constant: C in tokens, for the mode of that name only.

    Raises:
        ValueError: a constant that is missing, not positive, or given to another mode.
    """
    if (mode == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(f"a positive constant goes with the mode constant, got {constant} with {mode}")
    lengths = [int(sample.loss_mask.sum()) for sample in samples]
    tokens, sequences = sum(lengths), sum(length > 0 for length in lengths)

    def divisor(length: int) -> int:
        match mode:
            case "token":
                return tokens
            case "sequence_mean":
                return sequences * length
            case "sequence_sum":
                return sequences
            case "constant":
                return sequences * (constant or 1)

    return [np.full(n, 1 / divisor(n) if n else 0, np.float32) for n in lengths]
