"""`make chaos`: kills random processes, fills the disk, slows it down, and counts what was lost.

    python tests/chaos/run_chaos.py --minutes 12 --seed 0 --json

Each kind of chaos has a separate run. With `--json` the last line is one JSON object. The exit status is 1 if
a count that must be 0 is not.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_count_support import Counts, Ledger, count
from chaos_disk_support import can_mount, fill, slow_disk, small_disk
from chaos_proxy_support import (
    PROXY_ROLES,
    Agents,
    ChaosProxy,
    ProxyCounts,
    scripted_engine,
)
from chaos_proxy_support import count as count_proxy
from chaos_run_support import ROLES, ChaosRun, NotInTime

from areal_agents.inference.ports import reserved_ports
from areal_agents.testing import running

LAST_STEPS = 2  # that a run trains undisturbed at its end
DISK_MB, KEPT_FREE_GB = 400, 0.06
MEAN_PAUSE_S = 4.0
PROXY_AGENTS, PROXY_MEAN_PAUSE_S = 50, 8.0
PROXY_STARTS_S = 120.0
AGENT_ENDS_S = 300.0  # longest that an agent may take to end its last episode


@dataclass(frozen=True, slots=True)
class Death:
    """A kill of a process of a role, `pause_s` after the previous kill or after the proxy serves again."""

    role: str
    pause_s: float
    when_it_serves: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all kinds of chaos; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--keep", type=Path, help="folder that the runs stay in")
    options = parser.parse_args(arguments)
    root = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    seconds = options.minutes * 60
    found: dict[str, Counts | ProxyCounts] = {}
    found["kills"] = kills(root / "kills", seconds=seconds * 0.45, seed=options.seed)
    show("kills", found["kills"])
    found["two workers"] = proxy_kills(root / "workers", seconds=seconds * 0.2, seed=options.seed)
    show("two workers", found["two workers"])
    if can_mount():
        found["full disk"] = full_disk(root / "full")
        show("full disk", found["full disk"])
    environment = slow_disk(root / "slow-layer", sync_ms=100, write_ms=2)
    if environment is not None:
        found["slow disk"] = kills(
            root / "slow", seconds=seconds * 0.15, seed=options.seed + 1, environment=environment,
            settings=["store.durability=power"],
        )  # fmt: skip
        show("slow disk", found["slow disk"])
    not_run = sorted({"full disk", "slow disk"} - found.keys())  # no right to mount, or no C compiler
    for name in not_run:
        print(f"{name}: NOT RUN on this machine")
    if options.keep is None:
        shutil.rmtree(root, ignore_errors=True)
    faults = {name: counts.faults for name, counts in found.items() if counts.faults}
    if options.json:
        counts_of = {name: asdict(counts) for name, counts in found.items()}
        print(json.dumps({**counts_of, "faults": faults, "not_run": not_run}))
    return 1 if faults else 0


def show(name: str, counts: Counts | ProxyCounts) -> None:
    """Print one line for each count."""
    print(f"{name}: {'nothing lost' if not counts.faults else 'LOST: ' + str(counts.faults)}")
    for key, value in asdict(counts).items():
        print(f"    {key:32} {value}", flush=True)


def kills(
    root: Path,
    *,
    seconds: float,
    seed: int,
    settings: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Counts:
    """Kill random processes at random moments for this time, and restart the run as a user would."""
    rng = random.Random(seed)
    run, ledger = _new_run(root, settings, environment)
    deadline = time.monotonic() + seconds
    try:
        run.start()
        run.wait_for_steps(1)
        while time.monotonic() < deadline:
            _pause(run, min(rng.expovariate(1 / MEAN_PAUSE_S), 4 * MEAN_PAUSE_S))
            run.kill(rng.choice(ROLES), rng)
            _see_to(run)
        return _end(run, ledger)
    finally:
        run.end()


def kill_each(root: Path, *, seed: int) -> Counts:
    """Kill one process of each role in quick succession, and resume the run once: the short form."""
    rng = random.Random(seed)
    run, ledger = _new_run(root)
    try:
        run.start()
        run.wait_for_steps(1)
        for role in ("agent", "engine", "worker", "proxy", "rollout"):
            run.wait_for(functools.partial(run.kill, role, rng))  # the process may be restarting
            _pause(run, rng.uniform(0.0, 1.0))
        run.wait_for_steps(1)
        run.kill(rng.choice(("trainer", "supervisor")), rng)
        return _end(run, ledger)
    finally:
        run.end()


def proxy_kills(root: Path, *, seconds: float, seed: int) -> ProxyCounts:
    """Kill workers and supervisors of a proxy at random moments for this time, while many agents call it."""
    rng = random.Random(seed)

    def deaths() -> Iterator[Death]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pause_s = min(rng.expovariate(1 / PROXY_MEAN_PAUSE_S), 3 * PROXY_MEAN_PAUSE_S)
            yield Death(rng.choice(PROXY_ROLES), pause_s)

    return _proxy_deaths(root, deaths(), rng, agents=PROXY_AGENTS)


def kill_proxy_each(root: Path, *, seed: int) -> ProxyCounts:
    """Kill a worker, the supervisor, and both in quick succession: the short form."""
    rng = random.Random(seed)
    deaths = [
        Death("worker", 1.5, when_it_serves=True),
        Death("supervisor", 0.5, when_it_serves=True),  # soon after the kill of a worker
        Death("supervisor", 1.5, when_it_serves=True),
        Death("supervisor", 0.5),  # before the proxy serves
        Death("worker", 1.5, when_it_serves=True),
    ]
    return _proxy_deaths(root, deaths, rng, agents=8)


def _proxy_deaths(root: Path, deaths: Iterable[Death], rng: random.Random, *, agents: int) -> ProxyCounts:
    """Carry out the kills one after another, and count the damage when every agent has ended."""
    engine = scripted_engine()
    # The port stays reserved while no proxy listens on it, so that a restarted one gets it again.
    with running(engine) as engine_url, reserved_ports(1) as (port,):
        proxy = ChaosProxy(root, engine_url, port)
        playing = Agents(proxy.url)
        try:
            with ThreadPoolExecutor(agents) as pool:
                lives = [pool.submit(playing.play, number) for number in range(agents)]
                try:
                    for death in deaths:
                        if death.when_it_serves:
                            _keep_running(proxy, lambda: proxy.serves)
                        _keep_running(proxy, _in(death.pause_s))
                        _keep_running(proxy, functools.partial(proxy.kill, death.role, rng))
                    _keep_running(proxy, lambda: proxy.serves)
                finally:
                    playing.is_over.set()
                _keep_running(proxy, lambda: all(life.done() for life in lives), limit_s=AGENT_ENDS_S)
            for life in lives:
                life.result()
            code = proxy.end()
            assert code == 0, proxy.output.read_text()[-3000:]
            for said in (*playing.never_answered, *playing.refused):
                print(f"    {said}")
            return count_proxy(proxy, playing, engine.exchanges)
        finally:
            proxy.destroy()


def _in(seconds: float) -> Callable[[], bool]:
    """Return a condition that becomes true after this time."""
    at = time.monotonic() + seconds
    return lambda: time.monotonic() >= at


def _keep_running(proxy: ChaosProxy, until: Callable[[], bool], *, limit_s: float = PROXY_STARTS_S) -> None:
    """Restart the proxy whenever it has ended, until a condition is true. Raise NotInTime if it is late."""
    deadline = time.monotonic() + limit_s
    while not until():
        if time.monotonic() > deadline:
            raise NotInTime(proxy.output.read_text()[-3000:])
        proxy.see_to()
        time.sleep(0.02)


def full_disk(root: Path) -> Counts:
    """Run on a disk with too little free space, then with none at all, and then with enough again."""
    with small_disk(root, megabytes=DISK_MB) as disk:
        run, ledger = _new_run(disk, [f"store.min_free_gb={KEPT_FREE_GB}"])
        try:
            run.start()
            run.wait_for_steps(2)
            ballast = fill(disk, leave_bytes=int(KEPT_FREE_GB * 0.7e9))
            run.wait_for(lambda: "no groups are submitted" in run.output.read_text())
            ballast.unlink()
            run.wait_for(lambda: "the warning no longer applies" in run.output.read_text())
            run.wait_for_steps(2)
            ballast = fill(disk, leave_bytes=0)
            _pause(run, 20.0)  # all writes fail now
            ballast.unlink()
            _pause(run, 5.0)
            _see_to(run)
            run.wait_for_steps(2)
            return _end(run, ledger)
        finally:
            run.end()


def _new_run(
    root: Path, settings: Sequence[str] = (), environment: dict[str, str] | None = None
) -> tuple[ChaosRun, Ledger]:
    run = ChaosRun(root, settings, environment or {})
    ledger = Ledger(run.folder.store)
    run.watch = ledger.look
    return run, ledger


def _pause(run: ChaosRun, seconds: float) -> None:
    until = time.monotonic() + seconds
    run.wait_for(lambda: time.monotonic() >= until, timeout_s=seconds + 60)


def _see_to(run: ChaosRun) -> None:
    """Restart the run if it has ended, as a user does, and return when it has trained a step."""
    if run.has_ended:
        run.start()
    target = run.steps + 1
    run.wait_for(_reaches(run, target), timeout_s=300)


def _reaches(run: ChaosRun, steps: int) -> Callable[[], bool]:
    def reached() -> bool:
        if run.has_ended:  # the kill ended the whole run, with a delay
            run.start()
        return run.steps >= steps

    return reached


def _end(run: ChaosRun, ledger: Ledger) -> Counts:
    """Let the run complete, and count the damage."""
    if not run.has_ended:
        run.stop()
    run.start(steps=run.steps + LAST_STEPS)
    code = run.finish(timeout_s=300)
    assert code == 0, run.output.read_text()[-3000:]
    return count(run, ledger)


if __name__ == "__main__":
    sys.exit(main())
