"""The runs that a page shows, each read from its folder or from a store file alone.

What is read is kept as long as its file has not changed, so a run that is being trained is followed and a
finished one is read once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from areal_agents.config.models import model_folder
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inspection.forks import forks_folder
from areal_agents.inspection.runs import is_running, state_of
from areal_agents.inspection.sources import config_of_run, read_json, rerun_in
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import NotFound, pages
from areal_agents.store.pages import ListedGroup
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.view.texts import TokenTexts


class Run:
    """One run, or a store that belongs to none; `folder` is then None. Thread-safe.

    Attributes:
        name: the name of the folder or the store file, which is its name in links.
        episodes: the store with its episodes: for a rerun that of the run that it repeats, else `store`.
        rerun: the content of rerun.json; None if the run is no rerun.
        model: a folder with the tokenizer, for the texts of tokens; None: that of the configuration.
    """

    def __init__(self, name: str, folder: RunFolder | None, store: ReadOnlyStore, model: str | None) -> None:
        self.name = name
        self.folder = folder
        self.store = store
        self.rerun = rerun_in(folder) if folder is not None else None
        self.episodes = store if self.rerun is None else ReadOnlyStore(self.rerun["store"])
        place = folder.root if folder is not None else store.path
        self._forks = None if place is None else ReadOnlyStore(forks_folder(place).store)
        self._model = model
        self._lock = threading.Lock()
        self._metrics = MetricsFile(folder.metrics) if folder is not None else None
        self._config: tuple[int, dict[str, Any]] | None = None  # the file's time of change, its content
        self._texts: TokenTexts | None = None
        self._new_rewards: Mapping[str, Mapping[str, float]] | None = None

    @classmethod
    def of_folder(cls, folder: RunFolder, model: str | None = None) -> Run:
        """Return the run of a folder. Raises ConfigError if it is not a run's."""
        config = config_of_run(folder)
        url = (config.get("store") or {}).get("url")
        return cls(folder.root.name, folder, ReadOnlyStore(folder.store_at(url)), model)

    @property
    def forks(self) -> ReadOnlyStore | None:
        """The store of the forks of its episodes; None if there is none."""
        return self._forks if self._forks is not None and self._forks.exists() else None

    @contextlib.contextmanager
    def reading(self, episode_id: str) -> Iterator[tuple[sa.Connection, bool]]:
        """Open the store that has an episode: `episodes`, unless only that of the forks has it.

        Yields:
            A connection as of `ReadOnlyStore.read`, and whether it is that of `episodes`.
        """
        with self.episodes.read() as connection:
            if self.forks is None or pages.has_episode(connection, episode_id):
                yield connection, True
                return
        with self.forks.read() as connection:
            yield connection, False

    def config(self) -> dict[str, Any]:
        """Return the configuration, {} of a store alone. Raises ConfigError if it cannot be read."""
        if self.folder is None:
            return {}
        try:
            changed = self.folder.config.stat().st_mtime_ns
        except FileNotFoundError:
            raise ConfigError(f"the folder {self.folder.root} was deleted or renamed") from None
        with self._lock:
            if self._config is None or self._config[0] != changed:
                self._config = (changed, config_of_run(self.folder))
            return self._config[1]

    def rows(self) -> Sequence[dict[str, Any]]:
        """Return the metrics of each step. Raises ConfigError if a line of the file is broken."""
        if self._metrics is None:
            return []
        with self._lock:
            self._metrics.update()
            return list(self._metrics.rows)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, None before its end."""
        return read_json(self.folder.summary) if self.folder is not None else None

    def state(self) -> dict[str, Any]:
        """Return the run in a list: its name, state, steps, held-out rewards and model, or its problem."""
        out: dict[str, Any] = {"name": self.name, "state": "store", "problem": None}
        if self.folder is None:
            return out
        if self.rerun is not None:
            of = {name: self.rerun[name] for name in ("run", "step", "until", "changes")}
            out["rerun"] = {**of, "name": Path(self.rerun["run"]).name}
        rows: Sequence[dict[str, Any]] = []
        try:
            config = self.config()
            try:
                rows = self.rows()
            except ConfigError as error:
                out["problem"] = str(error)
            return {**out, **state_of(self.folder, config, rows), "time": rows[-1]["time"] if rows else None}
        except (ArealAgentsError, OSError) as error:
            return {**out, "state": "unreadable", "problem": str(error)}

    def is_running(self) -> bool:
        """Whether a supervisor runs it."""
        return self.folder is not None and is_running(self.folder)

    def with_new_scores(self, group: ListedGroup) -> ListedGroup:
        """Return a group with the scores that a rerun computed again, if it did."""
        rewards = self.new_rewards()
        if not rewards:
            return group
        scores = {known.id: known.score for known in group.episodes}
        scores |= {known: sum(rewards[known].values()) for known in scores if known in rewards}
        return replace(group, episodes=[replace(known, score=scores[known.id]) for known in group.episodes])

    def new_rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the rewards that a rerun computed again, by episode and by name or turn; {} without any."""
        if self.rerun is None or not self.rerun["new_rewards"]:
            return {}
        assert self.folder is not None
        with self._lock:
            if self._new_rewards is None:
                rows = (read_json(self.folder.new_rewards) or {"episodes": []})["episodes"]
                self._new_rewards = {row["episode"]: row["rewards"] for row in rows}
            return self._new_rewards

    def metrics_mark(self) -> tuple[Any, ...]:
        """Return a value that changes with the metrics and the summary of the run."""
        return () if self.folder is None else (_mark(self.folder.metrics), _mark(self.folder.summary))

    def store_mark(self) -> tuple[Any, ...]:
        """Return a value that changes with the store."""
        return self.store.mark()

    def texts(self) -> TokenTexts:
        """Return what turns token ids into texts."""
        model = self._model or self.config().get("model")
        with self._lock:
            if self._texts is None:
                self._texts = TokenTexts(None if model is None else Path(model))
            return self._texts


