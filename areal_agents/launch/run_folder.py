"""The folder of a run: the path of each file, and the lock that lets only one supervisor use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.sockets import address_of
from areal_agents.store.postgres import is_postgres, rename_schema, schema_exists
from areal_agents.store.trainer_lock import PostgresLocks, TrainerLock
from areal_agents.store.urls import shown_store, store_path
from areal_agents.whole_files import write_whole


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """The place of a process in a run on several machines, whose addresses are in the table of roles.

    Attributes:
        count: the number of places of the role.
        epoch: counts the processes that have had the place; see `store/roles.py`.
        secret: the secret of the run, by which its processes know one another.
    """

    index: int
    count: int
    epoch: int
    secret: str


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a run's processes. They are kept in a file that only the owner can read."""

    engine_urls: tuple[str, ...]
    proxy_host: str
    proxy_port: int
    admin_key: str
    view_key: str = ""  # opens the page of the proxy, and nothing else
    engine_key: str = ""  # that requests to the engines must have; "": they want none
    place: ClusterPlace | None = None
    scheme: str = "http"  # of the proxy's URL
    authority: str = ""  # PEM file with the authority of the servers' certificates; "": they have none

    @property
    def proxy_url(self) -> str:
        """Base URL of the proxy, without a path."""
        return f"{self.scheme}://{address_of(self.proxy_host, self.proxy_port)}"

    @property
    def local_url(self) -> str:
        """The same for a browser of this machine, which opens no address that stands for every one."""
        host = "127.0.0.1" if self.proxy_host in ("0.0.0.0", "") else self.proxy_host
        return f"{self.scheme}://{address_of(host, self.proxy_port)}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths in the folder of one run.

    Attributes:
        endpoints: where a process finds the addresses of the others; None: in the folder.
    """

    root: Path
    endpoints: Path | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration that every process reads."""
        return self.root / "config.yaml"

    @property
    def store(self) -> Path:
        """The SQLite store, unless the configuration names another."""
        return self.root / "store.db"

    def store_at(self, url: str | None) -> str | Path:
        """Return the store of the run: `url`, or the file in the folder if the configuration has no URL."""
        return url or self.store

    @property
    def rerun(self) -> Path:
        """What this run is a rerun of; missing in other runs."""
        return self.root / "rerun.json"

    @property
    def evaluation(self) -> Path:
        """What `areal-agents eval` evaluates in this folder, which is then that of no run; else missing."""
        return self.root / "evaluation.json"

    @property
    def new_rewards(self) -> Path:
        """The rewards that a rerun computed again, in the form of `areal-agents rescore`; missing if none."""
        return self.root / "rewards.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per training step."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint, from which the run would continue; None if there is none."""
        names = (path.name.removeprefix("step-") for path in (self.root / "checkpoints").glob("step-*"))
        return max((int(name) for name in names if name.isdigit()), default=None)

    @property
    def final_model(self) -> Path:
        """The trained weights, as a plain Hugging Face folder."""
        return self.root / "final"

    @property
    def summary(self) -> Path:
        """The metrics of the finished run."""
        return self.root / "summary.json"

    @property
    def reward_plot(self) -> Path:
        """A plot of the reward and the held-out reward by step."""
        return self.root / "reward.png"

    def add_wall_s(self, seconds: float) -> float:
        """Add the seconds of a process run to those of the earlier ones, and return the sum."""
        file = self.root / "wall_time.json"
        earlier = json.loads(file.read_text())["wall_s"] if file.exists() else 0.0
        write_whole(file, json.dumps({"wall_s": earlier + seconds}))
        return earlier + seconds

    @property
    def trial(self) -> Path:
        """The verdict of the trial episode."""
        return self.root / "logs" / "trial.json"

    @property
    def notice(self) -> Path:
        """What the rollout process tells the user, until the run has shown it."""
        return self.root / "logs" / "notice.txt"

    @property
    def fingerprint(self) -> Path:
        """What the episodes of each start of the run are played with: agent, reward, held-out tasks."""
        return self.root / "fingerprint.json"

    def log(self, process: str) -> Path:
        """Return the log file of one process."""
        return self.root / "logs" / f"{process}.log"

    @property
    def process_events(self) -> Path:
        """A JSON line for each start, death and restart of a process: time, process, event, detail."""
        return self.root / "logs" / "processes.jsonl"

    @property
    def episode_logs(self) -> Path:
        """The output of the newest episodes of an agent that is a command, each in ID.log."""
        return self.root / "logs" / "episodes"

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Write the addresses and the keys, readable by the owner only."""
        write_whole(self._endpoints, json.dumps(asdict(endpoints)), private=True)

    def read_endpoints(self) -> Endpoints:
        """Return the addresses that the supervisor wrote."""
        data = json.loads(self._endpoints.read_text())
        place = data.pop("place", None)
        urls = tuple(data.pop("engine_urls"))
        return Endpoints(urls, **data, place=None if place is None else ClusterPlace(**place))

    @property
    def _endpoints(self) -> Path:
        return self.endpoints or self.root / "endpoints.json"

    def set_aside(self, store_url: str | None = None) -> list[str]:
        """Rename the folder of an earlier run, and its store if that is elsewhere.

        Returns:
            The new names of the folder and the store, as far as they existed.

        Raises:
            ConfigError: the earlier run is still running, or the folder is not a run folder.
            Conflict: the trainer of the earlier run is still ending.
            StoreError: the database of the store cannot be reached.
        """
        had_folder = self.root.exists()
        is_run = self.config.exists() or (self.root / "lock").exists()
        if had_folder and not is_run and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not the folder of a run; choose another with run_dir=...")
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        store = str(self.store_at(store_url))
        had_store = self._has_store_elsewhere(store)
        if not had_folder and not had_store:
            return []
        moved: list[str] = []
        with self.locked(store_url), contextlib.ExitStack() as held:
            if had_store or not is_postgres(store):
                held.enter_context(TrainerLock.of(store).held(ENDING_TRAINER_S))
            if had_store:
                moved.append(_rename_store(store, stamp))
            if had_folder:
                moved.insert(0, str(self.root.rename(_beside(self.root, f".{stamp}"))))
        return moved

    def _has_store_elsewhere(self, store: str) -> bool:
        """Whether the store exists and is not in the folder."""
        if is_postgres(store):
            return schema_exists(store)
        file = store_path(store).resolve()
        return file.exists() and not file.is_relative_to(self.root.resolve())

    @contextmanager
    def locked(self, store_url: str | None = None) -> Iterator[None]:
        """Lock the run folder and its store. Raises ConfigError if another process uses one of them."""
        try:
            (self.root / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir: cannot create {self.root}: {error.strerror}; choose another with run_dir=..."
            ) from error
        in_use = (
            f"another process is using the run folder {self.root}; stop it, or choose another with "
            "run_dir=..."
        )
        with contextlib.ExitStack() as held:
            held.enter_context(_held(self.root / "lock", in_use))
            if is_postgres(url := str(self.store_at(store_url))):
                run = PostgresLocks(url).try_run()
                if run is None:
                    raise ConfigError(_STORE_IN_USE.format(shown_store(url)))
                held.callback(run.release)
            else:
                store = store_path(url).resolve()
                held.enter_context(_held(_beside(store, ".lock"), _STORE_IN_USE.format(store)))
            yield


ENDING_TRAINER_S = 60.0  # longest wait for a trainer to end after its supervisor
_STORE_IN_USE = "another run is using the store {}; stop it, or choose another with store.url=..."


@contextmanager
def _held(lock: Path, in_use: str) -> Iterator[None]:
    """Hold a lock file, which the system releases when this process ends. Raises ConfigError(`in_use`)."""
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(in_use) from None
        yield


def _rename_store(url: str, stamp: str) -> str:
    """Rename a store, and the files beside its file, which may hold commits; return its new name."""
    if is_postgres(url):
        return rename_schema(url, stamp)
    store = store_path(url)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            _beside(store, suffix).rename(_beside(store, f".{stamp}{suffix}"))
    return str(store.rename(_beside(store, f".{stamp}")))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
