"""Runs the processes of one node, where a cluster starts one command on every node, as SkyPilot does.

`python -m areal_agents.cluster.node --run URL --node N --nodes COUNT [-- SUPERVISOR]` reads the configuration
from the store, starts the processes that this node has, each with its own GPUs, starts them again when they
are lost, and ends them with the run. The first node also runs the command of the supervisor, and ends with
its exit code; the others end with 0 when the supervisor has ended.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.placing import place
from areal_agents.cluster.run_record import RunRecord
from areal_agents.cluster.train import environment_of, processes_of, stop_s_of
from areal_agents.config import Config
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.launch.children import Children
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.signals import Interrupted, interruptible
from areal_agents.launch.supervision import EXIT_STOPPED, end_with_supervisor
from areal_agents.process_control import end_process
from areal_agents.store import Store

POLL_S = 1.0
SUPERVISOR_S = 3600.0  # longest wait for the supervisor, on a node that was started first
LOST_S = 600.0  # how long the supervisor may be silent; it is started again within this time or not at all
_SUPERVISOR_STOP_S = 180.0

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="node")
    parser.add_argument("--run", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("supervisor", nargs="*")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=f"node {parsed.node}: %(message)s")
    end_with_supervisor()
    try:
        with interruptible(), _supervisor(parsed.supervisor) as supervisor, Store.open(parsed.run) as store:
            return run_node(store, parsed.run, parsed.node, parsed.nodes, supervisor=supervisor)
    except Interrupted:
        return EXIT_STOPPED
    except ArealAgentsError as error:
        logger.error("%s", error)
        return 1


def run_node(
    store: Store, store_url: str, node: int, nodes: int, *, supervisor: subprocess.Popen[bytes] | None
) -> int:
    """Run the processes of one node to the end of the run, and return an exit code.

    Args:
        supervisor: the supervisor, if it is on this node.

    Raises:
        ConfigError: there is no supervisor, or the run needs more nodes.
        ChildDied: a process ended too often.
    """

    def code() -> int | None:
        return None if supervisor is None else supervisor.poll()

    config, trainers = _config_of_run(store, code)
    processes = processes_of(config, store_url, nodes=trainers)
    where = place(processes, config.cluster.gpus_per_node, nodes)
    own = [process for process in processes if where[process.name] == node]
    logger.info("%s", ", ".join(process.name for process in own) or "no process of the run is here")
    folder = RunFolder(Path(config.run_dir))
    folder.log("node").parent.mkdir(parents=True, exist_ok=True)
    with Children(say=logger.warning) as children:
        for process, gpus in with_gpus(own):
            children.start(
                process.name,
                (),
                program=process.command,
                # The supervisor's log of the same process says who has its place.
                log=folder.log(f"{process.name}-on-node-{node}"),
                environment={**environment_of(process), "CUDA_VISIBLE_DEVICES": gpus},
                restarts=True,
                stop_timeout_s=stop_s_of(process, config),
            )
        ending = [process.name for process in own if process.role in ("trainer", "rollout")]
        seen = time.monotonic()
        while (ended := code()) is None:
            children.check(may_finish=ending)
            if supervisor is None:
                [row] = store.role_rows("supervisor")
                if row.state == "ended":
                    return 0
                seen = time.monotonic() if row.is_alive else seen
                if time.monotonic() - seen > LOST_S:
                    raise ConfigError(f"the supervisor has been lost for {LOST_S:.0f} s")
            time.sleep(POLL_S)
        return ended


def _config_of_run(store: Store, code: Callable[[], int | None]) -> tuple[Config, int]:
    """Wait for the supervisor, and return the configuration, and the number of the trainer's processes."""
    deadline = time.monotonic() + SUPERVISOR_S
    while not any(row.is_alive for row in store.role_rows("supervisor")) or not _has_record(store):
        if code() is not None:
            raise ConfigError("the supervisor has ended before the run began")
        if time.monotonic() > deadline:
            raise ConfigError(f"there is no supervisor of this run after {SUPERVISOR_S:.0f} s")
        time.sleep(POLL_S)
    record = RunRecord.read(store)
    with tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
        return record.resolved(Path(own))[0], record.nodes


def _has_record(store: Store) -> bool:
    try:
        RunRecord.read(store)
    except ConfigError:
        return False
    return True


def with_gpus(processes: Sequence[RoleProcess]) -> Iterator[tuple[RoleProcess, str]]:
    """Yield each process with the numbers of its GPUs on this node, in the form of CUDA_VISIBLE_DEVICES."""
    first = 0
    for process in processes:
        yield process, ",".join(map(str, range(first, first + process.gpus)))
        first += process.gpus


@contextmanager
def _supervisor(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the supervisor; at the end of the block it has ended."""
    if not command:
        yield None
        return
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        end_process(process, grace_s=_SUPERVISOR_STOP_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
