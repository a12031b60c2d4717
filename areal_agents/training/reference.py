"""The reference policy: a frozen model that the trained one is held near. It is never written to."""

from __future__ import annotations

from pathlib import Path

from areal_agents.training.distributed import Ranks
from areal_agents.training.model import ModelOptions, Policy, load_policy


def load_reference(path: str | Path, ranks: Ranks, *, options: ModelOptions | None = None) -> Policy:
    """Load a Hugging Face folder like the policy, sharded, without gradients.

    Raises:
        TrainingError: the folder cannot be loaded.
    """
    policy = load_policy(path, ranks, options=options or ModelOptions())
    policy.requires_grad_(False)
    return policy
