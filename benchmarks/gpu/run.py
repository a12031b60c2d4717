"""Runs the parts, each in a process of its own, and writes the figures.

All parts share one deadline. A part that fails, hangs or takes the GPU down does not prevent the others while
there is time; those for which none is left are reported as not run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.parts import PARTS, Device

ROOT = Path(__file__).parents[2]
WHOLE_S = 540.0  # of all parts together: GPU machines are lent for commands of at most ten minutes
LEAST_S = 20.0  # with less, a part is not begun: a process that imports torch takes half of it
_POLL_S = 0.2
_SHOWN = 1500  # characters of the output of a failed part that are printed
_KEPT = 60_000  # and that gpu.json keeps


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part. `reason` says why it was skipped or not run, or how it failed."""

    part: str
    status: Literal["passed", "failed", "skipped", "not run"]
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def run_parts(names: Sequence[str], device: Device, *, within_s: float = WHOLE_S) -> list[Outcome]:
    """Run the parts in order, and print each outcome when it is known. On a GPU, neighbours with
    `Part.beside` run at the same time.

    Args:
        within_s: what all parts share. Each gets what is left, and at most its own limit.
    """
    deadline = time.monotonic() + within_s
    outcomes: list[Outcome] = []
    interrupted = threading.Event()

    def one(name: str) -> Outcome:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            outcome = Outcome(name, "not run", 0.0, reason=f"no time left of {within_s:g} s")
        else:
            # models of several GB, which a part that is killed would leave
            with tempfile.TemporaryDirectory(
                prefix="areal-agents-gpu-", ignore_cleanup_errors=True
            ) as folder:
                outcome = _run_part(name, device, left_s, interrupted, folder)
        told = json.dumps(outcome.figures) if outcome.status == "passed" else outcome.reason[-_SHOWN:]
        print(f"{name:11} {outcome.status:8} {outcome.seconds:6.1f} s  {told}", flush=True)
        return outcome

    for beside, neighbours in groupby(names, lambda name: device == "cuda" and PARTS[name].beside):
        group = list(neighbours)
        with _interrupted_by_sigterm(), ThreadPoolExecutor(len(group) if beside else 1) as threads:
            try:
                outcomes += threads.map(one, group)
            except BaseException:  # a signal, which reaches no part: each has a session of its own
                interrupted.set()
                raise
    return outcomes


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too, which `timeout` sends."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_part(
    name: str, device: Device, left_s: float, interrupted: threading.Event, temporary: str
) -> Outcome:
    started, limit_s = time.monotonic(), PARTS[name].limit_s
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", name, device],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": _path(), "TMPDIR": temporary}, start_new_session=True,
    )  # fmt: skip
    ended = None
    while ended is None and not interrupted.is_set() and time.monotonic() - started < min(left_s, limit_s):
        with suppress(subprocess.TimeoutExpired):
            ended = process.communicate(timeout=_POLL_S)
    if ended is None:
        os.killpg(process.pid, signal.SIGKILL)  # with the engines and trainers that it has started
        output, errors = process.communicate()
        seconds, said = round(time.monotonic() - started, 1), errors[-_KEPT:].strip()
        if interrupted.is_set():
            return Outcome(name, "not run", seconds, reason="interrupted")
        if left_s < limit_s:  # which says nothing about the part
            return Outcome(name, "not run", seconds, reason=f"no time left after {left_s:.0f} s: {said}")
        return Outcome(name, "failed", seconds, reason=f"was not done after {limit_s:.0f} s: {said}")
    output, errors = ended
    seconds = round(time.monotonic() - started, 1)
    if process.returncode:
        return Outcome(name, "failed", seconds, reason=errors[-_KEPT:].strip())
    return Outcome(name, seconds=seconds, **json.loads(output.splitlines()[-1]))


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def machine(device: Device) -> dict[str, Any]:
    """Return the names and versions of what the figures depend on."""
    import platform

    import torch
    import transformers

    found: dict[str, Any] = {
        "device": "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def write(outcomes: Sequence[Outcome], machine: dict[str, Any], folder: Path) -> None:
    """Write gpu.json and gpu.md, the table for docs/benchmarks.md, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("gpu.json", json.dumps({"machine": machine, "parts": [asdict(o) for o in outcomes]}, indent=2)),
        ("gpu.md", as_markdown(outcomes, machine)),
    ):
        temporary = folder / f".{name}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(folder / name)


def as_markdown(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> str:
    """The figures as a section of docs/benchmarks.md."""
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "device")
    lines = [f"{machine['device']} ({about}).", "", "| part | outcome | figures |", "| --- | --- | --- |"]
    for outcome in outcomes:
        figures = "; ".join(f"{name} {_shown(value)}" for name, value in outcome.figures.items())
        told = figures or " ".join(outcome.reason.split())[-300:].replace("|", "\\|")
        lines.append(f"| {PARTS[outcome.part].what} | {outcome.status} | {told} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items()) + ")"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def run(folder: Path, *, device: Device, parts: Sequence[str] = (), within_s: float) -> int:
    """Measure, write the figures to the folder, and return the exit status: 1 if a part failed.

    Without a GPU nothing is measured or written, and the status is 0.
    """
    from benchmarks.gpu.device import why_no_gpu

    reason = why_no_gpu() if device == "cuda" else None
    if reason is not None:
        print(f"Nothing was measured on a GPU: {reason}. No figures were written.")
        return 0
    outcomes = run_parts(parts or tuple(PARTS), device, within_s=within_s)
    write(outcomes, machine(device), folder)
    print(f"The figures are in {folder}/gpu.json and {folder}/gpu.md.")
    failed, late = ([o.part for o in outcomes if o.status == status] for status in ("failed", "not run"))
    if late:
        print(f"Not run, because no time was left: {', '.join(late)}. Measure them with --part.")
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0
