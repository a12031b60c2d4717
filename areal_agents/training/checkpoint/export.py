"""Exports the policy of a checkpoint, or of a finished run, as a plain Hugging Face folder.

Adapters are merged into the weights; a finished run also writes its adapter to a separate folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areal_agents.errors import ConfigError
from areal_agents.training.checkpoint.checkpoint import latest_checkpoint, load_weights, read_facts
from areal_agents.training.config import LoraConfig, TrainerConfig
from areal_agents.training.distributed import ranks
from areal_agents.training.model.folder import SHARD_BYTES, remove_unfinished, write_model
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.publish.version_folder import write_policy, write_policy_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(source: Path, out: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the policy of a checkpoint to `out`, on the CPU; return the checkpoint's path.

    Args:
        source: a checkpoint, or a run, whose latest checkpoint is used.
        out: a folder that does not exist or is empty.
        dtype: the type of the weights; None keeps the type of the initial model.

    Raises:
        ConfigError: there is no checkpoint, `out` is not empty, or the initial model no longer exists.
        TrainingError: the checkpoint is damaged, or the folder cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; choose another path")
    checkpoint = find_checkpoint(source)
    facts = read_facts(checkpoint)
    model = Path(facts["model_path"])
    if not (model / "config.json").is_file():
        raise ConfigError(f"{checkpoint} belongs to the model {model}, which no longer exists")
    with ranks("cpu") as alone:
        policy = load_policy(model, alone, options=ModelOptions(lora=lora_options(facts["lora"])))
        load_weights(checkpoint, policy, alone)
        weights = policy.full_state_dict()
    saved = DTYPES[dtype] if dtype else policy.saved_dtype
    write_model(weights, out, like=model, dtype=saved, shard_bytes=shard_bytes)
    return checkpoint


def find_checkpoint(source: Path) -> Path:
    """Return the checkpoint at a path. Raises ConfigError if there is none."""
    if (source / "trainer.json").is_file():
        return source
    found = latest_checkpoint(source / "checkpoints")
    if found is None:
        raise ConfigError(f"{source} is neither a checkpoint (step-<n>) nor the folder of a run that has one")
    return found


def facts_of(config: TrainerConfig, model_path: Path) -> dict[str, Any]:
    """Return the facts that a checkpoint needs for its export."""
    lora = config.lora.model_dump(mode="json") if config.lora is not None else None
    return {"model_path": str(model_path.resolve()), "lora": lora}


def lora_options(saved: LoraConfig | dict[str, Any] | None) -> LoraOptions | None:
    """Return the adapter options of a configuration or a checkpoint."""
    if saved is None:
        return None
    config = LoraConfig.model_validate(saved)
    return LoraOptions(rank=config.rank, alpha=config.alpha, targets=config.targets, base=config.base)


def write_final(policy: Policy, run_dir: Path, *, like: Path, writes: bool) -> None:
    """Write `<run_dir>/final`, and `<run_dir>/final-adapter` for a policy with an adapter. Collective.

    Args:
        like: the folder of the initial model.
        writes: whether this rank writes; the other ranks only take part in gathering.

    Raises:
        TrainingError: a folder cannot be written.
    """
    if writes:
        remove_unfinished(run_dir, "final*")  # also removes unfinished folders of the adapter
    write_policy(policy, run_dir / "final", like=like, writes=writes)
    if policy.lora is not None:
        write_policy_adapter(policy, run_dir / "final-adapter", base=like, writes=writes)
