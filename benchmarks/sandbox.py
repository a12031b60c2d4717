"""The start of bubblewrap sandboxes: warm ones, one after another and a hundred at once, and on a host.

A start is measured to the end of the first command in the sandbox, the shortest that there is. Warm sandboxes
are those of a pool, whose folder is copied already; cold ones are started when they are asked for. Those on a
host are warm ones of another process of this machine, which a caller reaches over the loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as jsonlib
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console

from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.pool import SandboxPool
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.sandbox.remote.host import SandboxHost
from areal_agents.sandbox.remote.hosts import HostAddress, SandboxHosts
from areal_agents.sandbox.sandbox import Limits, Sandbox, SandboxSpec
from areal_agents.sockets import listen, url_of

AT_ONCE = 100
FILES, FILE_BYTES = 200, 10_000  # of the folder in whose copy each sandbox works
_COMMAND = ("/bin/true",)
_LIMIT_S = 60.0
_REFILL_S = 0.1
_TOKEN = "of the benchmark"


@dataclass(frozen=True, slots=True)
class SandboxFigures:
    """The results of `measure_sandboxes`; times in milliseconds.

    Attributes:
        open_ms: time until an isolation has shown that it works.
        warm_p50_ms, warm_p99_ms: start of a warm sandbox, one after another, while the others wait.
        cold_p50_ms, cold_p99_ms: start of a sandbox that is not warm, one after another.
        host_p50_ms, host_p99_ms: start of a warm sandbox on a host, one after another.
        take_p99_ms: until a warm sandbox is given out, with all taken at once.
        at_once_p50_ms, at_once_p99_ms: start of a warm sandbox, with all taken at once.
        each_at_once_ms: the time until the last of them has started, per sandbox.
        end_ms: the time to end all of them at once, per sandbox.
        resident_mb: memory of the launcher and its keepers, shared pages once, per sandbox.
        sandboxes: how many were at once.
    """

    open_ms: float
    warm_p50_ms: float
    warm_p99_ms: float
    cold_p50_ms: float
    cold_p99_ms: float
    host_p50_ms: float
    host_p99_ms: float
    take_p99_ms: float
    at_once_p50_ms: float
    at_once_p99_ms: float
    each_at_once_ms: float
    end_ms: float
    resident_mb: float
    sandboxes: int


async def measure_sandboxes(folder: Path, *, sandboxes: int = AT_ONCE) -> SandboxFigures:
    """Start sandboxes that work in a copy of `folder`.

    Raises:
        SandboxUnavailable: bubblewrap is not available here.
    """
    spec = SandboxSpec(folder=folder, limits=Limits(memory_mb=512, processes=64, disk_mb=64))
    began = time.perf_counter()
    isolation = await open_isolation("bubblewrap", spec)
    opened = time.perf_counter() - began
    try:
        cold = [await _started(lambda: isolation.start(spec)) for _ in range(sandboxes)]
        await asyncio.gather(*(sandbox.end() for sandbox, *_ in cold))

        pool = SandboxPool(isolation, spec, warm=sandboxes)
        await pool.fill()
        resident = _resident()
        warm = []
        for _ in range(sandboxes):
            warm.append(await _started(pool.take))
            await pool.fill()  # taking one starts another, which is not what is measured
            await warm[-1][0].end()
        began = time.perf_counter()
        waiting = pool.stop_refilling()
        assert waiting == sandboxes
        at_once = await asyncio.gather(*(_started(pool.take) for _ in range(sandboxes)))
        all_started = time.perf_counter() - began
        began = time.perf_counter()
        await asyncio.gather(*(sandbox.end() for sandbox, *_ in at_once))
        ended = time.perf_counter() - began
        await pool.close()
    finally:
        await isolation.close()
    on_host = await _on_a_host(spec, sandboxes)
    warm_ms, cold_ms, once_ms, host_ms = (
        np.array([total for *_, total in runs]) * 1000 for runs in (warm, cold, at_once, on_host)
    )
    taken_ms = np.array([taken for _, taken, _ in at_once]) * 1000
    return SandboxFigures(
        open_ms=round(opened * 1000, 1),
        warm_p50_ms=_percentile(warm_ms, 50),
        warm_p99_ms=_percentile(warm_ms, 99),
        cold_p50_ms=_percentile(cold_ms, 50),
        cold_p99_ms=_percentile(cold_ms, 99),
        host_p50_ms=_percentile(host_ms, 50),
        host_p99_ms=_percentile(host_ms, 99),
        take_p99_ms=_percentile(taken_ms, 99),
        at_once_p50_ms=_percentile(once_ms, 50),
        at_once_p99_ms=_percentile(once_ms, 99),
        each_at_once_ms=round(all_started * 1000 / sandboxes, 1),
        end_ms=round(ended * 1000 / sandboxes, 1),
        resident_mb=round(resident / sandboxes, 2),
        sandboxes=sandboxes,
    )


async def _on_a_host(spec: SandboxSpec, sandboxes: int) -> list[tuple[Sandbox, float, float]]:
    """Start warm sandboxes on a host one after another."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    host = processes.Process(target=_serve, args=(spec, sandboxes, theirs))
    host.start()
    try:
        if not await asyncio.to_thread(ours.poll, _LIMIT_S):
            raise TimeoutError(f"the host was not ready within {_LIMIT_S:g} s")
        address = HostAddress(ours.recv(), _TOKEN)
        isolation = RemoteIsolation("bubblewrap", SandboxHosts(lambda: [address]), warm=sandboxes)
        started = []
        for _ in range(sandboxes):
            started.append(await _started(lambda: isolation.start(spec)))
            await started[-1][0].end()
            await asyncio.sleep(_REFILL_S)  # taking one starts another, which is not what is measured
        return started
    finally:
        ours.send("end")
        host.join(_LIMIT_S)
        host.kill()


