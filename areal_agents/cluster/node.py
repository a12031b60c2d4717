"""Runs the processes of one node, where a cluster starts one command on every node, as SkyPilot does.

`python -m areal_agents.cluster.node --run URL --node N --nodes COUNT [-- SUPERVISOR]` reads the configuration
from the store, starts the processes that this node has, each with its own GPUs, starts them again when they
are lost, and ends them with the run. The first node also runs the command of the supervisor, and ends with
its exit code; the others end with 0 when the supervisor has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.placing import assigned_nodes
from areal_agents.cluster.run_record import RunRecord
from areal_agents.cluster.train import environment_of, processes_of, stop_s_of
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.launch.children import Children
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.signals import Interrupted, interruptible
from areal_agents.launch.supervision import EXIT_STOPPED, SUPERVISED, end_with_supervisor
from areal_agents.process_control import end_process
from areal_agents.secret_variables import hide_token
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
    hide_token()
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
    while True:
        record = _record_of_run(store, supervisor)
        ended = _run_processes(store, store_url, node, nodes, record, supervisor)
        if ended is not None:
            return ended
        logger.warning("the supervisor was started again, and so are the processes of this node")


def _run_processes(
    store: Store,
    store_url: str,
    node: int,
    nodes: int,
    record: RunRecord,
    supervisor: subprocess.Popen[bytes] | None,
) -> int | None:
    """Run the processes of one node until the supervisor has ended; None if there is another one."""
    with tempfile.TemporaryDirectory(prefix="areal-agents-") as own_folder:
        config, _ = record.resolved(Path(own_folder))
    processes = processes_of(config, store_url, nodes=record.nodes)
    where = assigned_nodes(processes, config.cluster.gpus_per_node, nodes)
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
        while supervisor is None or supervisor.poll() is None:
            children.check(may_finish=ending)
            [row] = store.role_rows("supervisor")
            if row.epoch != record.epoch:
                return None
            if supervisor is None:
                if row.state == "ended":
                    return 0
                seen = time.monotonic() if row.is_alive else seen
                if time.monotonic() - seen > LOST_S:
                    raise ConfigError(f"the supervisor has been lost for {LOST_S:.0f} s")
            time.sleep(POLL_S)
        return supervisor.returncode


def _record_of_run(store: Store, supervisor: subprocess.Popen[bytes] | None) -> RunRecord:
    """Wait for the supervisor, and return the record that it has written."""
    deadline = time.monotonic() + SUPERVISOR_S
    while (record := _record_of_supervisor(store)) is None:
        if supervisor is not None and supervisor.poll() is not None:
            raise ConfigError("the supervisor has ended before the run began")
        if time.monotonic() > deadline:
            raise ConfigError(f"there is no supervisor of this run after {SUPERVISOR_S:.0f} s")
        time.sleep(POLL_S)
    return record


def _record_of_supervisor(store: Store) -> RunRecord | None:
    """Return the record of the supervisor that is running; None if there is none, or not yet its record."""
    alive = [row.epoch for row in store.role_rows("supervisor") if row.is_alive]
    if not alive:
        return None
    try:
        record = RunRecord.read(store)
    except ConfigError:  # none, or that of an earlier start by another release
        return None
    return record if record.epoch == alive[0] else None


def with_gpus(processes: Sequence[RoleProcess]) -> Iterator[tuple[RoleProcess, str]]:
    """Yield each process with the numbers of its GPUs on this node, in the form of CUDA_VISIBLE_DEVICES."""
    first = 0
    for process in processes:
        yield process, ",".join(map(str, range(first, first + process.gpus)))
        first += process.gpus


@contextmanager
def _supervisor(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the supervisor; at the end of the block, or if this process is killed, it ends."""
    if not command:
        yield None
        return
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # closes when this process ends in any way
        env={**os.environ, SUPERVISED: f"{_SUPERVISOR_STOP_S:g}"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_process(process, grace_s=_SUPERVISOR_STOP_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
