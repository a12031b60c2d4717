"""The two sides of a canary: which engines serve an episode, and which versions are recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from openai import OpenAI
from proxy_support import MODEL
from record_support import until as wait_until

from areal_agents.inference.pool import PoolLimits, canary_engines, is_of_canary
from areal_agents.proxy import ProxyConfig, create_app
from areal_agents.proxy.engines import EngineUrls, make_pool
from areal_agents.proxy.server import build_server
from areal_agents.rendering import ChatRenderer
from areal_agents.sockets import listen, url_of
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedReply, running

SHARE = 0.4
WAIT_S = 60.0  # longer than any call takes on a busy machine


@contextmanager
def proxy_of(urls: list[str], renderer: ChatRenderer, store: Store, **config: Any) -> Iterator[str]:
    servers: list[Any] = []
    with listen("127.0.0.1", 0) as listener:

        async def run() -> None:
            pool = make_pool(
                EngineUrls(tuple(urls)),
                store=store,
                renderer=renderer,
                request_timeout_s=WAIT_S,
                limits=PoolLimits(probe_every_s=0.05, load_again_s=0.05, wait_s=WAIT_S),
                canary_share=SHARE,
            )
            settings = ProxyConfig(implicit_split="train", implicit_groups=True, **config)
            app = create_app(store=store, engine=pool, renderer=renderer, config=settings)
            servers.append(build_server(app))
            try:
                await servers[0].serve(sockets=[listener])
            finally:
                await pool.aclose()

        thread = threading.Thread(
            target=lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run()), daemon=True
        )
        thread.start()
        url = url_of(listener)
        try:
            wait_until(lambda: httpx.get(f"{url}/ready", timeout=60).json().get("serving") == len(urls))
            yield url
        finally:
            servers[0].should_exit = True
            thread.join(20)


def versions_of(store: Store) -> dict[str, tuple[int | None, int | None]]:
    return {e.id: (e.version_min, e.version_max) for e in store.episodes()}


def talk(client: OpenAI, session: str, turns: int = 1) -> list[str]:
    """Hold one conversation, and return the ids of its completions."""
    messages: list[Any] = []
    ids = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{session}, {turn}"})
        said = client.chat.completions.create(
            model="policy", messages=messages, extra_headers={"session-id": session}
        )
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
        ids.append(said.id)
    return ids


def ask(http: httpx.Client, episode: dict[str, Any]) -> httpx.Response:
    """Make one call of an episode."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return http.post(f"/e/{episode['key']}/v1/chat/completions", json=body)


def test_each_side_is_served_by_its_engines_until_the_candidate_is_decided(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    apps = [ScriptedApp.from_folder(MODEL, lambda call: ScriptedReply("fine")) for _ in range(3)]
    with (
        Store.open(tmp_path / "store.db") as store,
        running(apps[0]) as one,
        running(apps[1]) as two,
        running(apps[2]) as canary,
    ):
        store.publish_version(0, step=0, path=str(MODEL))
        store.publish_candidate(3, step=3, path=str(MODEL), share=0.4)
        urls = [one, two, canary]
        assert canary_engines(urls, SHARE) == (canary,)
        with proxy_of(urls, renderer, store) as url, OpenAI(base_url=f"{url}/v1", api_key="user") as client:
            for number in range(12):
                talk(client, f"first {number}", turns=2)
            seen = versions_of(store)
            sides = {episode_id: is_of_canary(episode_id, SHARE) for episode_id in seen}
            assert len(seen) == 12 and 0 < sum(sides.values()) < 12
            assert seen == {i: (3, 3) if is_canary else (0, 0) for i, is_canary in sides.items()}
            assert len(apps[2].exchanges) == 2 * sum(sides.values())
            # Each episode is a training group of one, which is complete once it is finished and rewarded.
            assert store.group_counts()["pending"] == 12
            (completion_id, *_) = talk(client, "first 0", turns=1)
            given = {"completion_id": completion_id, "reward": 1.0}
            rewarded = httpx.post(f"{url}/rewards", json=given, timeout=60).json()
            httpx.post(f"{url}/episodes/{rewarded['id']}/finish", json={}, timeout=60)
            assert store.group_counts()["complete"] == 1

            store.roll_back_candidate(3, {}, restored=4, step=4, path=str(MODEL))
            wait_until(lambda: [app._gate.version for app in apps] == ["4"] * 3)
            for number in range(1, 12):
                talk(client, f"first {number}", turns=3)  # the conversations continue
            later = versions_of(store)
            assert len(later) == 12 and [newest for _, newest in later.values()].count(4) == 11

            store.publish_candidate(5, step=5, path=str(MODEL), share=0.4)
            wait_until(lambda: [app._gate.version for app in apps] == ["4", "4", "5"])
            store.promote_candidate(5, {})
            wait_until(lambda: [app._gate.version for app in apps] == ["5"] * 3)


def test_calls_of_the_canary_wait_for_its_own_engine(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Conversations of the canary are not moved to the other side, whose scores they would distort."""
    apps = [ScriptedApp.from_folder(MODEL, lambda call: ScriptedReply("fine")) for _ in range(2)]
    with (
        Store.open(tmp_path / "store.db") as store,
        running(apps[0]) as one,
        ExitStack() as dies,
    ):
        canary = dies.enter_context(running(apps[1]))
        with (
            proxy_of([one, canary], renderer, store) as url,
            httpx.Client(base_url=url, timeout=WAIT_S) as http,
            ThreadPoolExecutor(1) as threads,
        ):
            dies.close()
            wait_until(lambda: http.get("/ready").json()["serving"] == 1)
            sides = {}
            while len(sides) < 2:
                episode = http.post("/episodes", json={}).json()
                sides[is_of_canary(episode["id"], SHARE)] = episode
            waiting = threads.submit(ask, http, sides[True])
            wait_until(lambda: "\nareal_agents_calls_running 1.0\n" in http.get("/metrics").text)
            assert [ask(http, sides[False]).status_code for _ in range(3)] == [200] * 3
            assert not waiting.done()
            assert len(apps[0].exchanges) == 3 and not apps[1].exchanges
            http.post(f"/episodes/{sides[True]['id']}/fail", json={"aborted": True})
            assert waiting.result(WAIT_S).status_code == 409


def test_the_canary_gets_its_share_of_episodes_and_engines() -> None:
    ids = [f"implicit-{number:016x}" for number in range(20_000)]
    for share in (0.01, 0.1, 0.5):
        of_canary = {i for i in ids if is_of_canary(i, share)}
        assert len(of_canary) == pytest.approx(share * len(ids), abs=4 * (share * len(ids)) ** 0.5)
        assert of_canary <= {i for i in ids if is_of_canary(i, 2 * share)}, "a larger share moves none back"
    assert not is_of_canary("", 0.99)
    urls = [f"http://e:{n}" for n in range(8)]
    assert [len(canary_engines(urls[:n], s)) for n, s in ((2, 0.1), (8, 0.1), (8, 0.5), (2, 0.9))] == [
        1,
        1,
        4,
        1,
    ]
    with pytest.raises(ValueError, match="engine of its own"):
        canary_engines(urls[:1], 0.1)
