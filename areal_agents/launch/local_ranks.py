"""Starts the ranks of a trainer on this machine, and ends them together.

    python -m areal_agents.launch.local_ranks --ranks 8 --nodes 2 --node-rank 1 --master HOST:PORT -- ROLE …

What torchrun does for one attempt, with two differences: a rank that was told to end may take as long as its
checkpoint needs, and the ranks of all nodes meet in the trainer, which names those that do not come. Each
rank gets torchrun's variables and a pipe as its standard input, which closes when this process ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.nodes import Nodes
from areal_agents.launch.supervision import EXIT_STOPPED, SUPERVISED, end_with_supervisor
from areal_agents.process_control import end_process

logger = logging.getLogger(__name__)

MODULE = "areal_agents.launch.processes"
POLL_S = 0.1
FAILED_S = 30.0  # from the failure of a rank until the others, which notice it themselves, are killed


def run_ranks(
    arguments: Sequence[str], ranks: int, nodes: Nodes, *, stop_timeout_s: float, own_session: bool = False
) -> int:
    """Run this node's ranks of the trainer to their end. SIGTERM and SIGINT are passed on as SIGTERM.

    Args:
        arguments: of `areal_agents.launch.processes`.
        ranks: the number of all ranks.
        stop_timeout_s: the longest that a rank may take to end once it was told to.
        own_session: keep the signals of the terminal from the ranks.

    Returns:
        0, EXIT_STOPPED, or the exit code of the first rank that failed: 128 + the signal that killed it.
    """
    started: list[subprocess.Popen[bytes]] = []
    told: list[float] = []  # when this process was told to end
    with _meeting_port(nodes) as port, _passing_on(started, told):
        try:
            for local_rank in range(nodes.local_ranks(ranks)):
                variables = _variables(local_rank, ranks, nodes, port)
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", MODULE, *arguments],
                        stdin=subprocess.PIPE,
                        env={**os.environ, **variables, SUPERVISED: f"{stop_timeout_s:g}"},
                        start_new_session=own_session,
                    )
                )
            for process in started if told else ():
                process.send_signal(signal.SIGTERM)  # those that were started after the signal
            first_rank = nodes.rank * nodes.local_ranks(ranks)
            return _wait(started, told, first_rank=first_rank, stop_timeout_s=stop_timeout_s)
        finally:
            for process in started:
                end_process(process, grace_s=0.0)


def _wait(
    started: Sequence[subprocess.Popen[bytes]],
    told: Sequence[float],
    *,
    first_rank: int,
    stop_timeout_s: float,
) -> int:
    """Wait until all ranks have ended, or those that should have ended took too long; see `run_ranks`."""
    failed, deadline = 0, float("inf")
    reported: set[int] = set()
    while len(reported) < len(started) and time.monotonic() < deadline:
        if told:
            deadline = min(deadline, told[0] + stop_timeout_s)
        for index, process in enumerate(started):
            code = process.poll()
            if code is None or index in reported:
                continue
            reported.add(index)
            if code in (0, EXIT_STOPPED):
                failed = failed or code
                continue
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            logger.error("rank %d of the trainer %s", first_rank + index, how)
            deadline = min(deadline, time.monotonic() + FAILED_S)
            if failed in (0, EXIT_STOPPED):
                failed = 128 - code if code < 0 else code
        time.sleep(POLL_S)
    late = [first_rank + index for index in range(len(started)) if index not in reported]
    if late:
        logger.error("ranks %s did not end in time and are killed", ", ".join(map(str, late)))
    return 128 + signal.SIGKILL if late and failed in (0, EXIT_STOPPED) else failed


def _variables(local_rank: int, ranks: int, nodes: Nodes, port: int) -> Mapping[str, str]:
    here = nodes.local_ranks(ranks)
    return {
        "RANK": str(nodes.rank * here + local_rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(nodes.rank),
        "MASTER_ADDR": nodes.host,
        "MASTER_PORT": str(port),
    }


@contextmanager
def _meeting_port(nodes: Nodes) -> Iterator[int]:
    """Yield the port where the ranks meet; with one node, a free one that is held."""
    if nodes.port:
        yield nodes.port
        return
    with reserved_ports(1) as (port,):
        yield port


@contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[bytes]], told: list[float]) -> Iterator[None]:
    """Send SIGTERM to the processes instead of ending on SIGTERM or SIGINT, and note when in `told`."""

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(time.monotonic())
        for process in processes:
            process.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def main() -> int:
    """Run the ranks that the arguments describe; return the exit code."""
    parser = argparse.ArgumentParser(prog="areal_agents.launch.local_ranks")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("arguments", nargs="+", help="of areal_agents.launch.processes")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    grace_s = end_with_supervisor()
    host, _, port = options.master.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    nodes = Nodes(options.nodes, options.node_rank, host, int(port))
    return run_ranks(options.arguments, options.ranks, nodes, stop_timeout_s=grace_s)


if __name__ == "__main__":
    raise SystemExit(main())
