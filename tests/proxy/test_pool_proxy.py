"""The proxy in front of several engines: what clients and the operator see when an engine dies."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from openai import InternalServerError, OpenAI
from polling import until
from proxy_support import MODEL
from record_support import until as wait_until

from areal_agents.errors import ConfigError
from areal_agents.inference.pool import EnginePool, PoolLimits
from areal_agents.inference.pool.monitor import ReplicaMonitor
from areal_agents.inference.pool.replica import Replica
from areal_agents.proxy import ProxyConfig, create_app, serve
from areal_agents.proxy.engines import EngineUrls, check_models, make_pool
from areal_agents.proxy.page import Page
from areal_agents.proxy.server import build_server
from areal_agents.proxy.workers.identity import WorkerSpec
from areal_agents.proxy.workers.orders import Order
from areal_agents.rendering import ChatRenderer
from areal_agents.sockets import listen, url_of
from areal_agents.store import Conflict, Store
from areal_agents.store.trainer_lock import TrainerLock
from areal_agents.testing import ScriptedApp, ScriptedCall, ScriptedReply, running

ADMIN = {"Authorization": "Bearer admin"}
TEXT = "The harbour opens at six, and the ferry leaves for the island when the tide is high enough to sail."


def says(text: str, **arrival: Any) -> Any:
    """Return a script that answers with `text`; a request that contains a part of it gets the rest."""

    def script(call: ScriptedCall) -> ScriptedReply:
        said = call.prompt_text.rpartition("<|im_start|>assistant\n")[2]
        assert text.startswith(said)
        return ScriptedReply(text[len(said) :], **arrival)

    return script


@contextmanager
def proxy_of(
    urls: list[str], renderer: ChatRenderer, path: Path, *, wait_s: float = 120.0, all_serve: bool = True
) -> Iterator[tuple[str, EnginePool]]:
    """Serve a proxy over a pool that probes often; with `all_serve`, wait until all engines serve."""
    with Store.open(path / "store.db") as store, listen("127.0.0.1", 0) as listener:
        made: list[EnginePool] = []

        async def run() -> None:
            pool = make_pool(
                EngineUrls(tuple(urls)),
                store=store,
                renderer=renderer,
                request_timeout_s=20,
                limits=PoolLimits(probe_every_s=0.05, probe_again_s=0.02, wait_s=wait_s),
            )
            made.append(pool)
            config = ProxyConfig(admin_key="admin")
            app = create_app(store=store, engine=pool, renderer=renderer, config=config)
            server = build_server(app)
            servers.append(server)
            try:
                await server.serve(sockets=[listener])
            finally:
                await pool.aclose()

        servers: list[Any] = []
        thread = threading.Thread(
            target=lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run()), daemon=True
        )
        thread.start()
        url = url_of(listener)
        try:
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            if all_serve:
                wait_until(lambda: all(replica.is_serving for replica in made[0].replicas))
            yield url, made[0]
        finally:
            servers[0].should_exit = True
            thread.join(20)


def scripted(**options: Any) -> ScriptedApp:
    return ScriptedApp.from_folder(MODEL, says(TEXT, chunk_delay_s=0.002), **options)


def client_of(url: str, episode: dict[str, Any]) -> OpenAI:
    return OpenAI(base_url=f"{url}/e/{episode['key']}/v1", api_key=episode["key"], max_retries=0)


def open_episode(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/episodes", json=body, headers=ADMIN, timeout=60)
    return answer.raise_for_status().json()


def metrics_of(url: str) -> dict[str, float]:
    """Return the samples of the engines in /metrics, by name and label."""
    text = httpx.get(f"{url}/metrics", headers=ADMIN, timeout=60).raise_for_status().text
    rows = re.findall(r"^(areal_agents_engine_\w+?)(?:_total)?(\{.*\})? ([-\d.e+]+)$", text, re.MULTILINE)
    return {name + label: float(value) for name, label, value in rows}


def ask(client: OpenAI, *said: str) -> Any:
    messages: list[Any] = [{"role": "user", "content": text} for text in said]
    return client.chat.completions.create(model="p", messages=messages)


def test_an_episode_stays_on_its_engine_and_the_metrics_show_each(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    apps = [scripted(), scripted()]
    with (
        running(apps[0]) as one,
        running(apps[1]) as two,
        proxy_of([one, two], renderer, tmp_path) as (url, pool),
    ):
        for _ in range(4):
            with client_of(url, open_episode(url)) as client:
                assert ask(client, "hello").choices[0].message.content == TEXT
                assert ask(client, "hello", "again").choices[0].message.content == TEXT
        assert [len(app.exchanges) for app in apps] == [4, 4]
        ready = httpx.get(f"{url}/ready", timeout=60).json()
        assert ready == {"status": "ok", "version": 0, "engines": 2, "serving": 2}
        seen = metrics_of(url)
        for engine in (one, two):
            label = f'{{engine="{engine}"}}'
            values = [
                seen[f"areal_agents_engine_{name}{label}"] for name in ("healthy", "serving", "version")
            ]
            assert values == [1, 1, 0] and seen[f"areal_agents_engine_running{label}"] == 0
        assert seen["areal_agents_engine_failovers"] == seen["areal_agents_engine_catch_ups"] == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_does_not_notice_a_dead_engine(
    streamed: bool, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """One engine breaks off each stream after one token; every reply is whole and recorded as sampled."""
    apps = [scripted(), scripted()]

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        sent = 0

        async def cut(message: Any) -> None:
            nonlocal sent
            sent += message["type"] == "http.response.body"
            if scope["path"] == "/generate" and sent > 1:
                raise ConnectionResetError
            await send(message)

        await apps[0](scope, receive, cut)

    with (
        running(dying) as one,  # type: ignore[arg-type]
        running(apps[1]) as two,
        proxy_of([one, two], renderer, tmp_path) as (url, _),
    ):
        episode = open_episode(url)
        with client_of(url, episode) as client:
            for n in range(4):
                messages: list[Any] = [{"role": "user", "content": f"hello {n}"}]
                if streamed:
                    chunks = client.chat.completions.create(model="p", messages=messages, stream=True)
                    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                else:
                    said = ask(client, f"hello {n}").choices[0].message.content
                assert said == TEXT
        seen = metrics_of(url)
        assert seen["areal_agents_engine_failovers"] >= 1
        assert seen["areal_agents_engine_resubmitted_tokens"] >= 1
        shown = httpx.get(
            f"{url}/episodes/{episode['id']}", params={"tokens": 1}, headers=ADMIN, timeout=60
        ).json()
        whole = renderer.tokenizer.encode(TEXT)
        for turn in shown["turns"]:
            assert turn["token_ids"] == [*whole, renderer.stop_token_ids[0]]
            assert len(turn["logprobs"]) == len(turn["token_ids"]) == len(turn["versions"])


def test_a_request_that_kills_engines_fails_and_so_does_its_episode(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    """The client retries what looks like a transient failure, and its retries kill no further engine."""
    app, is_dead, deaths = scripted(), False, 0

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        """The engine runs again as soon as the pool has noticed its death."""
        nonlocal is_dead, deaths
        if scope["path"] == "/generate":
            is_dead, deaths = True, deaths + 1
        elif is_dead and pool.replicas[0].misses:
            is_dead = False
        if is_dead:
            raise ConnectionResetError
        await app(scope, receive, send)

    with (
        running(dying) as one,  # type: ignore[arg-type]
        proxy_of([one], renderer, tmp_path) as (url, pool),
    ):
        episode = open_episode(url)
        with (
            client_of(url, episode).with_options(max_retries=2) as client,
            pytest.raises(InternalServerError, match="3 engines died while they ran it"),
        ):
            ask(client, "hello")
        assert deaths == 3
        done = httpx.post(f"{url}/episodes/{episode['id']}/finish", json={}, headers=ADMIN, timeout=60)
        assert done.raise_for_status().json()["status"] == "failed"


@pytest.mark.parametrize("trains", [True, False], ids=["a trainer", "no trainer"])
async def test_the_pool_knows_whether_a_trainer_runs(
    trains: bool, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running trainer may be swapping weights; without one, the pool finishes the swap itself."""
    probes: list[Replica] = []
    check = ReplicaMonitor._check

    async def counted(monitor: ReplicaMonitor, replica: Replica) -> None:
        await check(monitor, replica)
        probes.append(replica)

    monkeypatch.setattr(ReplicaMonitor, "_check", counted)
    with Store.open(tmp_path / "store.db") as store, running(scripted()) as one:
        limits = PoolLimits(probe_every_s=0.01)
        pool = make_pool(
            EngineUrls((one,)), store=store, renderer=renderer, request_timeout_s=20, limits=limits
        )
        store.become_trainer()
        store.publish_version(0, step=0, path="v0")
        pool.start()
        try:
            replica = pool.replicas[0]
            await until(lambda: replica.is_serving)
            await replica.engine.pause("retract")
            store.publish_version(1, step=1, path="v1")
            await until(lambda: replica.due == 1)
            if trains:
                seen = len(probes)
                await until(lambda: len(probes) >= seen + 4)
                assert replica.is_serving and pool.counts.catch_ups == 0
                with pytest.raises(Conflict):  # the trainer still holds the lock
                    TrainerLock.of(store.path).take()
            else:
                store._trainer.release()
                await until(lambda: replica.version == 1 and not replica.may_be_paused)
                TrainerLock.of(store.path).take()  # the pool does not hold the lock
        finally:
            await pool.aclose()


