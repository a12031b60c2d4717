"""The orders that the supervisor sends to workers through a pipe, because command lines are public."""

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
    """Everything that a worker needs to start.

    Attributes:
        spec: which worker it is.
        model: the model folder.
        engines: the running engines.
        store, durability: how to open the store.
        retain: which trained turns are kept, as plain data; all, if another worker removes them.
        config: the proxy's settings, as plain data.
        public_fd, private_fd: inherited listening sockets: the one of all workers, and this worker's own.
        inbox_fd, outbox_fds: inherited sockets through which connections are passed; see `WorkerSockets`.
        ready_fd: inherited pipe; the worker writes `READY` into it once, and it closes when the worker exits.
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
        """Every file descriptor that the worker inherits."""
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
