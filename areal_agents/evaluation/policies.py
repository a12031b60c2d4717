"""Finds the weights that `--model` names: a model folder, or a checkpoint or the final model of a run."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from areal_agents.errors import ConfigError
from areal_agents.evaluation.folder import fingerprint
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

FORMS = "RUN@final, RUN@best or RUN@STEP, or a model folder"


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """The weights that are evaluated.

    Attributes:
        name: as the user named them.
        folder: a model folder. For a checkpoint, that of the run's initial model, which has the same
            configuration and tokenizer.
        checkpoint: the checkpoint that has the weights; None: the folder has them.
    """

    name: str
    folder: Path
    checkpoint: Path | None = None

    @property
    def fingerprint(self) -> str:
        """A digest of the weights."""
        if self.checkpoint is None:
            return fingerprint(self.folder)
        return hashlib.sha256((self.checkpoint / "trainer.json").read_bytes()).hexdigest()

    def exported(self, folder: Path) -> Path:
        """Return a model folder with the weights; those of a checkpoint are written to `folder`, once."""
        if self.checkpoint is None:
            return self.folder
        if not folder.exists():
            from areal_agents.training.checkpoint.export import export

            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
            export(self.checkpoint, temporary)
            temporary.rename(folder)
        return folder


def policy_of_run(given: str) -> NamedPolicy | None:
    """Return the weights of a run that a name of the form RUN@WHAT names; None for any other name.

    Raises:
        ConfigError: RUN is the folder of a run that does not have WHAT, or `given` is the folder of a run.
    """
    run, at, what = given.rpartition("@")
    if not at or not Path(run).is_dir():
        if (Path(given) / "metrics.jsonl").is_file() or (Path(given) / "checkpoints").is_dir():
            raise ConfigError(
                f"--model: {given} is the folder of a run; say which of its weights: {given}@final, "
                f"{given}@best or {given}@STEP"
            )
        return None
    folder = RunFolder(Path(run))
    if what == "final":
        if not folder.final_model.is_dir():
            raise ConfigError(f"--model: {run} has no final model, because it has not ended; {_has(folder)}")
        return NamedPolicy(given, folder.final_model.resolve())
    if what == "best":
        return _of_checkpoint(given, folder, _best_step(folder))
    if not what.isdecimal():
        raise ConfigError(f"--model: expected {FORMS}, got {given}")
    return _of_checkpoint(given, folder, int(what))


def _of_checkpoint(given: str, folder: RunFolder, step: int) -> NamedPolicy:
    from areal_agents.training.checkpoint.checkpoint import read_facts

    checkpoint = folder.root / "checkpoints" / f"step-{step}"
    if not checkpoint.is_dir():
        raise ConfigError(f"--model: {folder.root} has no checkpoint of step {step}; {_has(folder)}")
    model = Path(read_facts(checkpoint)["model_path"])
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: {checkpoint} belongs to the model {model}, which no longer exists")
    return NamedPolicy(given, model, checkpoint.resolve())


def _best_step(folder: RunFolder) -> int:
    """Return the step of the best checkpoint of a run, by its trainer.best_metric."""
    from areal_agents.training.checkpoint.best import BestMetric, metric_name
    from areal_agents.training.checkpoint.checkpoint import read_facts

    steps = _steps(folder)
    if not steps or not folder.config.is_file():
        raise ConfigError(f"--model: {folder.root} has no checkpoint")
    config = yaml.safe_load(folder.config.read_text())
    evaluates = bool((config.get("eval") or {}).get("every"))
    name = metric_name(config["trainer"]["best_metric"], evaluates=evaluates)
    with Store.open(folder.store_at((config.get("store") or {}).get("url"))) as store:
        metric = BestMetric(name, store)
        scores = {
            step: metric.score(step, read_facts(folder.root / "checkpoints" / f"step-{step}"))
            for step in steps
        }
    known = {step: score for step, score in scores.items() if score is not None}
    if not known:
        raise ConfigError(
            f"--model: no checkpoint of {folder.root} has a score (trainer.best_metric: {name}); evaluate "
            f"during training with eval.every, or name a step; {_has(folder)}"
        )
    return max(known, key=lambda step: (known[step], step))


def _has(folder: RunFolder) -> str:
    steps = ", ".join(map(str, _steps(folder)))
    return f"it has checkpoints of the steps {steps}" if steps else "it has no checkpoint"


def _steps(folder: RunFolder) -> list[int]:
    from areal_agents.training.checkpoint.files import complete_steps

    return complete_steps(folder.root / "checkpoints")
