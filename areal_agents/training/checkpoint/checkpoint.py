"""Everything that a resumed trainer needs, in one folder per checkpoint, written in the background.

A folder gets its final name only when it is complete and synced to the disk, so a run can resume from any
folder named step-<n>, even after a loss of power. Weights and optimizer state are sharded DCP state: another
number of ranks can load them. The rest is in the store: the groups that each step consumed, and so the gate's
count, are rows, and `Store.return_leases` restores them to their state after the checkpoint's step.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from areal_agents.errors import TrainingError
from areal_agents.training.checkpoint.files import (
    check_files,
    complete_steps,
    fingerprint,
    rng_state,
    set_rng_state,
    sizes_and_sums,
    sync_files,
    sync_names,
)
from areal_agents.training.distributed import Ranks
from areal_agents.training.step.optimizer import (
    empty_state,
    load_optimizer_state,
    optimizer_state,
    plain_name,
)

logger = logging.getLogger(__name__)

Parts = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]  # "policy", and "critic" if there is one


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of a run.

    Attributes:
        step: the number of trained batches; version: the version after the last one.
        position: the number of recorded groups read so far; 0 with a rollout, whose position in the data is
            in the store.
    """

    step: int
    version: int
    position: int = 0


class Checkpoints:
    """The checkpoints of one run. At most one is being written; the next one waits for it.

    Args:
        folder: contains a folder step-<n> for each checkpoint.
        facts: written into each checkpoint for `export`; they name the model that the checkpoint belongs to.
        keep: the number of latest checkpoints that are kept.
        keep_best: the number of best checkpoints that are kept as well. `score` returns the score of a
            checkpoint, or None; it is called on the first rank only.
        written: called on the first rank when a checkpoint is complete.
        wait: whether `save` waits until the checkpoint is complete.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        facts: Mapping[str, Any] | None = None,
        keep: int = 2,
        keep_best: int = 0,
        score: Callable[[int, Mapping[str, Any]], float | None] = lambda step, facts: facts.get("score"),
        written: Callable[[int], None] = lambda step: None,
        wait: bool = False,
    ) -> None:
        self._folder, self._ranks, self._facts = folder, ranks, dict(facts or {})
        self._keep, self._keep_best, self._score = keep, keep_best, score
        self._written, self._wait = written, wait
        # A thread gathers the state on the CPU; its collectives must not be mixed with those of training.
        self._group = dist.new_group(backend="gloo")
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._protected: int | None = None
        if ranks.is_first:
            for left in folder.glob(".step-*.tmp"):  # left by a run that was killed
                shutil.rmtree(left, ignore_errors=True)

    def save(self, parts: Parts, progress: TrainingProgress, *, score: float | None = None) -> Path:
        """Start to write `<folder>/step-<n>`; the weights may change once this returns. Collective.

        Raises:
            TrainingError: this or the previous checkpoint cannot be written to the disk.
        """
        self.finish()
        path = self._folder / f"step-{progress.step}"
        temporary = self._folder / f".step-{progress.step}.tmp"
        try:
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            self._ranks.barrier()
            torch.save(rng_state(), temporary / f"rng-{self._ranks.rank}.pt")
            self._ranks.barrier()
            saving = dcp.async_save(_state(parts), checkpoint_id=str(temporary), process_group=self._group)
        except (OSError, RuntimeError) as error:
            raise TrainingError(f"cannot write the checkpoint {path}: {error}") from error
        models = {name: fingerprint(module) for name, (module, _) in parts.items()}
        facts = {**self._facts, **asdict(progress), "models": models, "score": score}
        facts["ranks"] = self._ranks.count
        self._pending = self._finisher.submit(self._complete, cast("Future[Any]", saving), path, facts)
        if self._wait:
            self.finish()
        return path

    def protect(self, step: int) -> None:
        """Keep the checkpoint of `step` until this is called with another step, whatever `keep` says."""
        self._protected = step

    def finish(self) -> None:
        """Wait until nothing is being written. Raises TrainingError if writing failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
        self._ranks.barrier()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one in progress."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def close(self) -> None:
        """Wait for the checkpoint being written on this rank, whether it succeeds or not."""
        self._finisher.shutdown(wait=True)

    def _complete(self, saving: Future[Any], path: Path, facts: dict[str, Any]) -> None:
        """Complete a checkpoint, on a thread, once this rank's part is written; the first rank finishes
        last."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            saving.result()
            if not self._ranks.is_first:
                return
            facts["files"] = sizes_and_sums(temporary)
            (temporary / "trainer.json").write_text(json.dumps(facts))
            sync_files(temporary)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
            sync_names(self._folder)
            self._written(facts["step"])
            self._forget()
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            raise TrainingError(f"cannot write the checkpoint {path}: {error}") from error

    def _forget(self) -> None:
        """Remove all checkpoints except the latest, the best and the protected ones."""
        steps = complete_steps(self._folder)
        scores = {step: self._rating(step) for step in steps}
        rated = {step: score for step, score in scores.items() if score is not None}
        best = sorted(rated, key=lambda step: (rated[step], step), reverse=True)
        kept = {*steps[-self._keep :], *best[: self._keep_best], self._protected}
        for step in set(steps) - kept:
            shutil.rmtree(self._folder / f"step-{step}")

    def _rating(self, step: int) -> float | None:
        """Return the score of a kept checkpoint; None if it is not known, so that the checkpoint is not one
        of the best."""
        try:
            facts = read_facts(self._folder / f"step-{step}")
        except TrainingError as error:  # a damaged older checkpoint must not end a healthy run
            logger.warning("a checkpoint cannot be compared with the others: %s", error)
            return None
        return self._score(step, facts)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, None if there is none."""
    steps = complete_steps(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def load_checkpoint(path: Path, parts: Parts, ranks: Ranks, *, shared: bool = False) -> TrainingProgress:
    """Restore weights, optimizers and random state in place. Collective.

    A part without optimizer state in the checkpoint keeps an empty state. Frozen parameters are not in a
    checkpoint; they keep the values from the model's folder.

    Args:
        shared: restore only the parts that the checkpoint and `parts` have in common: the algorithm of the
            checkpoint may have had a critic where this one has none, or none where this one has one.

    Raises:
        TrainingError: the checkpoint belongs to another model or algorithm, or one of its files is damaged.
    """
    facts = read_facts(path)
    saved = facts["models"]
    if shared:
        parts = {name: part for name, part in parts.items() if name in saved}
        saved = {name: value for name, value in saved.items() if name in parts}
    models = {name: fingerprint(module) for name, (module, _) in parts.items()}
    if saved != models:
        other = set(models) != set(saved)
        what = "another algorithm" if other else "another model, or of another trainer.lora"
        raise TrainingError(f"{path} is a checkpoint of {what}; use a new run folder")
    check_files(path, facts["files"], ranks)
    try:
        weights = {name: _weights(module) for name, (module, _) in parts.items()}
        shapes = _saved_shapes(path)
        moments = {
            name: empty_state(module, optimizer, shapes.get(name, {}))
            for name, (module, optimizer) in parts.items()
        }
        dcp.load(_flat(weights, moments), checkpoint_id=str(path))
        for name, (module, optimizer) in parts.items():
            load_optimizer_state(module, optimizer, moments[name])
        random = path / f"rng-{ranks.rank}.pt"
        if random.exists():  # with more ranks than before, the additional ranks start from their own seed
            set_rng_state(torch.load(random))
        return TrainingProgress(facts["step"], facts["version"], facts["position"])
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, dcp.api.CheckpointException) as error:
        raise TrainingError(f"the checkpoint {path} is damaged: {error}") from error


