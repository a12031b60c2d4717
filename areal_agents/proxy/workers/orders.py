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
        listen_fds: inherited sockets that listen.
        ready_fd: inherited pipe; `READY` is written into it once, and it closes when the worker ends.
    """

    spec: WorkerSpec
    model: str
    engines: EngineUrls
    store: str
    durability: str
    retain: dict[str, Any]
    config: dict[str, Any]
    listen_fds: tuple[int, ...]
    ready_fd: int

    def to_line(self) -> bytes:
        """As one line of JSON."""
        return orjson.dumps(self, default=str) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """What `to_line` wrote."""
        data = orjson.loads(line)
        spec = data["spec"] | {"folder": Path(data["spec"]["folder"]), "ports": tuple(data["spec"]["ports"])}
        engines = EngineUrls(**data["engines"] | {"engines": tuple(data["engines"]["engines"])})
        return cls(
            **data | {"spec": WorkerSpec(**spec), "engines": engines, "listen_fds": tuple(data["listen_fds"])}
        )