def _serve(spec: SandboxSpec, sandboxes: int, caller: Connection) -> None:
    """Serve sandboxes in a process of their own until told to end."""

    async def serve() -> None:
        host = SandboxHost(_TOKEN, places=sandboxes)
        try:
            await host.warm_up("bubblewrap", spec, warm=sandboxes)
            listener = listen("127.0.0.1", 0)
            await host.listen(listener)
            caller.send(url_of(listener))
            await asyncio.to_thread(caller.recv)
        finally:
            await host.close()

    asyncio.run(serve())


def run(*, json: bool) -> None:
    """Measure, and print the figures."""
    with tempfile.TemporaryDirectory(prefix="bench-sandbox-") as name:
        for number in range(FILES):
            (Path(name) / f"{number}.txt").write_bytes(b"x" * FILE_BYTES)
        found = asyncio.run(measure_sandboxes(Path(name)))
    console = Console()
    lines = (
        f"a warm sandbox has run its first command after {found.warm_p50_ms} ms "
        f"({found.warm_p99_ms} ms at the 99th percentile), with {found.sandboxes} others waiting; "
        f"a cold one after {found.cold_p50_ms} ms ({found.cold_p99_ms} ms), a warm one on a host after "
        f"{found.host_p50_ms} ms ({found.host_p99_ms} ms)",
        f"{found.sandboxes} warm ones at once: given out within {found.take_p99_ms} ms, first command ended "
        f"after {found.at_once_p50_ms} ms ({found.at_once_p99_ms} ms), one every {found.each_at_once_ms} ms",
        f"opening takes {found.open_ms} ms, ending {found.end_ms} ms each, and a waiting sandbox has "
        f"{found.resident_mb} MB",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if json:
        print(jsonlib.dumps(asdict(found)))


async def _started(start: Callable[[], Awaitable[Sandbox]]) -> tuple[Sandbox, float, float]:
    """Start a sandbox and run its first command; return it, and the seconds of the start and of both."""
    began = time.perf_counter()
    sandbox = await start()
    taken = time.perf_counter() - began
    finished = await sandbox.run(_COMMAND, timeout_s=_LIMIT_S)
    assert finished.status == 0, finished
    return sandbox, taken, time.perf_counter() - began


def _resident() -> float:
    """Return the memory of all launchers and keepers in MB, with shared pages counted once."""
    kilobytes = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or one that has ended
            if b"launcher.py" in (process / "cmdline").read_bytes():
                words = (process / "smaps_rollup").read_text().split()
                kilobytes += int(words[words.index("Pss:") + 1])
    return kilobytes / 1e3


def _percentile(values: np.ndarray, percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1)
