"""The run that a rerun repeats: its trained steps, checkpoints and episodes, which are only read."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.config import Config, load_config
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.errors import ConfigError
from areal_agents.inspection.sources import config_of_run, rerun_in
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import EpisodeSummary, TrainedStep, reads
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.training.checkpoint.files import complete_steps


@dataclass(frozen=True, slots=True)
class Original:
    """A run that has ended or was stopped.

    Attributes:
        steps: the steps that it has trained, by number.
    """

    folder: RunFolder
    config: Config
    store: ReadOnlyStore
    steps: Mapping[int, TrainedStep]

    @classmethod
    @contextmanager
    def opened(cls, run: Path) -> Iterator[Original]:
        """Open a run, and prevent that it is continued within the block.

        Raises:
            ConfigError: it is not the folder of a run, is running, or cannot be rerun.
            StoreError: its store cannot be read.
        """
        folder = RunFolder(run.resolve())
        config_of_run(folder)
        if (earlier := rerun_in(folder)) is not None:
            raise ConfigError(
                f"{run} is a rerun, without episodes of its own; rerun {earlier['run']} instead"
            )
        with _held(folder):
            config = load_config(folder.config)
            if config.data.episodes:
                raise ConfigError(
                    f"{run} trained on recorded episodes (data.episodes), without inference; train it again "
                    f"with other settings: areal-agents train {folder.config} run_dir=… algorithm=…"
                )
            if config.rollout.canary is not None:
                raise ConfigError(
                    f"{run} rolled candidates back (rollout.canary), so its steps do not follow from one "
                    "another; train it again with other settings: data.episodes="
                    + str(folder.store_at(config.store.url))
                )
            store = ReadOnlyStore(folder.store_at(config.store.url))
            with closing(store):
                with store.read() as connection:
                    steps = reads.trained_steps(connection)
                if not steps:
                    raise ConfigError(f"{run} has trained no step")
                yield cls(folder, config, store, steps)

    def checkpoint(self, step: int) -> Path | None:
        """Return the folder of a step's checkpoint; None for step 0, the initial weights.

        Raises:
            ConfigError: the run has no checkpoint of this step.
        """
        if step == 0:
            return None
        kept = complete_steps(self.folder.root / "checkpoints")
        if step in kept:
            return self.folder.root / "checkpoints" / f"step-{step}"
        others = f"has those of steps {_listed(kept)}" if kept else "has none"
        raise ConfigError(
            f"--steps: {self.folder.root} has no checkpoint of step {step}; it {others}, and step 0 is the "
            "initial model (trainer.checkpoint_every, trainer.keep_checkpoints)"
        )

    def check_steps(self, first: int, last: int) -> None:
        """Check that the store has all turns of the episodes of the steps `first` to `last`.

        Raises:
            ConfigError: the run has not trained one of the steps, or turns of its groups were removed.
        """
        wanted = range(first, last + 1)
        if missing := [step for step in wanted if step not in self.steps]:
            raise ConfigError(
                f"--steps: {self.folder.root} has not trained step {missing[0]}; it has trained steps "
                f"{min(self.steps)} to {max(self.steps)}"
            )
        with self.store.read() as connection:
            groups = sorted({group for step in self.steps.values() for group in step.uses})
            emptied = reads.emptied_groups(connection, groups)
        gone = [step for step in sorted(self.steps) if emptied.intersection(self.steps[step].uses)]
        if removed := [step for step in gone if step in wanted]:
            left = [step for step in sorted(self.steps) if step not in gone]
            rest = f"steps {_listed(left)} still have all turns" if left else "no step has all turns"
            raise ConfigError(
                f"--steps: turns of step {removed[0]} were removed from the store (store.retain), so it "
                f"cannot be trained again; {rest}"
            )

    def episodes(self, steps: Sequence[int], *, finished_only: bool) -> list[EpisodeSummary]:
        """Return the scored episodes of some steps, each once; `finished_only` leaves out truncated ones."""
        groups = dict.fromkeys(group for step in steps for group in self.steps[step].uses)
        scored = ("finished",) if finished_only else ("finished", "truncated")
        with self.store.read() as connection:
            return [
                found
                for group in groups
                for found in reads.summaries(connection, group_id=group)
                if found.status in scored
            ]

    def load_episodes(self, ids: Sequence[str]) -> list[RecordedEpisode]:
        """Return episodes, in the order of their ids."""
        with self.store.read() as connection:
            return reads.load_episodes(connection, ids)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step."""
        metrics = MetricsFile(self.folder.metrics)
        metrics.update()
        return metrics.rows


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """Hold the lock of a run, which readers share: a run that continues could remove checkpoints and turns.

    Raises:
        ConfigError: the run is running, or the folder has no lock.
    """
    lock = folder.root / "lock"
    if not lock.exists():
        raise ConfigError(f"{folder.root} has no lock file, so no areal-agents train has run in it")
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder.root} is running; rerun it when it has ended, or stop it") from None
        yield


def _listed(steps: Sequence[int]) -> str:
    """Return a list of ascending steps as text, with ranges: "1 to 4, 7 and 9"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][-1] == step - 1:
            ranges[-1].append(step)
        else:
            ranges.append([step])
    words: list[str] = []
    for part in ranges:
        words += [f"{part[0]} to {part[-1]}"] if len(part) > 2 else [str(step) for step in part]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
