"""Runs several proxy processes (workers) on one store, and restarts those that end.

All workers accept connections on one port, so the URL of an episode does not depend on the process. The
supervisor holds every socket, so the clients of a worker that is restarted only have to wait. When the
supervisor ends, for whatever reason, its workers exit too. The next supervisor waits until the port is free
and all of them have exited.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inference import running_engine
from areal_agents.inference.clients import Protocol
from areal_agents.process_control import exit_on_sigterm, kill_process
from areal_agents.proxy.auth import refuse_open_access
from areal_agents.proxy.config import MOST_WORKERS, ProxyConfig, shared_among
from areal_agents.proxy.engines import EngineUrls, check_addresses, check_models
from areal_agents.proxy.logs import logging_as
from areal_agents.proxy.page import Page, announce_page
from areal_agents.proxy.server import recording_notice, serve
from areal_agents.proxy.workers.handover import open_inboxes
from areal_agents.proxy.workers.identity import (
    PRIVATE_HOST,
    WorkerSpec,
    forget_dead,
    listen_after,
    locks_of,
    supervising,
    wait_for_orphans,
)
from areal_agents.proxy.workers.orders import READY, Order
from areal_agents.proxy.workers.places import ProxyPlace, refuse_beside_places
from areal_agents.secret_variables import new_engine_key
from areal_agents.sockets import listen, url_of
from areal_agents.store import RetainConfig, Store, StoreConfig
from areal_agents.telemetry import TelemetryConfig
from areal_agents.tls import TlsConfig

_logger = logging.getLogger(__name__)

_START_S = 120.0
_STOP_S = 12.0  # includes 5 s for the running calls of a worker
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_STEADY_S = 30.0  # a worker that ran for at least this long is restarted at once


def serve_with_workers(
    model: str | Path,
    config: ProxyConfig,
    *,
    place: ProxyPlace | None = None,
    tls: TlsConfig | None = None,
    **options: Any,
) -> None:
    """Serve a model with as many processes as `config.workers` says. The options are those of `serve`."""
    if config.workers > 1 and place is None:
        serve_workers(model, config, workers=config.workers, **options)
    else:
        serve(model, config, place=place, tls=tls, **options)


def serve_workers(
    model: str | Path,
    config: ProxyConfig,
    *,
    workers: int,
    store: str | Path,
    durability: StoreConfig | None = None,
    engine_urls: Sequence[str] = (),
    router_url: str = "",
    adapters: bool = False,
    vocab_size: int | None = None,
    protocol: Protocol = "sglang",
    engine_key: str = "",
    engine_options: dict[str, Any] | None = None,
    page: Page | None = None,
    telemetry: TelemetryConfig | None = None,
    run: str = "",
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a model with several processes until SIGTERM or Ctrl-C.

    The other arguments and the errors are those of `serve`.

    Args:
        workers: number of processes, at least 2; they share `max_concurrent` and `max_queued` equally.

    Raises:
        ArealAgentsError: a worker does not start.
    """
    if not 2 <= workers <= MOST_WORKERS:
        raise ConfigError(f"the number of workers must be from 2 to {MOST_WORKERS}, got {workers}")
    refuse_open_access(config)
    check_addresses(engine_urls, router_url)
    settings = durability or StoreConfig()
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_as(config.log_format))
        folder = locks_of(store)
        public = stack.enter_context(listen_after(config.host, config.port, folder))
        private = [stack.enter_context(listen(PRIVATE_HOST, 0)) for _ in range(workers)]
        inboxes, outboxes = open_inboxes(workers, stack)
        stack.enter_context(exit_on_sigterm())
        wait_for_orphans(folder)
        with Store.open(store, settings.durability) as opened:  # an unusable store fails here, and only once
            refuse_beside_places(opened)
        if not engine_urls:
            engine_key = new_engine_key()
            started = running_engine(model, key=engine_key, **(engine_options or {}))
            engine_urls = [stack.enter_context(started)]
        check_models(engine_urls, protocol, engine_key)
        engines = EngineUrls(
            tuple(engine_urls), router_url, adapters, vocab_size, protocol=protocol, key=engine_key
        )
        own, secret = secrets.token_hex(6), secrets.token_hex(24)
        stack.callback(forget_dead, folder)
        stack.enter_context(supervising(folder, own))
        port, *ports = (int(listener.getsockname()[1]) for listener in (public, *private))

        def order(index: int, starts: int, ready_fd: int) -> Order:
            return Order(
                spec=WorkerSpec(folder, own, index, starts, tuple(ports), secret),
                model=str(model),
                engines=engines,
                store=str(store),
                durability=settings.durability,
                retain=_retained(settings.retain, index).model_dump(),
                config=shared_among(workers, config).model_copy(update={"port": port}).model_dump(),
                page=page,
                telemetry=(telemetry or TelemetryConfig()).model_dump(),
                run=run,
                public_fd=public.fileno(),
                private_fd=private[index].fileno(),
                inbox_fd=inboxes[index].fileno(),
                outbox_fds=tuple(outbox.fileno() for outbox in outboxes),
                ready_fd=ready_fd,
            )

        with contextlib.suppress(KeyboardInterrupt), WorkerProcesses(workers, order) as processes:
            processes.start(time.monotonic() + _START_S)
            announce(
                f"serving {Path(model).name} at {url_of(public)}/v1 (engine {engines.describe()}; "
                f"{workers} workers)"
            )
            announce(recording_notice(store, config))
            announce_page(page, url_of(public), announce)
            processes.keep()


