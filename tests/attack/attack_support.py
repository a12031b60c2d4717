"""Helpers of all attacks: the servers, a second agent whose calls are timed, and the rows of the table."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.proxy.processes import Server

ADMIN_KEY = "admin-of-the-attack"
CONTEXT = 32_768
PAUSE_S = 0.005  # between two calls of the neighbour
CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: what was sent, the expected and the observed result, and whether the defence held."""

    kind: str
    attack: str
    expected: str
    found: str
    holds: bool


@contextlib.contextmanager
def scripted_engine(model: Path, *, reply_tokens: int) -> Iterator[Server]:
    """Run an engine that responds immediately, so that every delay is caused by the proxy."""
    command = [sys.executable, "-m", "areal_agents.testing", "--model", str(model)]
    command += ["--reply-tokens", str(reply_tokens), "--context-length", str(CONTEXT), "--chunk-tokens", "40"]
    with Server(command) as server:
        yield server


@contextlib.contextmanager
def proxy(
    model: Path, engine_url: str, store: Path, *extra: str, admin_key: str | None = ADMIN_KEY
) -> Iterator[Server]:
    """Run `areal-agents serve` in a separate process. Without an admin key, it is open to this machine."""
    command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(model), "--port", "0"]
    command += ["--engine-url", engine_url, "--store", str(store), *extra]
    env = {} if admin_key is None else {"AREAL_AGENTS_ADMIN_KEY": admin_key}
    with Server(command, ready="/health", env=env) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, or status 0 with the reason why there is no response."""

    status: int
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    key: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
    timeout_s: float = CALL_TIMEOUT_S,
) -> Answer:
    """Send one request on a new connection, with these headers and those that `key` and `body` need."""
    began = time.monotonic()
    connection = _connection(url, timeout_s)
    try:
        connection.putrequest(method, path, skip_host=any(name.lower() == "host" for name, _ in headers))
        given = list(headers)
        if key is not None:
            given.append(("Authorization", f"Bearer {key}"))
        if body is not None:
            given.append(("Content-Length", str(len(body))))
            if not any(name.lower() == "content-type" for name, _ in headers):
                given.append(("Content-Type", "application/json"))
        for name, value in given:
            connection.putheader(name, value)
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the end of the body
            if body is not None:
                connection.send(body)
        response = connection.getresponse()
        return Answer(response.status, response.read(), time.monotonic() - began)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, repr(error).encode(), time.monotonic() - began)
    finally:
        connection.close()


def post(url: str, path: str, body: Any, *, key: str | None = ADMIN_KEY, **options: Any) -> Answer:
    """Send a POST request with a JSON body."""
    return send(url, "POST", path, json.dumps(body).encode(), key=key, **options)


def open_episode(url: str, key: str | None = ADMIN_KEY) -> dict[str, Any]:
    """Open an episode; return its `id`, `key` and `base_url`."""
    answer = post(url, "/episodes", {}, key=key)
    assert answer.status in (200, 201), answer
    episode: dict[str, Any] = answer.json
    return episode


def dial(url: str, timeout_s: float = 30.0) -> socket.socket:
    """Open a plain TCP connection."""
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), parts.port or 80), timeout=timeout_s)


class Neighbour:
    """An agent in a separate process, which calls the model continuously in its own episode.

    It is a context manager. Every call must be answered with status 200.
    """

    def __init__(self, url: str, key: str) -> None:
        self._command = [sys.executable, __file__, url, key]
        self._calls: list[tuple[float, float, int]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader.start()
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while not self._calls and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CALL_TIMEOUT_S)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, seconds, status = json.loads(line)
            self._calls.append((began, seconds, status))

    def during(self, began: float, ended: float, *, at_least: int = 200) -> tuple[float, float, int]:
        """Return (p99 in ms, longest in ms, number of failed calls) of the calls that overlapped this time.

        A short attack overlaps too few calls for a percentile, so later calls complete the sample.
        """
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while len(calls := self._since(began)) < at_least or calls[-1][0] < ended:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        overlapping = [call for call in calls if call[0] <= ended]
        found = calls[: max(at_least, len(overlapping))]
        if not found:
            return float("inf"), float("inf"), 1
        times = sorted(seconds for _, seconds, _ in found)
        p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        return p99 * 1e3, times[-1] * 1e3, sum(status != 200 for *_, status in found)

    def _since(self, began: float) -> list[tuple[float, float, int]]:
        return [call for call in [*self._calls] if call[0] + call[1] >= began]


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout_s)


def _call_until_told() -> None:
    """Run the neighbour's process: print a line of JSON for each call, until standard input closes."""
    url, key = sys.argv[1:]
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
    connection, number = _connection(url, CALL_TIMEOUT_S), 0
    while not told.is_set():
        number += 1
        messages = [{"role": "user", "content": f"Question {number}: where is Lyon?"}]
        began = time.monotonic()
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps({"messages": messages, "max_tokens": 8}),
                {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        print(json.dumps((began, time.monotonic() - began, status)), flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    _call_until_told()
