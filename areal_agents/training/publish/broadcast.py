"""Sends weights with gloo or NCCL: one broadcast per bucket reaches all engines at once.

The process group consists of the trainer's first rank and every worker of every engine; the trainer's own
ranks use another group. The group is kept until a member fails: it is then abandoned, and the next
publication forms a new group with the engines that are available.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor

from areal_agents.errors import EngineError
from areal_agents.inference.embedded.updates.process_group import join_group, leave_group
from areal_agents.inference.engine import Engine, GroupBackend, ModelInfo, WeightGroup
from areal_agents.inference.ports import reserved_ports
from areal_agents.sockets import own_address
from areal_agents.training.publish.buckets import Packed
from areal_agents.training.shared_memory import explained

T = TypeVar("T")

logger = logging.getLogger(__name__)

GRACE_S = 2.0  # after a broadcast fails, time for the engine that caused the failure to report its own error


class BroadcastSender:
    """Broadcasts buckets; implements `piecewise.Sender`.

    Args:
        address: the address at which engines reach this process; empty selects the local address of the route
            to the engines.
        timeout_s: longest wait for the group to form and for one broadcast.
    """

    def __init__(self, backend: GroupBackend, *, address: str, timeout_s: float) -> None:
        self._backend: GroupBackend = backend
        self._address = address
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._members: list[Engine] = []
        self.sent_bytes = 0

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Form a group of the tensor-parallel workers of `engines`, unless it already exists.

        Raises:
            EngineError: an engine did not join.
        """
        self.sent_bytes = 0
        if self._group is not None and self._members == list(engines):
            return
        await self.aclose()
        with reserved_ports(1, "0.0.0.0") as (port,):
            await self._form({engine: info.workers for engine, info in engines.items()}, port)

    async def _form(self, engines: Mapping[Engine, int], port: int) -> None:
        group = WeightGroup(
            address=self._address or _own_address([engine.base_url for engine in engines]),
            port=port,
            rank_offset=1,
            world_size=1 + sum(engines.values()),
            name=f"weights-{uuid4().hex[:8]}",
            backend=self._backend,
        )
        joins, offset = [], 1
        for engine, workers in engines.items():
            joins.append(asyncio.ensure_future(engine.join_weight_group(_at(group, offset))))
            offset += workers
        own = _in_thread(lambda: join_group(group, rank=0, timeout_s=self._timeout_s))
        failure = await _failure_of(own, joins)
        if failure is not None:
            raise failure
        self._group, self._name, self._members = own.result(), group.name, list(engines)

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Broadcast one bucket; return the failures by engine. If any member fails, the group is broken and
        every engine has failed."""
        if self._group is None or self._members != list(engines):
            error = EngineError("an engine left the weight group, and a broadcast needs all of its members")
            return dict.fromkeys(engines, await self._give_up(error))
        group, data = self._group, bucket.data
        wire = _in_thread(lambda: _broadcast(data, group, self._timeout_s))
        calls = [
            asyncio.ensure_future(
                engine.receive_weights(bucket.header, group=self._name, version=version, last=bucket.last)
            )
            for engine in engines
        ]
        failure = await _failure_of(wire, calls)
        if failure is None:
            self.sent_bytes += bucket.header.nbytes
            return {}
        if not isinstance(failure, EngineError):
            raise failure
        return dict.fromkeys(engines, await self._give_up(failure))

    async def aclose(self) -> None:
        """Leave the group and make the engines leave it."""
        group, members, self._group, self._members = self._group, self._members, None, []
        left = await asyncio.gather(
            *(engine.leave_weight_group(self._name) for engine in members), return_exceptions=True
        )
        for failure in left:
            if isinstance(failure, BaseException):
                logger.info("leaving the weight group %s failed: %s", self._name, failure)
        if group is not None:
            await _leave(group)

    async def _give_up(self, error: EngineError) -> EngineError:
        """Leave a broken group so that its members stop waiting for a broadcast, and return `error`. `aclose`
        requests that the engines leave it, once they are no longer busy with it."""
        group, self._group = self._group, None
        if group is not None:
            await _leave(group)
        return error


async def _leave(group: dist.ProcessGroup) -> None:
    """Leave the group, waiting only briefly; the thread of a stuck broadcast ends when the broadcast times
    out."""
    try:
        await asyncio.wait_for(_in_thread(lambda: leave_group(group)), GRACE_S)
    except (TimeoutError, RuntimeError) as failure:
        logger.info("a weight group is still in use: %s", failure)


async def _failure_of(
    own: asyncio.Future[Any], calls: Sequence[asyncio.Future[None]]
) -> BaseException | None:
    """Wait until this process and the engines are done, or one of them has failed. After a failure, cancel
    the other calls, because a broadcast cannot complete without one of its members, and return the error."""
    tasks: list[asyncio.Future[Any]] = [*calls, own]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if own.done() and own.exception() is not None:
        await asyncio.wait(calls, timeout=GRACE_S)
    for task in tasks:  # an engine's own error says more than "connection closed"
        failure = task.exception() if task.done() else None
        if failure is not None:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            return failure
    return None


def _broadcast(data: Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    try:
        work = dist.broadcast(data, src=0, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's backends raise this
        raise EngineError(
            f"a broadcast of {data.numel()} bytes of weights failed: {explained(error)}"
        ) from error


def _at(group: WeightGroup, offset: int) -> WeightGroup:
    return WeightGroup(group.address, group.port, offset, group.world_size, group.name, group.backend)


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call that cannot be interrupted on a daemon thread, so that the process can exit without waiting
    for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="weight-group", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(
        lambda done: None if done.cancelled() else done.exception()
    )  # marks the exception as retrieved
    return waiting


def _own_address(urls: Sequence[str]) -> str:
    """This machine's address on the route to the engines; if any engine is remote, one that other machines
    can reach."""
    addresses = []
    for url in urls:
        host = urlsplit(url).hostname or ""
        try:
            addresses.append(own_address(host, 9))
        except OSError as error:
            raise EngineError(f"cannot resolve or route to the engine at {url}: {error}") from error
    remote = [a for a in addresses if not (a.startswith("127.") or a == "::1")]
    return (remote or addresses)[0]