def load_weights(path: Path, module: nn.Module, ranks: Ranks) -> None:
    """Restore the weights of the policy only, in place. Errors as for `load_checkpoint`."""
    facts = read_facts(path)
    if facts["models"]["policy"] != fingerprint(module):
        raise TrainingError(f"{path} is a checkpoint of another model")
    check_files(path, facts["files"], ranks)
    try:
        dcp.load(_flat({"policy": _weights(module)}, {}), checkpoint_id=str(path))
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, dcp.api.CheckpointException) as error:
        raise TrainingError(f"the checkpoint {path} is damaged: {error}") from error


def read_facts(path: Path) -> dict[str, Any]:
    """Read trainer.json of a checkpoint. Raises TrainingError if it is missing or damaged."""
    file = path / "trainer.json"
    try:
        facts = json.loads(file.read_text())
        if not {"step", "version", "position", "models", "files"} <= set(facts):
            raise ValueError("a required entry is missing")
        return dict(facts)
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"the checkpoint {path} is damaged: {file}: {error}; remove the folder to resume from the "
            "previous one"
        ) from error


def _state(parts: Parts) -> dict[str, Any]:
    return _flat(
        {name: _weights(module) for name, (module, _) in parts.items()},
        {name: optimizer_state(module, optimizer) for name, (module, optimizer) in parts.items()},
    )


def _flat(
    weights: Mapping[str, Mapping[str, Any]], moments: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Keys "<part>|weights|<parameter>" and "<part>|optimizer|<parameter>/<moment>"."""
    return {
        f"{part}|{kind}|{key}": value
        for kind, tensors in (("weights", weights), ("optimizer", moments))
        for part, values in tensors.items()
        for key, value in values.items()
    }


def _weights(module: nn.Module) -> dict[str, Any]:
    """The trained parameters, sharded: loading into them changes the module."""
    state = module.state_dict()  # reshards every parameter
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {plain_name(name): state[name] for name in trained}


def _saved_shapes(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the moments in a checkpoint, by part and key."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    metadata = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    for name, entry in metadata.items():
        part, kind, key = name.split("|", 2)
        if kind == "optimizer":
            out.setdefault(part, {})[key] = tuple(getattr(entry, "size", ()))
    return out
