"""A shim between a Ray worker and a role process, which it ends, with all that it started, with the worker.

`python -m areal_agents.cluster.launchers.ray.shim --grace-s SECONDS -- COMMAND` runs the command in a
session of its own. SIGTERM is forwarded to it. When standard input closes, the Ray worker or the whole raylet
is gone: the command gets SIGTERM, and SIGKILL after the grace. The shim ends as the command did, with its
exit code or by its signal, and leaves no process of the command behind.

A Ray worker that ends kills its children at once, which would leave no time for a checkpoint. So the child of
the worker only waits, and the shim is that one's child.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.supervision import SUPERVISED
from areal_agents.process_control import RUN_MARK, end_as, end_leftovers, signal_group
from areal_agents.secret_variables import hide_token

_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="shim")
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    hide_token()
    child = os.fork()
    if child:
        end_as(_wait_only(child))
    end_as(_keep(parsed.command, parsed.grace_s))


def _wait_only(child: int) -> int:
    """Return how the shim ended. This process is in its group, and leaves signals to it."""
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    os.close(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _keep(command: Sequence[str], grace_s: float) -> int:
    """Run the command until it ends, and return its exit code, negative for a signal."""
    # The launcher may run on the same machine and have the mark too, so this one is another.
    mark = f"{os.environ.get(RUN_MARK, 'ray')}@{os.getpid()}"
    environment = {**os.environ, RUN_MARK: mark, SUPERVISED: f"{grace_s:g}"}
    early: list[int] = []
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: early.append(number))
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started on this node: {error.strerror}", flush=True)
        return EXIT_REFUSED
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: signal_group(process.pid, number))
    for received in early:
        signal_group(process.pid, received)

    def end_with_worker() -> None:
        while os.read(0, 4096):
            pass
        signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)

    threading.Thread(target=end_with_worker, name="worker-watch", daemon=True).start()
    code = process.wait()
    signal_group(process.pid, signal.SIGKILL)  # the processes that it left in its group
    end_leftovers(RUN_MARK, mark)  # and those that it left in other sessions
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
