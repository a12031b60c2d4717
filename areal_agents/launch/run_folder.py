"""The folder of a run: where each file lies, and the lock that lets only one supervisor use it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from areal_agents.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the processes of a run find each other. Kept in a file that only the owner can read."""

    engine_urls: tuple[str, ...]
    proxy_host: str
    proxy_port: int
    admin_key: str

    @property
    def engine_address(self) -> tuple[str, int]:
        """Host and port of the first engine."""
        url = urlsplit(self.engine_urls[0])
        return str(url.hostname), int(url.port or 80)

    @property
    def proxy_url(self) -> str:
        """Base URL of the proxy, without a path."""
        return f"http://{self.proxy_host}:{self.proxy_port}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below the folder of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration that every process reads."""
        return self.root / "config.yaml"

    @property
    def store(self) -> Path:
        """The SQLite store, unless the configuration names another."""
        return self.root / "store.db"

    def store_at(self, url: str | None) -> str | Path:
        """Where the run's store is: at `url`, the configuration's, or in the folder without one."""
        return url or self.store

    @property
    def metrics(self) -> Path:
        """One JSON object a training step."""
        return self.root / "metrics.jsonl"

    @property
    def final_model(self) -> Path:
        """The trained weights, a plain Hugging Face folder."""
        return self.root / "final"

    @property
    def summary(self) -> Path:
        """Figures of the finished run."""
        return self.root / "summary.json"

    @property
    def reward_plot(self) -> Path:
        """Reward and held-out reward by step."""
        return self.root / "reward.png"

    def log(self, process: str) -> Path:
        """Log of one process."""
        return self.root / "logs" / f"{process}.log"

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Write the addresses and the admin key, readable by the owner only."""
        temporary = self.root / "endpoints.tmp"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(endpoints), file)
        temporary.replace(self.root / "endpoints.json")

    def read_endpoints(self) -> Endpoints:
        """The addresses that the supervisor wrote."""
        data = json.loads((self.root / "endpoints.json").read_text())
        return Endpoints(**{**data, "engine_urls": tuple(data["engine_urls"])})

    def set_aside(self) -> Path | None:
        """Rename an earlier run out of the way; the new name, or None if there was none.

        ConfigError if that run is still alive, or if the folder holds something that is no run.
        """
        if not self.root.exists():
            return None
        if not (self.config.exists() or (self.root / "lock").exists()) and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not the folder of a run; choose another with run_dir=...")
        with self.locked():
            target = self.root.with_name(
                f"{self.root.name}.{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            )
            self.root.rename(target)
        return target

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process. ConfigError if another one has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "logs").mkdir(exist_ok=True)
        with open(self.root / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is using the run folder {self.root}; "
                    "stop it, or choose another with run_dir=..."
                ) from None
            yield
