"""The workers of a proxy as processes, and what can be seen of them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from proxy_support import MODEL

SERVE = """
import json, sys
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.workers.supervisor import serve_workers
from areal_agents.store import StoreConfig
model, engine_url, store, config, kept = sys.argv[1:]
serve_workers(
    model, ProxyConfig(**json.loads(config)), workers=2, store=store, engine_urls=[engine_url],
    durability=StoreConfig(retain=json.loads(kept)), announce=lambda line: print(line, flush=True),
)
"""


class Serving:
    """`areal-agents serve --workers N` as a process; with `retain`, the function that the command calls.

    `config` contains settings of the proxy.

    Attributes:
        url: the URL of the proxy.
        own: [workers] the URL at which the siblings of each worker reach it; empty for one worker.
    """

    def __init__(
        self,
        engine_url: str,
        store: Path,
        *,
        port: int = 0,
        workers: int = 2,
        retain: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(MODEL)]
        command += ["--engine-url", engine_url, "--store", str(store)]
        command += ["--port", str(port), "--workers", str(workers)]
        command += [f"{name}={value}" for name, value in config.items()]
        if retain is not None:
            settings = map(json.dumps, (config, retain))
            command = [sys.executable, "-c", SERVE, str(MODEL), engine_url, str(store), *settings]
        self.store = store
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = re.findall(r"http://[0-9.]+:\d+", line)[0]
        indexes = range(workers) if workers > 1 else ()
        self.own = [self._newest(index)[1][1] for index in indexes]

    def lock(self, index: int) -> Path:
        """Return the lock file of a worker's newest process, once it runs. It is named after the owner."""
        return self._newest(index)[0]

    def pid(self, index: int) -> int:
        """Return the process id of a worker's newest process, once it runs."""
        return int(self._newest(index)[1][0])

    def _newest(self, index: int) -> tuple[Path, list[str]]:
        """Return the lock file of a worker's newest process and its content, the process id and the base URL.

        A process that starts removes the files of earlier ones, so a file that was listed may be gone.
        """
        folder = self.store.with_name(self.store.name + ".workers")
        files: list[tuple[Path, list[str]]] = []

        def read() -> bool:
            try:
                files[:] = [(path, path.read_text().split()) for path in folder.glob(f"*.{index}.*.lock")]
            except FileNotFoundError:
                return False
            return bool(files)

        wait_for(read)
        return max(files, key=lambda file: int(file[0].name.split(".")[2]))

    def kill(self, index: int) -> None:
        """Send SIGKILL."""
        os.kill(self.pid(index), signal.SIGKILL)

    def end(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition is true that another process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def workers_of(engine_url: str, store: Path, **settings: Any) -> Iterator[tuple[Serving, list[int]]]:
    """Start `Serving`, yield it with the process ids of its workers, and kill all of them in the end."""
    started = Serving(engine_url, store, **settings)
    pids = [started.pid(index) for index in range(len(started.own))]
    try:
        yield started, pids
    finally:
        for pid in (started.process.pid, *pids):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        started.process.wait(60)
        assert started.process.stdout is not None
        started.process.stdout.close()
