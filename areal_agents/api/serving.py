"""`serve`: an engine and a proxy for the time of a with-block."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_agents.client import Client, OpenedEpisode
from areal_agents.direct_http import openai_client_sync
from areal_agents.episode import Episode
from areal_agents.errors import RunFailed
from areal_agents.launch.ready import wait_until_ready
from areal_agents.secret_variables import ADMIN_KEY

if TYPE_CHECKING:
    from areal_agents.direct_http import OpenAI

START_S = 180.0  # longest wait for engine and proxy
STOP_S = 60.0
POLL_S = 0.1


class Server:
    """A running proxy.

    Attributes:
        base_url: the base URL for OpenAI clients; Anthropic clients take it without /v1.
        api_key: the admin key, which such clients may use.
        store: the file that has the recorded episodes.
        client: a client of the control API.
    """

    def __init__(self, url: str, api_key: str, store: Path, client: Client) -> None:
        self.base_url = f"{url}/v1"
        self.api_key = api_key
        self.store = store
        self.client = client

    def openai(self) -> OpenAI:
        """Return an OpenAI client; each conversation becomes an episode by itself."""
        return openai_client_sync(base_url=self.base_url, api_key=self.api_key)

    @contextmanager
    def episode(
        self, task: Mapping[str, Any] | None = None, *, split: str = "train", group: str | None = None
    ) -> Iterator[Episode]:
        """Open an episode for the time of a with-block.

        It is finished at the end of the block. If the block raises, it has failed.

        Args:
            task: the task, with its id in "id" if it has one.
            split: "train" or "eval".
            group: the id of its group.
        """
        given = dict(task or {})
        named = {"id": str(given["id"]), "input": given} if "id" in given else None
        named = named or ({"id": f"task-{secrets.token_hex(6)}", "input": given} if given else None)
        opened = self.client.open_episode(named, split=split, group=group)
        try:
            yield self._handle(opened)
        except BaseException as error:
            self.client.fail(opened.id, f"{type(error).__name__}: {error}")
            raise
        self.client.finish(opened.id)

    def _handle(self, opened: OpenedEpisode) -> Episode:
        def report(path: str, body: Mapping[str, Any]) -> None:
            self.client.post_to_episode(opened.id, path, body)

        return Episode(opened.id, opened.base_url, opened.api_key, report)


@contextmanager
def serve(
    model: str | Path,
    *,
    engine_url: str | None = None,
    store: str | Path | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve a model for the time of a with-block. `areal-agents serve` is the same program.

    Args:
        model: a Hugging Face folder, an id of the Hub, or "quickstart".
        engine_url: a running SGLang server; None: the embedded engine is started.
        store: the file of the episodes; None: a temporary one, which is deleted at the end.
        settings: settings of the proxy, such as durability="batched".

    Raises:
        RunFailed: engine or proxy did not start; the message has the cause.
    """
    with tempfile.TemporaryDirectory(prefix="areal-agents-serve-") as home:
        file = Path(store).resolve() if store is not None else Path(home) / "store.db"
        key = f"admin-{secrets.token_urlsafe(24)}"
        command = [sys.executable, "-u", "-m", "areal_agents", "serve", "--model", str(model), "--port", "0"]
        command += ["--store", str(file), *(["--engine-url", engine_url] if engine_url else [])]
        command += [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, ADMIN_KEY: key},  # every user of the machine can read command lines
        )
        lines: deque[str] = deque(maxlen=40)
        found: list[str] = []
        reader = threading.Thread(target=_read, args=(process, lines, found), daemon=True)
        reader.start()
        try:
            url = _url(process, lines, found)
            with Client(url, key) as client:
                wait_until_ready(f"{url}/ready", check=lambda: _check(process, lines), timeout_s=START_S)
                yield Server(url, key, file, client)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
            reader.join(STOP_S)


def _read(process: subprocess.Popen[str], lines: deque[str], found: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        words = line.split()
        if line.startswith("serving ") and "at" in words:
            found.append(words[words.index("at") + 1].removesuffix("/v1"))


def _url(process: subprocess.Popen[str], lines: deque[str], found: list[str]) -> str:
    deadline = time.monotonic() + START_S
    while not found:
        _check(process, lines, has_time=time.monotonic() < deadline)
        time.sleep(POLL_S)
    return found[0]


def _check(process: subprocess.Popen[str], lines: deque[str], *, has_time: bool = True) -> None:
    """Raise RunFailed, with the latest output, if the process has ended or there is no time left."""
    if process.poll() is not None or not has_time:
        raise RunFailed("the model is not served: " + ("\n".join(lines) or "no output"))
