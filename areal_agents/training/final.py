"""What a finished run leaves: the trained model as a Hugging Face folder, and beside it an adapter."""

from __future__ import annotations

from pathlib import Path

from areal_agents.training.model import Policy
from areal_agents.training.model_folder import remove_unfinished
from areal_agents.training.publishing.folders import write_policy, write_policy_adapter


def write_final(policy: Policy, run_dir: Path, *, like: Path, writes: bool) -> None:
    """Write `<run_dir>/final`, and `<run_dir>/final-adapter` for a policy with an adapter. Collective.

    Args:
        like: the folder that the run began with.
        writes: whether this rank writes; the others only help to gather.

    Raises:
        TrainingError: the disk refuses.
    """
    if writes:
        remove_unfinished(run_dir, "final*")  # and of the adapter
    write_policy(policy, run_dir / "final", like=like, writes=writes)
    if policy.lora is not None:
        write_policy_adapter(policy, run_dir / "final-adapter", base=like, writes=writes)
