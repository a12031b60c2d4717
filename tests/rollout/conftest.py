"""The real parts around a runner: embedded engine, proxy, store. Only the trainer is played by the test."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn

from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.proxy.app import create_app
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
ADMIN_KEY = "admin-key-of-the-tests"


@dataclass
class Served:
    """A proxy over a store of its own, and what a test needs to play the trainer."""

    url: str
    store: Store
    folder: Path
    versions: list[tuple[int, int]] = field(default_factory=list)

    def publish(self, step: int) -> None:
        """Publish the version of a step; the weights stay the same."""
        version = self.store.max_version() + 1
        self.store.publish_version(version, step=step, path=str(MODEL))

    @asynccontextmanager
    async def trainer(
        self, *, groups: int, steps: int, seen: Callable[[int], None] = lambda step: None
    ) -> AsyncIterator[None]:
        """Trains for the test: leases batches and publishes versions, 50 ms a step."""

        async def train() -> None:
            self.publish(0)
            for step in range(1, steps + 1):
                while not (batch := self.store.lease_groups(groups, step=step, holder="test")):
                    await asyncio.sleep(0.02)
                seen(step)
                await asyncio.sleep(0.05)
                self.store.mark_trained([group.id for group in batch], step=step, version=step)
                self.publish(step)

        task = asyncio.create_task(train())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    with running_engine(MODEL, threads=1, slots=32, max_context=2048) as url:
        yield url


@pytest.fixture(scope="session")
def renderer_of_the_model() -> ChatRenderer:
    return ChatRenderer.from_folder(MODEL)


@pytest.fixture
def served(engine_url: str, renderer_of_the_model: ChatRenderer, tmp_path: Path) -> Iterator[Served]:
    config = ProxyConfig(admin_key=ADMIN_KEY, reward_timeout_s=1.0)
    with Store.open(tmp_path / "store.db") as store:
        engine = SGLangEngine(engine_url)
        app = create_app(store=store, engine=engine, renderer=renderer_of_the_model, config=config)
        with serving(app) as url:
            yield Served(url, store, tmp_path)


@contextmanager
def serving(app: object) -> Iterator[str]:
    """An ASGI app on a free port, in a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=15)
    listener.close()
