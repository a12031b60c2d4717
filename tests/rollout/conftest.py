"""The real parts around a runner: a proxy, a store, and the embedded or the scripted engine. Only the trainer
is replaced by the test.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from real_tokenizers import qwen_folder
from stand_in_kubectl import StandInKubernetes
from stand_in_slurm import StandInSlurm
from store_queries import lease_groups

from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.proxy.app import create_app
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedReply, by_prompt, running

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
ADMIN_KEY = "admin-key-of-the-tests"
# Longer than httpx keeps an idle connection (5 s), as in the server of the proxy: a request that is sent just
# when the server closes the connection gets no answer.
KEEP_ALIVE_S = 10
# The odd spaces and escapes are lost if a reply is rendered again instead of continued.
WEATHER_TALK = by_prompt(
    [
        (": rain", "<think>\nIt rains.\n</think>\n\nTake one. ☂"),
        (
            "umbrella",
            '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "weather", '
            '"arguments": {"city" :  "Z\\u00fcrich"}}\n</tool_call>',
        ),
        ("slowly", ScriptedReply("It is a long way. " * 500, chunk_delay_s=0.1)),
        ("", "ok"),
    ]
)


@dataclass
class Served:
    """A proxy with its own store, and what a test needs to act as the trainer."""

    url: str
    store: Store
    folder: Path
    engine_url: str

    def publish(self, step: int) -> None:
        """Publish the version of a step and have the engine serve it; the weights stay the same."""
        version = self.store.max_version() + 1
        self.store.publish_version(version, step=step, path=str(MODEL))
        update = {"model_path": str(MODEL), "weight_version": str(version)}
        with httpx.Client(base_url=self.engine_url, timeout=30) as engine:
            for path, body in (
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", update),
                ("/continue_generation", {}),
            ):
                engine.post(path, json=body).raise_for_status()

    @asynccontextmanager
    async def trainer(
        self,
        *,
        groups: int,
        steps: int,
        seen: Callable[[int], None] = lambda step: None,
        may_train: Callable[[int], bool] = lambda step: True,
    ) -> AsyncIterator[None]:
        """Act as the trainer: lease a batch as soon as `may_train` allows the step, and publish a version."""

        async def train() -> None:
            if self.store.max_version() < 0:
                await asyncio.to_thread(self.publish, 0)
            for step in range(1, steps + 1):
                while not may_train(step) or not (batch := lease_groups(self.store, groups, step=step)):
                    await asyncio.sleep(0.02)
                seen(step)
                await asyncio.sleep(0.05)
                self.store.mark_trained([group.id for group in batch], step=step, version=step)
                await asyncio.to_thread(self.publish, step)

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
    with running_engine(MODEL, threads=1, slots=32, max_context=2048, kernel="torch") as url:
        yield url


@pytest.fixture(scope="session")
def renderer_of_the_model() -> ChatRenderer:
    return ChatRenderer.from_folder(MODEL)


@pytest.fixture
def reward_timeout_s() -> float:
    """How long the proxy of `served` waits for rewards; tests in which none come set a short time."""
    return 60.0


@pytest.fixture
def served(
    engine_url: str, renderer_of_the_model: ChatRenderer, tmp_path: Path, reward_timeout_s: float
) -> Iterator[Served]:
    config = ProxyConfig(admin_key=ADMIN_KEY, reward_timeout_s=reward_timeout_s)
    with (
        Store.open(tmp_path / "store.db") as store,
        serving(engine_url, store=store, renderer=renderer_of_the_model, config=config) as url,
    ):
        yield Served(url, store, tmp_path, engine_url)


@pytest.fixture(scope="session")
def scripted_engine() -> Iterator[str]:
    """The URL of an engine that scripts the conversation about the weather, and otherwise replies "ok"."""
    with running(ScriptedApp.from_folder(qwen_folder(), WEATHER_TALK)) as url:
        yield url


@pytest.fixture(scope="session")
def qwen_renderer() -> ChatRenderer:
    return ChatRenderer.from_folder(qwen_folder())


@pytest.fixture
def serve_scripted(
    scripted_engine: str, qwen_renderer: ChatRenderer, tmp_path: Path
) -> Callable[..., AbstractContextManager[Served]]:
    """Return a context manager that runs a proxy with the given settings for the scripted engine."""

    @contextmanager
    def serve(**settings: Any) -> Iterator[Served]:
        config = ProxyConfig(admin_key=ADMIN_KEY, **settings)
        with (
            Store.open(tmp_path / "store.db") as store,
            serving(scripted_engine, store=store, renderer=qwen_renderer, config=config) as url,
        ):
            yield Served(url, store, tmp_path, scripted_engine)

    return serve


@pytest.fixture
def scripted(serve_scripted: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    with serve_scripted() as served:
        yield served


@contextmanager
def serving(engine_url: str, **parts: Any) -> Iterator[str]:
    """Run the proxy on a free port, in a thread with its own event loop; yield its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with SGLangEngine(engine_url) as engine:
            app = create_app(engine=engine, **parts)
            settings = uvicorn.Config(app, log_level="error", lifespan="on", timeout_keep_alive=KEEP_ALIVE_S)
            servers.append(uvicorn.Server(settings))
            ready.set()
            await servers[0].serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    while not (ready.is_set() and servers[0].started):
        assert thread.is_alive(), "the proxy did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join(timeout=60)
        listener.close()


@pytest.fixture
def slurm_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInSlurm:
    """Put stand-ins for the programs of Slurm into PATH."""
    stand_in = StandInSlurm(tmp_path / "slurm")
    stand_in.install()
    monkeypatch.setenv("PATH", f"{stand_in.programs}:{os.environ['PATH']}")
    return stand_in


@pytest.fixture
def kubernetes_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInKubernetes]:
    """Put a stand-in for kubectl and a cluster into PATH; its pods end with the test."""
    stand_in = StandInKubernetes(tmp_path / "kubernetes")
    stand_in.install()
    monkeypatch.setenv("PATH", f"{stand_in.programs}:{os.environ['PATH']}")
    yield stand_in
    for name in stand_in.objects("Job"):
        (stand_in.folder / f"Job/{name}.json").unlink(
            missing_ok=True
        )  # a pod that has only just begun ends without its Job
        stand_in.end_pod(name)


@pytest.fixture(autouse=True)
def path_as_before() -> Iterator[None]:
    """Restore sys.path: loading an agent adds its folder, which every later test would search too."""
    before = list(sys.path)
    yield
    sys.path[:] = before
