"""Follows a process that the supervisor of `--launcher external` has not started itself.

`python -m areal_agents.cluster.follow --run URL --role ROLE --index N` prints when a process takes the place
and when it ends. It ends with 0 when the process has ended and the run has trained its last step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.run_record import RunRecord
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.supervision import end_with_supervisor
from areal_agents.store import Conflict, Store
from areal_agents.store.roles import Role, RoleRow

POLL_S = 1.0
SETTLED_S = 20.0  # a process that failed after the last step is started again within this time, as a rule
_SUPERVISOR = "the supervisor"  # in place of a host, in places that it took away
ABSENT_S = 3600.0  # the longest time without a process, in which nodes and images may still have to come


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="follow")
    parser.add_argument("--run", required=True)
    parser.add_argument("--role", required=True, choices=get_args(Role))
    parser.add_argument("--index", type=int, required=True)
    parsed = parser.parse_args(arguments)
    end_with_supervisor()
    with Store.open(parsed.run) as store, tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
        config, _ = RunRecord.read(store).resolved(Path(own))
        metrics = MetricsFile(RunFolder(Path(config.run_dir)).metrics)

        def is_trained() -> bool:
            metrics.update()
            return len(metrics.rows) >= config.trainer.steps

        return follow(store, parsed.role, parsed.index, is_trained=is_trained)


def follow(
    store: Store,
    role: Role,
    index: int,
    *,
    is_trained: Callable[[], bool],
    settled_s: float = SETTLED_S,
    absent_s: float = ABSENT_S,
) -> int:
    """Follow the processes that take a place one after another, and return an exit code for the last one.

    If this program is killed and started again, it continues with the process that then has the place.

    Args:
        is_trained: whether the run has trained its last step, after which trainer and rollout end.
        settled_s: how long the place of a process that ended then must stay free.
        absent_s: longest time in seconds without a process.
    """
    said = ""
    absent_since = time.monotonic()
    while True:
        row = next(row for row in store.role_rows(role) if row.index == index)
        is_there = row.is_alive and row.host != _SUPERVISOR
        text = _words(row) if is_there else f"no process is {role} {index}"
        if text != said:
            print(text, flush=True)
            said = text
        if is_there:
            absent_since = time.monotonic()
        absent_s_now = time.monotonic() - absent_since
        has_left = row.state == "ended" and row.host != _SUPERVISOR
        if role in ("trainer", "rollout") and has_left and absent_s_now >= settled_s and is_trained():
            return 0
        if absent_s_now >= absent_s:
            print(f"no process was started as {role} {index} for {absent_s:.0f} s", flush=True)
            return EXIT_REFUSED
        time.sleep(POLL_S)


def take_places_away(store: Store, processes: Sequence[RoleProcess]) -> None:
    """Take the places of all processes that were started before the supervisor had written its record.

    They have the keys of an earlier start, so they must lose their places, which ends them, and be started
    again by whatever started them. A process that takes its place later reads the record after that.
    """
    epochs = {(row.role, row.index): row.epoch for row in store.role_rows()}
    for process in processes:
        gone = epochs.get((process.role, process.index))
        with contextlib.suppress(Conflict):  # the next process has just taken it
            own = store.claim_role(process.role, process.index, host=_SUPERVISOR, pid=os.getpid(), gone=gone)
            store.leave_role(process.role, process.index, own.epoch)


def _words(row: RoleRow) -> str:
    where = f"{row.host}, process {row.pid}"
    return f"{row.role} {row.index} is on {where}" + (f", at {row.url}" if row.url else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
