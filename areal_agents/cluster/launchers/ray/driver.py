"""Runs one role process on a node of a Ray cluster, in the foreground of this one.

`python -m areal_agents.cluster.launchers.ray.driver --gpus N --cpus N --name NAME -- COMMAND` reserves GPUs
and cores on one node, in a placement group of one bundle, and has an actor there start the command. Only the
lines that the command prints, signals and its exit code pass through Ray.

This process ends as the command ended: with its exit code, or by the same signal. If the node is lost it ends
by SIGKILL, as the process on that node has, so a supervisor starts it again and Ray chooses another node. If
this process ends in any way, the command ends too: Ray ends the actors of a driver that is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.supervision import GRACE_S, SUPERVISED, end_with_supervisor
from areal_agents.process_control import end_as
from areal_agents.secret_variables import hide_token

POLL_S = 5.0  # the longest that a call for further output stays open
SOON_S = 10.0  # a place that is not there after this is reported
UNREACHABLE_S = 60.0  # a node that is alive for Ray, but does not answer this process for so long, is lost
_BUFFERED = 1 << 20  # bytes of output that wait for this process; the command is held up when there are more
_PIECE = 64 << 10  # bytes of output in one answer, small enough for Ray to send it without its object store
_OF_THE_MACHINE = ("RAY_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Placed:
    """The actor on the node. Ray sends its class by value, so Ray's Python there needs only Ray itself."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start the command with the environment of this node and this one, and say where it runs.

        The environment comes with this call and not with the actor, whose description Ray stores and shows.
        """
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"the working folder {folder} does not exist there")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this worker ends in any way
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._output = bytearray()
        self._first = 0  # the offset of the output's first byte in all that the command wrote
        self._closed = False
        threading.Thread(target=self._collect, name="output", daemon=True).start()
        return f"{ray.util.get_node_ip_address()}, placed by Ray (raylet {os.environ['RAY_RAYLET_PID']})"

    def read(self, offset: int, timeout_s: float) -> tuple[bytes, int | None]:
        """Return the output from an offset on, as soon as there is some, and the exit code after the last.

        What is before the offset is forgotten. A call whose answer was lost can be made again.
        """
        with self._changed:
            del self._output[: offset - self._first]
            self._first = offset
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._output or self._closed, timeout_s)
            if self._output or not self._closed:
                return bytes(self._output[:_PIECE]), None
        return b"", self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the shim, which forwards it to the command."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _collect(self) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while piece := os.read(fd, 65536):
            with self._changed:
                self._output += piece
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(self._output) < _BUFFERED)
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="driver")
    parser.add_argument("--address", default="", help="HOST:PORT of the cluster; empty: that of this machine")
    parser.add_argument("--name", required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--wait-s", type=float, default=600.0)
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    hide_token()
    grace_s = end_with_supervisor() if SUPERVISED in os.environ else GRACE_S
    try:
        ray.init(parsed.address or "auto", log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        print(f"the Ray cluster does not answer: {error}", flush=True)
        end_as(1)
    shim = (
        sys.executable,
        "-m",
        "areal_agents.cluster.launchers.ray.shim",
        f"--grace-s={grace_s:g}",
        "--",
    )
    bundle = {"GPU": float(parsed.gpus), "CPU": float(parsed.cpus)}
    code = asyncio.run(
        _run(
            parsed.name,
            (*shim, *parsed.command),
            bundle={name: count for name, count in bundle.items() if count},
            wait_s=parsed.wait_s,
        )
    )
    ray.shutdown()
    end_as(code)


async def _run(name: str, command: Sequence[str], *, bundle: Mapping[str, float], wait_s: float) -> int:
    """Run the command on a node with the resources of the bundle, and return its exit code.

    Returns:
        A negative number for a signal: SIGKILL if the node was lost, and that which told this process to end
        before there was a place.
    """
    told: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.put_nowait, number)
    group = placement_group([dict(bundle)], name=name)
    actor = (
        ray.remote(Placed)
        .options(
            name=f"{name}-{os.getpid()}",
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        .remote()
    )
    environment = {
        variable: value for variable, value in os.environ.items() if not variable.startswith(_OF_THE_MACHINE)
    }
    if "GPU" not in bundle:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves it unset, which would show all of the node's
    started = _future(actor.start.remote(list(command), environment, os.getcwd()))
    asked = asyncio.ensure_future(told.get())
    try:
        if not await _first_of(started, asked, timeout_s=min(SOON_S, wait_s)):
            wanted = f"for a node with {_words(bundle)} free, and for Ray to start a worker there"
            print(f"{name} is not placed yet; it waits {wanted}", flush=True)
            if not await _first_of(started, asked, timeout_s=max(0.0, wait_s - SOON_S)):
                print(
                    f"{name} was not placed within {wait_s:g} s: it waited {wanted}.\n{_nodes()}", flush=True
                )
                return EXIT_REFUSED
        if not started.done():
            return -asked.result()
        print(f"{name} runs on {await started}", flush=True)
        return await _follow(actor, told, asked)
    except RayTaskError as error:
        print(f"{name} cannot be started on its node: {error.cause}", flush=True)
        return EXIT_REFUSED
    except RayActorError as error:
        print(f"{name} has lost its node: {error}", flush=True)
        return -signal.SIGKILL
    finally:
        started.cancel()
        ray.kill(actor)
        remove_placement_group(group)


async def _follow(actor: Any, told: asyncio.Queue[int], asked: asyncio.Future[int]) -> int:
    """Write what the command writes, and pass signals on, until it ends. Returns its exit code."""
    written = 0
    answered = asyncio.get_running_loop().time()
    reading = _future(actor.read.remote(written, POLL_S))
    while True:
        await asyncio.wait({reading, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            actor.signal.remote(asked.result())
            asked = asyncio.ensure_future(told.get())
        if not reading.done():
            continue
        try:
            piece, code = await reading
        except ActorUnavailableError:
            if asyncio.get_running_loop().time() - answered > UNREACHABLE_S:
                raise
            await asyncio.sleep(1.0)
        else:
            if code is not None:
                return int(code)
            answered = asyncio.get_running_loop().time()
            written += len(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        reading = _future(actor.read.remote(written, POLL_S))


def _future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def _first_of(*futures: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether one of them is done within the time."""
    done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items()) or "room"


def _nodes() -> str:
    """Say what the nodes of the cluster have in all."""
    lines = [
        f"  {node['NodeManagerAddress']}: "
        + _words({name: node["Resources"].get(name, 0.0) for name in ("GPU", "CPU")})
        for node in ray.nodes()
        if node["Alive"]
    ]
    return "\n".join(["Its nodes have, used or free:", *lines])


if __name__ == "__main__":
    main(sys.argv[1:])
