"""`areal-agents rerun`: plans a rerun, computes new rewards, and runs the trainer in a folder of its own.

The run and its store are never written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.config import Config, load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.evaluation.rescoring import Rescoring, rescore
from areal_agents.launch.children import Children
from areal_agents.launch.nodes import Nodes
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.signals import interruptible
from areal_agents.launch.summary import Summary
from areal_agents.launch.train import REFRESH_S, start_trainer, without_place
from areal_agents.proxy.config import available_cores
from areal_agents.rerun.changes import changes_rewards, check_against, check_changes
from areal_agents.rerun.comparison import StepPair, side_by_side
from areal_agents.rerun.original import Original
from areal_agents.rerun.record import RerunRecord
from areal_agents.training.metrics.trackers import check_trackers


@dataclass(frozen=True, slots=True)
class Rerun:
    """A finished rerun.

    Attributes:
        folder: its run folder.
        pairs: the metrics of each step, with those of the run.
        rescoring: the new rewards; None if the rewards are those of the run.
    """

    folder: RunFolder
    pairs: Sequence[StepPair]
    rescoring: Rescoring | None


def rerun(
    run: Path,
    steps: str,
    changes: Sequence[str],
    *,
    out: Path | None,
    say: Callable[[str], None],
    on_step: Callable[[Mapping[str, Any], int], None],
) -> Rerun:
    """Train steps of a run again on its stored episodes.

    Args:
        run: the folder of a run that has ended or was stopped.
        steps: "A:B" trains the steps after A up to B from the weights after A; "A:" up to the last one.
        changes: settings as key=value.
        out: the folder to write, new or empty; None: a new one beside the run.
        say: called with lines that describe the progress.
        on_step: called with the metrics of each step, and with the number of the last step.

    Raises:
        ConfigError: the run cannot be rerun in this way; the message says what to change.
        StoreError: the store of the run cannot be read.
        RewardError: the reward function cannot be loaded.
        ChildDied: the trainer failed.
        Interrupted: the user stopped it; the trainer has ended.
    """
    check_changes(changes)
    with Original.opened(run) as original, interruptible():
        first, last = _range(steps, max(original.steps))
        checkpoint = original.checkpoint(first)
        original.check_steps(first + 1, last)
        config = load_config(original.folder.config, changes)
        check_against(config, original.config, step=first)
        check_trackers(config.trainer.trackers)
        found = None
        if changes_rewards(changes):
            found = _new_rewards(original, config, range(first + 1, last + 1))
        folder = RunFolder(_new_folder(original.folder.root, out, first, last))
        record = RerunRecord(
            run=str(original.folder.root),
            store=str(original.store.path.resolve()) if original.store.path else original.store.url,
            step=first,
            until=last,
            version=original.steps[first + 1].version,
            checkpoint=None if checkpoint is None else str(checkpoint),
            changes=tuple(changes),
            new_rewards=found is not None,
        )
        with folder.locked():
            record.write(folder)
            if found is not None:
                found.write(folder.new_rewards)
            config = _of_folder(config, folder)
            save_config(config, folder.config)
            where = "the initial weights" if checkpoint is None else f"checkpoint {checkpoint.name}"
            which = f"steps {first + 1} to {last}" if last > first + 1 else f"step {last}"
            say(f"{which} of {original.folder.root}, from {where}, into {folder.root}")
            if checkpoint and config.algorithm.needs_critic and not original.config.algorithm.needs_critic:
                say(f"{checkpoint.name} has no critic, so that of the rerun starts untrained")
            rows = _train(config, folder, say, lambda row: on_step(row, last))
        return Rerun(folder, side_by_side(original.rows(), rows), found)


def _range(steps: str, trained: int) -> tuple[int, int]:
    """Return A and B of "A:B"; B is the last trained step if it is left out."""
    first, colon, last = steps.partition(":")
    if not colon or not first.isdecimal() or not (last.isdecimal() or not last):
        raise ConfigError(
            f"--steps: expected A:B, the step of a checkpoint and the last step, such as 20:40, got {steps!r}"
        )
    a, b = int(first), int(last) if last else trained
    if a >= b:
        raise ConfigError(
            f"--steps: {a}:{b} has no step; A:B trains the steps after A up to B, and the run has trained "
            f"{trained}"
        )
    return a, b


def _new_rewards(original: Original, config: Config, steps: Sequence[int]) -> Rescoring:
    """Call the reward function on all episodes of the steps. Raises ConfigError if it fails on any."""
    assert config.reward is not None
    found = original.episodes(steps, finished_only=bool(config.reward.group))
    rescored = rescore(
        original.load_episodes,
        found,
        config.reward,
        source=str(original.folder.root),
        old_function=original.config.reward is not None,
        workers=available_cores(),
    )
    failures = [row for row in rescored.episodes if row.error is not None]
    if failures:
        raise ConfigError(
            f"the reward function failed on {len(failures)} of {len(rescored.episodes)} episodes; the first: "
            f"{failures[0].episode}: {failures[0].error}; areal-agents rescore shows more"
        )
    return rescored


def _new_folder(run: Path, out: Path | None, first: int, last: int) -> Path:
    """Make the folder of the rerun. Raises ConfigError if it has files or cannot be made."""
    if out is not None:
        wanted = out.expanduser().resolve()
        if wanted.is_relative_to(run):
            raise ConfigError(f"--out: {out} is inside {run}, which is not written; choose another folder")
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise ConfigError(f"--out: {out} exists and is not an empty folder; choose another")
    else:
        wanted = run.with_name(f"{run.name}-rerun-{first}-{last}")
        number = 2
        while wanted.exists():
            wanted = run.with_name(f"{run.name}-rerun-{first}-{last}-{number}")
            number += 1
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {wanted}: {error.strerror}; choose another folder") from error
    return wanted


def _of_folder(config: Config, folder: RunFolder) -> Config:
    """Return the configuration of the rerun: with its own folder and store, on this machine."""
    config = without_place(config)
    trainer = config.trainer.model_copy(update={"start": True})
    store = config.store.model_copy(update={"url": None})
    own = {"name": folder.root.name, "run_dir": str(folder.root), "trainer": trainer, "store": store}
    return config.model_copy(update=own)


def _train(
    config: Config,
    folder: RunFolder,
    say: Callable[[str], None],
    on_step: Callable[[Mapping[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run the trainer to its end, and return the metrics of its steps."""
    metrics, shown = MetricsFile(folder.metrics), 0
    begun = time.monotonic()
    with Children(say=say, events=folder.process_events) as children:
        # The run's trainer had this number of threads, and the rounding of a sum depends on their number.
        start_trainer(config, folder, children, Nodes(), role="rerun")
        ended = False
        while not ended:
            ended = children.finished("trainer")
            children.check(may_finish=("trainer",))
            metrics.update()
            for row in metrics.rows[shown:]:
                on_step(row)
            shown = len(metrics.rows)
            if not ended:
                time.sleep(REFRESH_S)
    wall_s = folder.add_wall_s(time.monotonic() - begun)
    Summary.of(metrics.rows, [], wall_s=wall_s, engine_idle=None).write(folder.summary)
    return metrics.rows
