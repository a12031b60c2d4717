"""Runs one of several proxy processes; the supervisor starts `python -m areal_agents.proxy.workers.process`.

The process reads its `Order` from the first line of its standard input, serves on inherited sockets, and
exits on SIGTERM or when its standard input closes, which happens when the supervisor dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

from areal_agents.errors import ArealAgentsError
from areal_agents.process_control import exit_on_sigterm
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.logs import logging_as
from areal_agents.proxy.server import make_renderer, retention_of, serve_with_engines
from areal_agents.proxy.traces import Traces
from areal_agents.proxy.workers.handover import WorkerSockets
from areal_agents.proxy.workers.identity import Workers
from areal_agents.proxy.workers.orders import READY, Order
from areal_agents.stacks import answer_with_stacks
from areal_agents.store import Store, StoreConfig
from areal_agents.telemetry import TelemetryConfig, exporting

_END_WITHIN_S = 15.0
_LONGEST_ORDER = 2**20


def serve_worker(order: Order) -> None:
    """Serve until SIGTERM. Raise ConfigError or StoreError if the worker cannot start."""
    config = ProxyConfig.model_validate(order.config)
    workers = Workers(order.spec)
    settings = StoreConfig.model_validate({"durability": order.durability, "retain": order.retain})
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_as(config.log_format))
        public, private, inbox, *outboxes = [
            stack.enter_context(socket.socket(fileno=number))
            for number in (order.public_fd, order.private_fd, order.inbox_fd, *order.outbox_fds)
        ]
        stack.enter_context(exit_on_sigterm())
        renderer = make_renderer(order.model, config)
        # Entered before the store is opened, so that the lock is held until the store's queued writes end.
        stack.enter_context(workers.holding_lock())
        telemetry = TelemetryConfig.model_validate(order.telemetry)
        spans = stack.enter_context(exporting(telemetry, "proxy", run=order.run))
        store = stack.enter_context(Store.open(order.store, settings.durability))
        serve_with_engines(
            public,
            private,
            engines=order.engines,
            store=store,
            renderer=renderer,
            config=config,
            worker=WorkerSockets(workers, inbox, tuple(outboxes)),
            retention=retention_of(store, settings),
            page=order.page,
            traces=None if spans is None else Traces(spans, order.run),
            on_ready=lambda: _report_ready(order.ready_fd),
        )


def _report_ready(fd: int) -> None:
    os.write(fd, READY)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_WITHIN_S)  # no supervisor is left to enforce this limit
    os._exit(1)


def _read_order() -> Order:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_ORDER:
        part = os.read(0, 65536)
        if not part:
            sys.exit("error: standard input has no order; this module is started by the proxy's supervisor")
        line += part
    return Order.from_line(line)


def main() -> None:
    """Serve as the order says. An expected error is written to standard error as one line."""
    order = _read_order()
    answer_with_stacks("proxy-worker")
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        serve_worker(order)
    except ArealAgentsError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
