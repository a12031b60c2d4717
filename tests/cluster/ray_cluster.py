"""Runs a Ray cluster of several raylets on this machine within a with-block."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from areal_agents.process_control import end_process, read_line

START_S, END_S = 240.0, 240.0  # on a busy machine, a Python that Ray starts takes a minute


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        raylets: the process id of the raylet of each node except the head node, which gets no processes.
    """

    address: str
    raylets: list[int]
    control: IO[bytes]

    def lose(self, raylet: int) -> None:
        """Kill a raylet with SIGKILL."""
        self.control.write(b"%d\n" % raylet)
        self.control.flush()


@contextmanager
def ray_cluster(nodes: Sequence[dict[str, int]]) -> Iterator[RayCluster]:
    """Start a cluster with nodes of these `cpus` and `gpus`, which the machine need not have."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), json.dumps(nodes), f"{START_S:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        started = json.loads(read_line(process.stdout.fileno(), timeout_s=START_S))
        yield RayCluster(started["address"], started["raylets"], process.stdin)
        process.stdin.close()
        process.wait(END_S)
    finally:
        end_process(process, grace_s=END_S)
