"""The supervised loss on the environment's tokens, added to the policy's loss.

ECHO (arXiv 2605.24517, eq. 1 and 3) adds λ · CE(observations) to a policy gradient loss, so that the model
learns to predict the responses of its environment in the forward pass that its own tokens need anyway. An
observation has no behavior policy, no version and no advantage, so it is part of no ratio, correction or
statistic of the policy.

The paper divides by the observation tokens of each sequence. Here the mean is over those of the minibatch, so
that every token weighs the same, and an episode weighs the same however it is cut into samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from areal_agents.core.sample import TrainingSample

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float32]


def observation_weights(samples: Sequence[TrainingSample]) -> list[Floats]:
    """Return the weights of the cross entropy of each scored token, a [N_s] array per sample s.

    It is 1 over the number of observation tokens of all the samples at an observation token, and 0 at the
    tokens of the policy, so that the loss is the mean over the observation tokens.

    Args:
        samples: all samples of one optimizer step, over all ranks.
    """
    masks = [sample.observed[sample.scored_mask] for sample in samples]
    count = max(1, sum(int(mask.sum()) for mask in masks))
    return [(mask / np.float32(count)).astype(np.float32) for mask in masks]


def observation_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Compute these tokens' share of the mean cross entropy, the scalar −Σ_t c_t log π_θ.

    Args:
        logprobs: [N] of observation tokens under the current policy at temperature 1, with the gradient.
        weights: [N] c_t of `observation_weights`.
    """
    return -(weights * logprobs).sum()
