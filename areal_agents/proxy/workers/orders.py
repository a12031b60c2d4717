"""What the supervisor tells a worker. It goes through a pipe, since command lines are for all to see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_agents.proxy.engines import EngineUrls
from areal_agents.proxy.workers.identity import WorkerSpec

READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do.

    Attributes:
        spec: which worker it is.
        model: the model folder.
        engines: the running engines.
        store, durability: how to open the store.
        retain: what of it is kept, as plain data; all, where that is another worker's to carry out.
        config: the proxy's settings, as plain data.
        public_fd, private_fd: inherited sockets that listen: that of all workers, and this one's own.
        inbox_fd, outbox_fds: inherited sockets that connections are passed on over; see `WorkerSockets`.
        ready_fd: inherited pipe; `READY` is written into it once, and it closes when the worker ends.
    """

    spec: WorkerSpec
    model: str
    engines: EngineUrls
    store: str
    durability: str
    retain: dict[str, Any]
    config: dict[str, Any]
    public_fd: int
    private_fd: int
    inbox_fd: int
    outbox_fds: tuple[int, ...]
    ready_fd: int

    @property
    def inherited(self) -> tuple[int, ...]:
        """Every file descriptor that the worker needs of its supervisor."""
        return (self.public_fd, self.private_fd, self.inbox_fd, *self.outbox_fds, self.ready_fd)

    def to_line(self) -> bytes:
        """As one line of JSON."""
        return orjson.dumps(self, default=str) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """What `to_line` wrote."""
        data = orjson.loads(line)
        spec = data["spec"] | {"folder": Path(data["spec"]["folder"]), "ports": tuple(data["spec"]["ports"])}
        engines = EngineUrls(**data["engines"] | {"engines": tuple(data["engines"]["engines"])})
        outbox_fds = tuple(data["outbox_fds"])
        return cls(**data | {"spec": WorkerSpec(**spec), "engines": engines, "outbox_fds": outbox_fds})
