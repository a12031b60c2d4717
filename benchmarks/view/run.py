"""Measures the page on a large run: opening it, each of its pages, and what an open page costs."""

from __future__ import annotations

import json as jsonlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from areal_agents.direct_http import direct_client
from areal_agents.launch.run_folder import RunFolder
from benchmarks.view.generate import GROUPS, make_run

EPISODES, TURNS = 100_000, 20
_REPEATS = 10
_LIVE_S = 30.0
_START_S = 60.0
RUN = "/api/runs/run"
# What the browser asks when a run is opened, at once.
_OPENING = ("/", "/static/main.js", "/api/session", RUN, f"{RUN}/curves?name=reward_mean&name=metric_1")


@dataclass(frozen=True, slots=True)
class Figure:
    """The time until the answer is there, and the processor time of the server; both in milliseconds.

    The medians, or means, of several requests. A machine that does other things delays the answer only.
    """

    ms: float
    processor_ms: float


def run(
    *,
    json: bool,
    episodes: int = EPISODES,
    turns: int = TURNS,
    folder: Path | None = None,
    live_s: float = _LIVE_S,
) -> None:
    """Measure and print a table and then, with `json`, the figures.

    Args:
        folder: where the run is written, or was by an earlier measurement, and kept; None: it is removed.
        live_s: how long a live run is followed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-view-") as temporary:
        root = folder or Path(temporary)
        made = RunFolder(root / "run")
        if not made.root.exists():
            make_run(made, episodes=episodes, turns=turns)
        figures = _measure(root, made, episodes, live_s)
    table = Table("request", "ms", "processor ms", title=f"{episodes:,} episodes × {turns} turns")
    for name, figure in figures.items():
        table.add_row(name, f"{figure.ms:,.1f}", f"{figure.processor_ms:,.1f}")
    Console().print(table)
    if json:
        print(jsonlib.dumps({name: asdict(figure) for name, figure in figures.items()}))


def _measure(root: Path, made: RunFolder, episodes: int, live_s: float) -> dict[str, Figure]:
    with _server(root) as (url, process), direct_client(base_url=url, timeout_s=60) as http:
        figures = {"opening a run, first time": _figure(process.pid, lambda: _together(http), 1)}
        figures["opening a run, again"] = _figure(process.pid, lambda: _together(http))
        middle = episodes // 2
        pages = {
            "episodes, newest": f"{RUN}/episodes",
            "episodes, from the middle": f"{RUN}/episodes?before={middle}",
            "episodes, failed": f"{RUN}/episodes?status=failed",
            "episodes, of a task": f"{RUN}/episodes?task=task-7",
            "episodes, of a step": f"{RUN}/episodes?step={max(1, episodes // GROUPS // 32)}",
            "episodes, a score that none has (all are read)": f"{RUN}/episodes?min_reward=5",
            "episodes, a rare string (one answer of the search)": f"{RUN}/episodes?text=needle",
            "episodes, a tool that none calls (one answer)": f"{RUN}/episodes?tool=browse",
            "a step with its groups": f"{RUN}/steps/2",
            "a group": f"{RUN}/groups/g{middle // 16}",
            "an episode": f"{RUN}/episodes/e{middle}",
            "the tokens of a branch": f"{RUN}/episodes/e{middle}/tokens?leaf=t{middle}-3",
            "the timeline": f"{RUN}/timeline",
        }
        for name, path in pages.items():
            figures[name] = _figure(process.pid, partial(_ms, http, path))
        figures["a second of a live run, with an open page"] = Figure(
            1000.0, _live(url, made, process.pid, live_s)
        )
    return figures


def _figure(pid: int, measure: Callable[[], float], repeats: int = _REPEATS) -> Figure:
    before = _processor_s(pid)
    times = [measure() for _ in range(repeats)]
    return Figure(statistics.median(times), 1000 * (_processor_s(pid) - before) / repeats)


def _ms(http: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    http.get(path).raise_for_status()
    return 1000 * (time.perf_counter() - began)


def _together(http: httpx.Client) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(len(_OPENING)) as threads:
        list(threads.map(lambda path: _ms(http, path), _OPENING))
    return 1000 * (time.perf_counter() - began)


def _live(url: str, made: RunFolder, pid: int, live_s: float) -> float:
    """Return the milliseconds of processor time per second that the server needs for one open page.

    A run that makes a step every five seconds and records all the time is followed as a browser does.
    """
    last = jsonlib.loads(made.metrics.read_text().splitlines()[-1])
    ended = threading.Event()

    def train() -> None:
        step = last["step"]
        while not ended.wait(5.0):
            step += 1
            with open(made.metrics, "a") as file:
                file.write(jsonlib.dumps({**last, "step": step, "time": time.time()}) + "\n")

    def record() -> None:
        while not ended.wait(0.2):
            os.utime(made.store)

    threads = [threading.Thread(target=work) for work in (train, record)]
    for thread in threads:
        thread.start()
    try:
        with direct_client(base_url=url, timeout_s=60) as http, http.stream("GET", f"{RUN}/events") as events:
            before, began = _processor_s(pid), time.monotonic()
            name = ""
            for line in events.iter_lines():
                name = line[7:] if line.startswith("event: ") else name
                if line.startswith("data: "):
                    http.get(RUN).raise_for_status()
                    if name == "step":
                        http.get(f"{RUN}/curves?name=reward_mean&name=metric_1").raise_for_status()
                if time.monotonic() - began > live_s:
                    break
            return 1000 * (_processor_s(pid) - before) / (time.monotonic() - began)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(root: Path) -> Iterator[tuple[str, subprocess.Popen[Any]]]:
    """Run `areal-agents view` on a folder; yields its URL and process."""
    command = [sys.executable, "-m", "areal_agents", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield "http" + line.partition("http")[2].partition("/ ")[0], process
        finally:
            process.terminate()
            process.wait(timeout=_START_S)