class Runs:
    """The runs at a place: a folder that has runs, the folder of one run, or a store file. Thread-safe.

    `model` has the tokenizer of the stores that name none: a folder, or a name as in a configuration.
    """

    def __init__(self, place: Path, *, model: str | None = None) -> None:
        model = None if model is None else model_folder(model, Path.cwd(), weights=False)
        self.place = place
        self._model = model
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        if not place.exists():
            raise ConfigError(
                f"there is no {place}; give the folder that has the runs, a run, or a store file"
            )
        if place.is_file():
            with (store := ReadOnlyStore(place)).read():
                pass
            self._only: Run | None = Run(place.name, None, store, model)
        elif (place / "config.yaml").is_file():
            self._only = Run.of_folder(RunFolder(place), model)
        else:
            self._only = None

    @classmethod
    def of(cls, run: Run) -> Runs:
        """Return the place that has only this run."""
        runs = cls.__new__(cls)
        runs.place, runs._model, runs._lock, runs._runs, runs._only = (
            run.store.path or Path.cwd(),
            None,
            threading.Lock(),
            {},
            run,
        )
        return runs

    def all(self) -> list[Run]:
        """Return every run, the newest first; folders of evaluations and of other programs are left out."""
        if self._only is not None:
            return [self._only]
        found = []
        for lock in self.place.glob("*/lock"):
            if RunFolder(lock.parent).evaluation.exists():
                continue
            try:
                run = self._run(lock.parent)
                found.append((-(lock.parent / "config.yaml").stat().st_mtime, run))
            except (ConfigError, OSError):  # another program's folder, or one that was removed just now
                continue
        return [run for _, run in sorted(found, key=lambda pair: (pair[0], pair[1].name))]

    def get(self, name: str) -> Run:
        """Return a run by its name. Raises NotFound."""
        if self._only is not None:
            if name == self._only.name:
                return self._only
        elif name not in ("", ".", "..") and "/" not in name:
            # Another program's folder, or a name that no file can have.
            with contextlib.suppress(ConfigError, OSError):
                if (self.place / name / "lock").exists():
                    return self._run(self.place / name)
        raise NotFound(f"there is no run {name!r} in {self.place}; it was renamed or deleted")

    def _run(self, root: Path) -> Run:
        with self._lock:
            run = self._runs.get(root.name)
        if run is None:
            run = Run.of_folder(RunFolder(root), self._model)
            with self._lock:
                run = self._runs.setdefault(root.name, run)
        return run


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)
