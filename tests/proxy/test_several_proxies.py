"""Proxies of a run on several machines: any proxy answers any call, also after others are lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import httpx
import pytest
from openai import ConflictError, InternalServerError, OpenAI
from places_support import ADMIN_KEY, SECRET, Proxies
from postgres_server import PostgresServer
from proxy_support import MODEL, SEARCH
from starlette.types import Message, Receive, Scope, Send
from workers_support import wait_for

from areal_agents.client import AsyncClient
from areal_agents.cluster.proxy_forwarder import ProxyForwarder
from areal_agents.errors import ConfigError, RequestError
from areal_agents.inference.ports import reserved_ports
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.server import serve
from areal_agents.proxy.workers.places import ProxyPlace, ProxyTable
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedCall, running

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
SLOW = "take your time"


class Engine:
    """A scripted engine that answers at once, except that slow calls wait until `released` is set."""

    def __init__(self) -> None:
        self.slow_calls = 0
        self.released = threading.Event()
        self._app = ScriptedApp.from_folder(MODEL, self._script)
        self._is_slow = ContextVar("is_slow", default=False)  # of the request that is being answered

    def _script(self, call: ScriptedCall) -> str:
        if SLOW not in call.last_text:
            return "the harbour opens at six"
        self._is_slow.set(True)
        self.slow_calls += 1
        return "one two three"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_released(message: Message) -> None:
            while self._is_slow.get() and not self.released.is_set():
                await asyncio.sleep(0.01)
            await send(message)

        await self._app(scope, receive, send_when_released)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def engine_url(engine: Engine) -> Iterator[str]:
    with running(engine) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture(scope="module")
def proxies(engine_url: str) -> Iterator[Proxies]:
    """Three proxies on one PostgreSQL server, behind a load balancer."""
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        url = server.new_store()
        with Store.open(url):
            pass
        with Proxies(url, engine_url, 3).running() as three:
            yield three


def open_episode(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/episodes", json=body, headers=ADMIN, timeout=60)
    return answer.raise_for_status().json()


def client_of(url: str, key: str, retries: int = 8) -> OpenAI:
    """Return a client that opens a connection for each call, so that the balancer routes each separately."""
    connections = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
    return OpenAI(base_url=f"{url}/e/{key}/v1", api_key=key, max_retries=retries, http_client=connections)


class Talk:
    """A conversation in an episode, through OpenAI's client."""

    def __init__(self, url: str, key: str, retries: int = 8) -> None:
        self.client = client_of(url, key, retries)
        self.messages: list[Any] = [{"role": "user", "content": "hello"}]
        self.ids: list[str] = []

    def say(self) -> None:
        """Add one more turn."""
        answer = self.client.chat.completions.create(
            model="policy",
            messages=self.messages,
            tools=[SEARCH],  # type: ignore[list-item]
        )
        self.ids.append(answer.id)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.messages.append(_result(len(self.ids)))


def _result(number: int) -> dict[str, str]:
    """Return a message after which the template keeps the earlier messages unchanged."""
    return {"role": "tool", "content": f"result {number}"}


def check_exact(proxies: Proxies, episode_id: str, ids: Sequence[str]) -> None:
    """Check that the episode has exactly the turns that were answered, each of which continues the last."""
    with Store.open(proxies.store_url) as store:
        turns = store.load_episode(episode_id).turns
    assert [turn.id for turn in turns] == list(ids)
    assert [turn.parent for turn in turns] == [None, *ids[:-1]][: len(ids)]
    assert [turn.recorded_before for turn in turns] == list(range(len(ids)))


def test_calls_of_one_episode_may_reach_any_proxy(proxies: Proxies) -> None:
    opened = open_episode(proxies.balancer.url)
    before = list(proxies.balancer.counts)
    talk = Talk(proxies.balancer.url, opened["key"])
    for _ in range(6):
        talk.say()
    given = [count - earlier for count, earlier in zip(proxies.balancer.counts, before, strict=True)]
    assert given == [2, 2, 2]
    check_exact(proxies, opened["id"], talk.ids)
    url, key = proxies.balancer.url, {"Authorization": f"Bearer {opened['key']}"}
    for number in range(3):
        reward = {"name": f"r{number}", "reward": 1.0}
        httpx.post(
            f"{url}/episodes/{opened['id']}/reward", json=reward, headers=key, timeout=60
        ).raise_for_status()
    ended = [
        httpx.post(f"{url}/episodes/{opened['id']}/finish", json={}, headers=key, timeout=60)
        for _ in range(3)
    ]
    assert [answer.json()["status"] for answer in ended] == ["finished"] * 3
    with pytest.raises(ConflictError, match="is finished"):
        talk.say()


