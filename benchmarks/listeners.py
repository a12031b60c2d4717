"""What commits and heartbeats cost a PostgreSQL server while processes wait for commits.

The server must run on this machine, since the processor time of its processes is read from the system.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import psutil
import sqlalchemy as sa
from rich.console import Console

from areal_agents.store import NewEpisode, Store
from areal_agents.store.postgres import engine_of
from benchmarks.store import TOKENS, make_turns

COMMITS = 400
_START_S, _END_S = 300.0, 30.0  # the longest times until the listeners are ready, and until they have ended


@dataclass(frozen=True, slots=True)
class ListenerFigures:
    """Processor time in milliseconds for each commit of a turn, and for each heartbeat of a role process.

    Attributes:
        listeners: how many stores wait for commits.
        commit_server_ms, heartbeat_server_ms: of the processes that the server has before and after.
        commit_listeners_ms, heartbeat_listeners_ms: of all listeners together.
    """

    listeners: int
    commit_server_ms: float
    commit_listeners_ms: float
    heartbeat_server_ms: float
    heartbeat_listeners_ms: float


def measure_listeners(url: str, *, listeners: int, commits: int = COMMITS) -> ListenerFigures:
    """Commit turns, and then heartbeats, one after the other.

    Args:
        url: a store in PostgreSQL on this machine that does not exist yet; it is left there.

    Raises:
        StoreError: the store cannot be written.
    """
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    with Store.open(url) as store:
        store.open_episode(NewEpisode("e0", "key 0")).result()
        place = store.claim_role("engine", 0, host="127.0.0.1", pid=os.getpid())
        waiting = spawning.Process(target=_listen, args=(url, listeners, theirs))
        waiting.start()
        try:
            if not ours.poll(_START_S):
                raise TimeoutError(f"the listeners were not ready within {_START_S:g} s")
            ours.recv()
            server, told = _server_of(url), psutil.Process(waiting.pid)
            (turns,) = make_turns(commits, 1, TOKENS)

            def cost(work: Callable[[int], object]) -> tuple[float, float]:
                before = _cpu_s(server.children()), _cpu_s([told])
                for number in range(commits):
                    work(number)
                after = _cpu_s(server.children()), _cpu_s([told])
                server_ms, told_ms = (
                    1000 * sum(b[process] - a[process] for process in a.keys() & b.keys()) / commits
                    for a, b in zip(before, after, strict=True)
                )
                return round(server_ms, 2), round(told_ms, 2)

            commit = cost(lambda number: store.add_turn("e0", turns[number]).result())
            heartbeat = cost(lambda _: store.beat_role("engine", 0, place.epoch, url=None))
        finally:
            ours.close()
            waiting.join(_END_S)
            waiting.kill()
    return ListenerFigures(listeners, *commit, *heartbeat)


def run(url: str, *, listeners: int, json: bool) -> None:
    """Measure, print a line and, with `json`, the figures."""
    found = measure_listeners(url, listeners=listeners)
    Console().print(
        f"{listeners} listeners: a commit of a turn takes {found.commit_server_ms:.2f} ms of the server's "
        f"processors and {found.commit_listeners_ms:.2f} ms of the listeners', a heartbeat "
        f"{found.heartbeat_server_ms:.2f} and {found.heartbeat_listeners_ms:.2f} ms",
        highlight=False,
        soft_wrap=True,
    )
    if json:
        print(jsonlib.dumps(asdict(found)))


def _listen(url: str, count: int, parent: Connection) -> None:
    """Wait for commits with `count` stores, until the parent closes its end of the pipe."""
    stores = [Store.open(url) for _ in range(count)]
    for store in stores:
        store.wait(store.cursor(), 0.0)  # from now on it is told of commits
    parent.send("ready")
    try:
        parent.recv()
    except EOFError:
        for store in stores:
            store.close()


def _server_of(url: str) -> psutil.Process:
    """Return the first process of the server."""
    engine = engine_of(url)
    try:
        with engine.connect() as connection:
            session = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
            parent = psutil.Process(session).parent()
    finally:
        engine.dispose()
    assert parent is not None, "a session's process has the server's first one as its parent"
    return parent


def _cpu_s(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """Return the processor time in seconds of each process that has not ended yet."""
    found: dict[psutil.Process, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process] = times.user + times.system
    return found
