"""Everything that a resumed trainer needs, in one folder per checkpoint.

A folder gets its name only when it is complete, so any folder named step-<n> can be resumed from.
Model and optimizer are sharded DCP state: another number of ranks can load them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import Policy


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: batches trained, and the version that the last one yielded."""

    step: int
    version: int


def save_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    ranks: Ranks,
    *,
    keep: int,
) -> Path:
    """Write `<folder>/step-<n>`; older checkpoints beyond `keep` are removed. Collective.

    Raises:
        TrainingError: the disk refuses.
    """
    path = folder / f"step-{progress.step}"
    temporary = folder / f".step-{progress.step}.tmp"
    try:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        ranks.barrier()
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
        torch.save(_rng_state(), temporary / f"rng-{ranks.rank}.pt")
        ranks.barrier()
        if ranks.is_first:
            facts = {**asdict(progress), "model": _fingerprint(policy), "ranks": ranks.count}
            (temporary / "trainer.json").write_text(json.dumps(facts))
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            for old in _complete(folder)[:-keep]:
                shutil.rmtree(folder / f"step-{old}")
    except OSError as error:
        raise TrainingError(f"cannot write the checkpoint {path}: {error}") from error
    ranks.barrier()
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most steps, None if there is none."""
    steps = _complete(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Progress:
    """Restore policy, optimizer and random state in place. Collective.

    Raises:
        TrainingError: the checkpoint is of another model, or damaged.
    """
    try:
        facts = json.loads((path / "trainer.json").read_text())
        if facts["model"] != _fingerprint(policy):
            raise TrainingError(f"{path} is a checkpoint of another model; use a new run folder")
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=str(path))
        set_state_dict(
            policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        random = path / f"rng-{ranks.rank}.pt"
        if random.exists():  # another number of ranks: the new ones start from their own seed
            _set_rng_state(torch.load(random))
        return Progress(facts["step"], facts["version"])
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, dcp.api.CheckpointException) as error:
        raise TrainingError(f"the checkpoint {path} is damaged: {error}") from error


def _complete(folder: Path) -> list[int]:
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def _fingerprint(policy: Policy) -> str:
    """Digest of the names and whole shapes of the parameters."""
    shapes = sorted((name, tuple(p.shape)) for name, p in policy.named_parameters())
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