def test_without_an_engine_the_proxy_says_why_it_is_not_ready(renderer: ChatRenderer, tmp_path: Path) -> None:
    with running(scripted()) as one:
        pass
    with proxy_of([one], renderer, tmp_path, wait_s=0.2, all_serve=False) as (url, _):
        answer = httpx.get(f"{url}/ready", timeout=60)
        assert answer.status_code == 503 and one in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        with (
            client_of(url, open_episode(url)) as client,
            pytest.raises(InternalServerError, match="no engine"),
        ):
            ask(client, "hello")
        assert metrics_of(url)[f'areal_agents_engine_healthy{{engine="{one}"}}'] == 0


def test_engines_of_different_models_are_refused_before_anything_is_served(tmp_path: Path) -> None:
    with running(scripted()) as one, running(scripted(vocab_size=900)) as two:
        with pytest.raises(ConfigError, match=rf"{two}: it serves a vocabulary of 900, and {one} "):
            serve(MODEL, ProxyConfig(), store=tmp_path / "s.db", engine_urls=[one, two])
        check_models([one])


def test_an_order_to_a_worker_is_read_as_it_was_written(tmp_path: Path) -> None:
    engines = EngineUrls(("http://a:1", "http://b:2"), "http://r:3", adapters=True)
    spec = WorkerSpec(tmp_path, "run", 0, 0, (1, 2), "secret")
    page = Page("module:function", "store", "model", "run")
    telemetry = {"endpoint": "http://c:4318"}
    order = Order(
        spec, "model", engines, "store", "process", {"versions": 2}, {}, page, telemetry, "run",
        3, 4, 5, (6, 7), 8,
    )  # fmt: skip
    assert Order.from_line(order.to_line()) == order
    assert engines.describe() == "http://a:1, http://b:2, through http://r:3"


