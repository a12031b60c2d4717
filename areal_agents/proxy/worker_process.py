"""`python -m areal_agents.proxy.worker_process`: one of several proxy processes, started by the supervisor.

It reads what it is to do from the first line of its standard input, serves on sockets that it inherited, and
ends on SIGTERM or when standard input closes, which it does when the supervisor dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_agents.errors import ArealAgentsError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.logs import logging_as
from areal_agents.proxy.server import exit_on_sigterm, make_renderer, serve_with_engine
from areal_agents.proxy.workers import Workers, WorkerSpec
from areal_agents.store import Store, StoreConfig

READY = b"ready\n"
_END_WITHIN_S = 15.0
_LONGEST_ORDER = 2**20


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do.

    Attributes:
        spec: which worker it is.
        model: the model folder.
        engine_url: a running engine.
        store, durability: how to open the store.
        config: the proxy's settings, as plain data.
        listen_fds: inherited sockets that listen.
        ready_fd: inherited pipe; `READY` is written into it once, and it closes when the worker ends.
    """

    spec: WorkerSpec
    model: str
    engine_url: str
    store: str
    durability: str
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
        return cls(**data | {"spec": WorkerSpec(**spec), "listen_fds": tuple(data["listen_fds"])})


def serve_worker(order: Order) -> None:
    """Serve until SIGTERM. ConfigError or StoreError if it cannot."""
    config = ProxyConfig.model_validate(order.config)
    workers = Workers(order.spec)
    durability = StoreConfig.model_validate({"durability": order.durability}).durability
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_as(config.log_format))
        listeners = [stack.enter_context(socket.socket(fileno=number)) for number in order.listen_fds]
        stack.enter_context(exit_on_sigterm())
        renderer = make_renderer(order.model, config)
        # Before the store, so that nobody takes an episode over while writes of it may still be queued here.
        stack.enter_context(workers.living())
        store = stack.enter_context(Store.open(order.store, durability))
        serve_with_engine(
            *listeners,
            engine_url=order.engine_url,
            store=store,
            renderer=renderer,
            config=config,
            workers=workers,
            on_ready=lambda: _tell(order.ready_fd),
        )


def _tell(fd: int) -> None:
    os.write(fd, READY)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_WITHIN_S)  # nobody is left who would see to it
    os._exit(1)


def _read_order() -> Order:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_ORDER:
        part = os.read(0, 65536)
        if not part:
            sys.exit("error: no order on standard input")
        line += part
    return Order.from_line(line)


def main() -> None:
    """Serve as ordered; an expected error is one line on standard error."""
    order = _read_order()
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        serve_worker(order)
    except ArealAgentsError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
