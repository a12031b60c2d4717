"""The order with which the supervisor starts a worker.

It is sent through a pipe, because it contains keys and every user of the machine can read command lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_agents.proxy.engines import EngineUrls
from areal_agents.proxy.page import Page
from areal_agents.proxy.workers.identity import WorkerSpec

READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that a worker needs to start.

    Attributes:
        spec: the identity of the worker.
        model: the model folder.
        engines: the running engines.
        store: path or URL of the store.
        durability: durability of the store.
        retain: the trained turns that are kept, as plain data; all if another worker removes them.
        config: the proxy's settings, as plain data.
        page: the page at /view; None: there is none.
        telemetry: where spans are exported to, as plain data.
        run: the name of the run that the proxy belongs to.
        public_fd: inherited listening socket of all workers.
        private_fd: inherited listening socket of this worker.
        inbox_fd: inherited socket that connections are received from; see `WorkerSockets`.
        outbox_fds: inherited sockets that connections are sent to.
        ready_fd: inherited pipe; the worker writes `READY` to it once, and it closes when the worker exits.
    """

    spec: WorkerSpec
    model: str
    engines: EngineUrls
    store: str
    durability: str
    retain: dict[str, Any]
    config: dict[str, Any]
    page: Page | None
    telemetry: dict[str, Any]
    run: str
    public_fd: int
    private_fd: int
    inbox_fd: int
    outbox_fds: tuple[int, ...]
    ready_fd: int

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors that the worker inherits."""
        return (self.public_fd, self.private_fd, self.inbox_fd, *self.outbox_fds, self.ready_fd)

    def to_line(self) -> bytes:
        """Return the order as one line of JSON."""
        return orjson.dumps(self, default=str) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """Return the order that `to_line` has written."""
        data = orjson.loads(line)
        spec = data["spec"] | {"folder": Path(data["spec"]["folder"]), "ports": tuple(data["spec"]["ports"])}
        engines = EngineUrls(**data["engines"] | {"engines": tuple(data["engines"]["engines"])})
        outbox_fds = tuple(data["outbox_fds"])
        page = Page(**data["page"]) if data["page"] is not None else None
        return cls(
            **data | {"spec": WorkerSpec(**spec), "engines": engines, "page": page, "outbox_fds": outbox_fds}
        )