class WorkerProcesses:
    """The processes of all workers. Leaving the with-block ends them."""

    def __init__(self, count: int, order: Callable[[int, int, int], Order]) -> None:
        self._order = order
        self._workers = [_ProxyWorker(index) for index in range(count)]
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            self._stop()

    def start(self, deadline: float) -> None:
        """Start every worker, and return when all of them serve. A worker killed by SIGKILL is restarted.

        Raise ArealAgentsError if a worker does not start.
        """
        while not all(worker.is_ready for worker in self._workers):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ArealAgentsError(
                    f"the workers did not start within {_START_S:g} s; their log is on standard error"
                )
            for worker in self._ended(left_s):
                if worker.exit_code != -signal.SIGKILL:
                    raise ArealAgentsError(
                        f"worker {worker.index} ended before it served, with exit code {worker.exit_code}; "
                        "its error message is on standard error"
                    )
                worker.plan_start()

    def keep(self) -> None:
        """Restart workers that end, until interrupted."""
        while True:
            for worker in self._ended(math.inf):
                worker.plan_start()

    def _ended(self, timeout_s: float) -> list[_ProxyWorker]:
        """Start the workers that are due, wait until one is ready or ends, and return those that ended."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None and worker.start_at <= now:
                self._spawn(worker)
        pauses = [worker.start_at - now for worker in self._workers if worker.process is None]
        wait_s = max(0.0, min(timeout_s, *pauses)) if pauses else timeout_s
        changed = self._changed(wait_s if math.isfinite(wait_s) else None)
        return [worker for worker in changed if worker.process is None]

    def _spawn(self, worker: _ProxyWorker) -> None:
        ready, ready_fd = os.pipe()
        order = self._order(worker.index, worker.starts, ready_fd)
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_agents.proxy.workers.process"],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            pass_fds=order.inherited,
            start_new_session=True,  # Ctrl-C at the terminal reaches only the supervisor
        )
        os.close(ready_fd)
        worker.begin(process, ready)
        self._selector.register(ready, selectors.EVENT_READ, worker)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited; `_changed` detects it
            process.stdin.write(order.to_line())
            process.stdin.flush()

    def _changed(self, timeout_s: float | None) -> list[_ProxyWorker]:
        """Wait until workers become ready or end, and return them."""
        changed = []
        for key, _ in self._selector.select(timeout_s):
            worker: _ProxyWorker = key.data
            if os.read(worker.ready, len(READY)):
                worker.is_ready = True
            else:
                self._selector.unregister(worker.ready)
                worker.end()
            changed.append(worker)
        return changed

    def _stop(self) -> None:
        running = [worker for worker in self._workers if worker.process is not None]
        for worker in running:
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for worker in running:
            worker.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()


class _ProxyWorker:
    """One worker, across its restarts."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = -1
        self.is_ready = False
        self.exit_code = 0
        self.start_at = 0.0
        self._started_at = 0.0
        self._pause_s = 0.0

    def begin(self, process: subprocess.Popen[bytes], ready: int) -> None:
        """Record that the worker was started."""
        self.process, self.ready, self.is_ready = process, ready, False
        self._started_at = time.monotonic()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.process is not None:
            self.process.send_signal(number)

    def end(self, timeout_s: float = _STOP_S) -> None:
        """Wait for the process to exit, and kill it after `timeout_s`."""
        if self.process is None:
            return
        try:
            self.exit_code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = kill_process(self.process)
            self.exit_code = -signal.SIGKILL if code is None else code
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        os.close(self.ready)
        self.process, self.is_ready = None, False
        self.starts += 1

    def plan_start(self) -> None:
        """Set the time of the next start: now, or after growing pauses if the worker keeps ending."""
        ran_s = time.monotonic() - self._started_at
        if ran_s > _STEADY_S or self._pause_s == 0.0:
            self._pause_s, pause_s = _FIRST_PAUSE_S, 0.0
        else:
            pause_s = self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.start_at = time.monotonic() + pause_s
        _logger.warning(
            "worker %d ended with exit code %d after %.1f s; it will be restarted in %.2g s",
            self.index, self.exit_code, ran_s, pause_s,
        )  # fmt: skip


def _retained(retain: RetainConfig, index: int) -> RetainConfig:
    """Return the retention of one worker. Only the first removes turns, so that no turn is exported twice.

    A restarted worker starts only after its earlier process has ended.
    """
    return retain if index == 0 else RetainConfig()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