def test_conversations_without_an_episode_continue_through_any_proxy(proxies: Proxies) -> None:
    for headers in ({}, {"session-id": "a session"}):
        messages: list[Any] = [{"role": "user", "content": f"hello {headers}"}]
        ids = []
        for url in (*proxies.urls, proxies.balancer.url):
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": messages, "tools": [SEARCH]},
                headers={**ADMIN, **headers},
                timeout=60,
            ).json()
            ids.append(answer["id"])
            messages += [answer["choices"][0]["message"], _result(len(ids))]
        with Store.open(proxies.store_url) as store:
            episode_id = store.episode_of_turn(ids[0]).id
        check_exact(proxies, episode_id, ids)


def test_a_foreign_proxy_is_refused(proxies: Proxies) -> None:
    opened = open_episode(proxies.urls[0])
    body = {"messages": [{"role": "user", "content": "hello"}]}
    for url in proxies.urls:  # the owner, and others that would forward the request
        for headers in ({"x-areal-agents-hop": "guess"}, {"x-areal-agents-address": "evil.example 80"}):
            answer = httpx.post(
                f"{url}/e/{opened['key']}/v1/chat/completions", json=body, headers=headers, timeout=60
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_proxy")
            assert SECRET not in answer.text and SECRET not in str(answer.headers)
    check_exact(proxies, opened["id"], [])


def metrics_of(url: str) -> str:
    """Return the text of /metrics. A 503, because a proxy is too slow, is retried."""
    answers: list[httpx.Response] = []

    def is_whole() -> bool:
        answers.append(httpx.get(f"{url}/metrics", headers=ADMIN, timeout=60))
        return answers[-1].status_code != 503

    wait_for(is_whole)
    return answers[-1].raise_for_status().text


def test_the_metrics_are_those_of_all_proxies(proxies: Proxies) -> None:
    open_episode(proxies.urls[0])
    open_episode(proxies.urls[1])
    opens = set()
    for url in proxies.urls:
        lines = metrics_of(url).splitlines()
        opens |= {line for line in lines if line.startswith("areal_agents_open_episodes ")}
    assert len(opens) == 1 and float(opens.pop().split()[1]) >= 2


def test_a_proxy_that_was_cut_off_writes_nothing_to_an_episode_that_was_taken_over(
    proxies: Proxies, engine: Engine
) -> None:
    """A call runs in the proxy when it is cut off. When it is back, it forwards calls to the new owner."""
    opened = open_episode(proxies.urls[0])
    talk = Talk(proxies.urls[1], opened["key"], retries=0)
    talk.say()
    begun = engine.slow_calls
    engine.released.clear()
    late = client_of(proxies.urls[0], opened["key"], retries=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            late.chat.completions.create, model="policy", messages=[{"role": "user", "content": SLOW}]
        )
        wait_for(lambda: engine.slow_calls == begun + 1)
        with proxies.cut_off(0):
            wait_for(lambda: takes_over(talk))
            assert proxies.index_of(opened["id"]) == 1
            engine.released.set()
        error = waiting.exception(60)
        assert isinstance(error, InternalServerError), error
        assert (error.status_code, error.code) == (503, "episode_elsewhere")
    check_exact(proxies, opened["id"], talk.ids)
    wait_for(lambda: proxies.row(0).is_alive)
    talk.client = client_of(proxies.urls[0], opened["key"], retries=0)
    talk.say()
    assert proxies.index_of(opened["id"]) == 1
    check_exact(proxies, opened["id"], talk.ids)


def takes_over(talk: Talk) -> bool:
    """Add one more turn; return False if the owner's silence has not been noticed yet."""
    with contextlib.suppress(InternalServerError):
        talk.say()
        return True
    return False


def test_calls_survive_kill_9_of_the_owner(proxies: Proxies, engine: Engine) -> None:
    """One call is forwarded by another proxy; the other is sent by a client that retries by itself."""
    opened = [open_episode(proxies.urls[0]) for _ in range(2)]
    talks = [Talk(proxies.urls[2], opened[0]["key"], retries=0), Talk(proxies.balancer.url, opened[1]["key"])]
    for talk in talks:
        talk.say()
        talk.messages[-1]["content"] = SLOW
    begun = engine.slow_calls
    engine.released.clear()
    with ThreadPoolExecutor(2) as pool:
        saying = [pool.submit(talk.say) for talk in talks]
        wait_for(lambda: engine.slow_calls == begun + 2)
        proxies.kill(0)
        engine.released.set()
        proxies.make_old(0)
        for said in saying:
            said.result(60)
    for item, talk in zip(opened, talks, strict=True):
        assert proxies.index_of(item["id"]) != 0
        check_exact(proxies, item["id"], talk.ids)
    proxies.start(0)
    proxies.wait(0)
    for item, talk in zip(opened, talks, strict=True):
        talk.client = client_of(proxies.urls[0], item["key"])
        talk.say()
        check_exact(proxies, item["id"], talk.ids)


@pytest.mark.slow
def test_a_long_call_survives_the_loss_of_its_machine(proxies: Proxies, engine: Engine) -> None:
    """The proxy that forwarded the call takes it over, however long it has waited."""
    opened = open_episode(proxies.urls[0])
    talk = Talk(proxies.urls[1], opened["key"], retries=0)
    talk.say()
    talk.messages[-1]["content"] = SLOW
    begun = engine.slow_calls
    engine.released.clear()
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(talk.say)
        wait_for(lambda: engine.slow_calls == begun + 1)
        with proxies.cut_off(0, is_noticed=False):
            engine.released.set()
            time.sleep(17)  # longer than a call waits for an owner that does not answer
            assert not saying.done()
            proxies.make_old(0)
            saying.result(60)
    assert proxies.index_of(opened["id"]) == 1
    check_exact(proxies, opened["id"], talk.ids)


def test_a_rolling_restart_under_load_loses_nothing(proxies: Proxies) -> None:
    episodes: list[tuple[str, list[str]]] = []
    ended = threading.Event()

    def play() -> None:
        while not ended.is_set():
            url = proxies.balancer.url
            opened = opening(url)
            talk = Talk(url, opened["key"])
            for _ in range(4):
                talk.say()
            episodes.append((opened["id"], talk.ids))

    with ThreadPoolExecutor(4) as pool:
        playing = [pool.submit(play) for _ in range(4)]
        try:
            for index in range(3):
                proxies.end(index)
                proxies.start(index)
                proxies.wait(index)
                seen = len(episodes)
                wait_for(lambda seen=seen: len(episodes) > seen + 4 or any(p.done() for p in playing))
        finally:
            ended.set()
        for done in playing:
            done.result(120)
    assert len(episodes) >= 12
    for episode_id, ids in episodes:
        assert len(set(ids)) == 4
        check_exact(proxies, episode_id, ids)
    assert [proxies.row(index).is_alive for index in range(3)] == [True] * 3


def test_a_restart_at_another_address_loses_nothing(proxies: Proxies) -> None:
    """A rollout process and its agents call through a local forwarder, which prefers the proxy that ends."""
    ended = threading.Event()
    episodes: list[tuple[str, list[str]]] = []

    async def play(url: str) -> None:
        async with AsyncClient(url, ADMIN_KEY, agents_url=url, patience_s=60.0) as client:
            while not ended.is_set():
                try:
                    opened = await client.open_episode()
                except RequestError as error:  # the response was lost before anything was played
                    assert error.code == "unreachable"
                    continue
                assert opened.base_url.startswith(url)
                talk = Talk(url, opened.api_key)
                talk.client = OpenAI(base_url=opened.base_url, api_key=opened.api_key)
                for _ in range(4):
                    await asyncio.to_thread(talk.say)
                state = await client.finish(opened.id, rewards=[{"reward": 1.0}], require_turn=True)
                assert state["status"] == "finished"
                episodes.append((opened.id, talk.ids))

    with contextlib.ExitStack() as stack:
        table = ProxyTable(stack.enter_context(Store.open(proxies.store_url)))
        stack.enter_context(table.watching())
        [port] = stack.enter_context(reserved_ports(1))
        stack.enter_context(ProxyForwarder(table, count=3, preferred=0).running("127.0.0.1", port))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        playing = [pool.submit(asyncio.run, play(f"http://127.0.0.1:{port}")) for _ in range(4)]
        try:
            wait_for(lambda: len(episodes) > 4 or any(p.done() for p in playing))
            proxies.end(0)
            proxies.move(0)
            proxies.start(0)
            seen = len(episodes)
            wait_for(lambda: len(episodes) > seen + 4 or any(p.done() for p in playing))
            proxies.wait(0)
        finally:
            ended.set()
        for done in playing:
            done.result(120)
    for episode_id, ids in episodes:
        check_exact(proxies, episode_id, ids)


def opening(url: str) -> dict[str, Any]:
    """Open an episode; retry if a proxy that ended has closed the connection, as balancers do."""
    for _ in range(20):
        with contextlib.suppress(httpx.TransportError):
            return open_episode(url)
    raise AssertionError("no proxy opens an episode")


def test_several_workers_of_one_place_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="set proxy.workers to 1, and cluster.proxies"):
        serve(
            MODEL,
            ProxyConfig(workers=2),
            store=tmp_path / "s.db",
            engine_urls=["http://127.0.0.1:1"],
            place=ProxyPlace(0, 1, 2, SECRET),
        )
    assert ProxyConfig().for_engines(4096, is_alone=False).workers == 1