USER = {"role": "user", "content": "hello"}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "p", "messages": [USER]}),
    "completions": ("/v1/completions", {"model": "p", "prompt": "hello", "max_tokens": 80}),
    "responses": ("/v1/responses", {"model": "p", "input": "hello"}),
    "messages": ("/v1/messages", {"model": "p", "messages": [USER], "max_tokens": 80}),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_that_gets_only_invalid_responses_is_a_502_and_is_not_recorded(
    renderer: ChatRenderer, tmp_path: Path, dialect: str
) -> None:
    """The error has the dialect's form, and ends a stream that has begun. A later call is served."""
    lies = ["versions that go back", "tokens after the stop token", "a length short of the limit"]
    app = ScriptedApp.from_folder(MODEL, lambda call: TEXT)
    path, body = DIALECTS[dialect]
    with running(app) as engine, proxy_of([engine], renderer, tmp_path) as (url, pool):
        episode = open_episode(url)
        headers = {"Authorization": f"Bearer {episode['key']}"}
        call = {"url": url + path, "headers": headers, "timeout": 60}
        app.script = lambda call: ScriptedReply(TEXT, lie=lies[call.index % 3])
        answer = httpx.post(**call, json=body)
        assert answer.status_code == 502, answer.text
        assert "6 times in a row" in answer.json()["error"]["message"]
        for lie in lies:
            app.script = lambda call, lie=lie: ScriptedReply(TEXT, lie=lie)
            streamed = httpx.post(**call, json={**body, "stream": True})
            assert re.search("error.*(go back|sampled tokens after|ended with length)", streamed.text)
            assert '"finish_reason":"stop"' not in streamed.text and "end_turn" not in streamed.text
        assert pool.replicas[0].exclusions == 0
        app.script = lambda call: TEXT
        assert httpx.post(**call, json=body).status_code == 200
        found = httpx.get(f"{url}/episodes/{episode['id']}?tokens=1", headers=ADMIN, timeout=60).json()
        assert len(found["turns"]) == 1
