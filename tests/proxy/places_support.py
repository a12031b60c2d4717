"""Several proxies of a run as processes, each with a place in the table of roles, and a load balancer.

The processes are forked from a process that has imported the proxy, because the import takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from typing import Any

import httpx
import sqlalchemy as sa
from proxy_support import MODEL
from workers_support import wait_for

from areal_agents.inference.ports import reserved_ports
from areal_agents.proxy.workers.places import owner_name
from areal_agents.store import Store
from areal_agents.store.postgres import engine_of
from areal_agents.store.roles import DEAD_AFTER_S, RoleRow
from areal_agents.store.schema import roles

ADMIN_KEY = "admin-key-of-the-tests"
SECRET = "secret-of-the-run"
_BEAT_S = 0.3

_context = multiprocessing.get_context("forkserver")


def serve_place(store_url: str, index: int, port: int, count: int, engine_url: str) -> None:
    """Do what the process of a role does: claim a place, send heartbeats, serve until SIGTERM, leave it."""
    from areal_agents.proxy import ProxyConfig
    from areal_agents.proxy.server import serve
    from areal_agents.proxy.workers.places import ProxyPlace

    with Store.open(store_url) as store:
        earlier = next((row.epoch for row in store.role_rows("proxy") if row.index == index), None)
        epoch = store.claim_role("proxy", index, host="test", pid=os.getpid(), gone=earlier).epoch
        ended, url = threading.Event(), f"http://127.0.0.1:{port}"

        def beat() -> None:
            while store.beat_role("proxy", index, epoch, url=url) and not ended.wait(_BEAT_S):
                pass

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            serve(
                MODEL,
                ProxyConfig(port=port, admin_key=ADMIN_KEY, max_concurrent=64),
                store=store_url,
                engine_urls=[engine_url],
                place=ProxyPlace(index, epoch, count, SECRET),
            )
        finally:
            ended.set()
            beating.join()
            store.leave_role("proxy", index, epoch)


class Proxies:
    """`count` proxies on one store, which can run once. Their ports are reserved until they have ended.

    Attributes:
        urls: [count] the URL of each proxy. Only `move` changes it; a restart does not.
        balancer: the load balancer in front of the proxies.
    """

    def __init__(self, store_url: str, engine_url: str, count: int) -> None:
        _context.set_forkserver_preload(["places_support", "areal_agents.proxy.server"])
        self.store_url, self._engine_url = store_url, engine_url
        self._reserved = contextlib.ExitStack()
        self._ports = list(self._reserved.enter_context(reserved_ports(count)))
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._processes: list[ForkServerProcess | None] = [None] * count
        self.balancer = Balancer(list(self._ports))

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxies]:
        """Run all proxies and the balancer within the with-block."""
        with self._reserved, self.balancer.running():
            try:
                for index in range(len(self.urls)):
                    self.start(index)
                for index in range(len(self.urls)):
                    self.wait(index)
                yield self
            finally:
                for process in self._processes:
                    if process is not None:
                        process.kill()
                        process.join(60)

    def start(self, index: int) -> None:
        """Start or restart a proxy."""
        process = _context.Process(
            target=serve_place,
            args=(self.store_url, index, self._ports[index], len(self.urls), self._engine_url),
        )
        process.start()
        self._processes[index] = process

    def move(self, index: int) -> None:
        """Give the next process of a place another address; the balancer knows only the earlier one."""
        [self._ports[index]] = self._reserved.enter_context(reserved_ports(1))
        self.urls[index] = f"http://127.0.0.1:{self._ports[index]}"

    def wait(self, index: int) -> None:
        """Wait until a proxy responds."""
        wait_for(lambda: _is_healthy(self.urls[index]))

    def process(self, index: int) -> ForkServerProcess:
        """Return the newest process of a place."""
        process = self._processes[index]
        assert process is not None
        return process

    def kill(self, index: int) -> None:
        """Kill a proxy with SIGKILL, as if its machine had failed; its place in the table does not change."""
        self.process(index).kill()
        self.process(index).join(60)

    def end(self, index: int) -> None:
        """Send SIGTERM to a proxy, and wait until it has exited."""
        self.process(index).terminate()
        self.process(index).join(60)
        assert self.process(index).exitcode == 0

    @contextlib.contextmanager
    def cut_off(self, index: int, *, is_noticed: bool = True) -> Iterator[None]:
        """Suspend a proxy within the with-block; if `is_noticed`, its last heartbeat is too old at once."""
        pid = self.process(index).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        for _ in range(100):
            if self._others_can_write():
                break
            os.kill(pid, signal.SIGCONT)  # it was suspended in a transaction, which may now end
            time.sleep(0.2)  # a heartbeat is due at once, and must end before the process is suspended
            os.kill(pid, signal.SIGSTOP)
        try:
            if is_noticed:
                self.make_old(index)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def _others_can_write(self) -> bool:
        """Whether the writers' lock, which a process holds during its transactions, is free."""
        engine = engine_of(self.store_url, is_pooled=False)
        # The lock that an open store holds is a shared one.
        held = "locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
        query = f"SELECT count(*) FROM pg_locks WHERE {held}"
        free = 0
        with engine.connect() as connection:
            for _ in range(20):
                time.sleep(0.02)
                free += connection.exec_driver_sql(query).scalar_one() == 0
        engine.dispose()
        return free > 1

    def make_old(self, index: int) -> None:
        """Set back the last heartbeat of a suspended or killed proxy, so that the others consider it dead."""
        engine = engine_of(self.store_url, is_pooled=False)
        with engine.begin() as connection:
            connection.execute(
                sa.update(roles)
                .where(roles.c.role == "proxy", roles.c.index == index)
                .values(beat_at=roles.c.beat_at - DEAD_AFTER_S - 1)
            )
        engine.dispose()

    def owner(self, index: int) -> str:
        """Return the name with which the newest process of a place owns episodes."""
        return owner_name(index, self.row(index).epoch)

    def row(self, index: int) -> RoleRow:
        """Return the row of a proxy in the table of roles."""
        with Store.open(self.store_url) as store:
            return next(row for row in store.role_rows("proxy") if row.index == index)

    def index_of(self, episode_id: str) -> int:
        """Return the index of the proxy that owns an episode."""
        with Store.open(self.store_url) as store:
            return int(str(store.episode_row(episode_id).owner).split(".")[1])


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=60).is_success
    return False


class Balancer:
    """Gives each connection to the next backend in turn, and skips backends that refuse the connection.

    Attributes:
        counts: [backends] the number of connections that each backend was given.
    """

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._turns = itertools.count()
        self._running: set[asyncio.Task[Any]] = set()
        self.counts = [0] * len(ports)
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread within the with-block."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._end(server), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(20)
            loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            for _ in self._ports:
                index = next(self._turns) % len(self._ports)
                try:
                    backend = await asyncio.open_connection("127.0.0.1", self._ports[index])
                except OSError:
                    continue
                self.counts[index] += 1
                with contextlib.closing(backend[1]):
                    ways = [_copy(reader, backend[1]), _copy(backend[0], writer)]
                    tasks = [asyncio.ensure_future(way) for way in ways]
                    try:
                        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for one in tasks:
                            one.cancel()
                        await asyncio.gather(*tasks, return_exceptions=True)
                return


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
