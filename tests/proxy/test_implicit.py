"""Implicit episodes: retries of a call get one sample, and calls that are refused leave no episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine, joined_replies, until
from relay_support import relay_to

from areal_agents.errors import EngineError, EngineUnavailable, StoreError
from areal_agents.rendering import ChatRenderer

USER = {"role": "user", "content": "Where is Lyon?"}
BODY: dict[str, Any] = {"messages": [USER]}
CHAT = "/v1/chat/completions"
RETRIED = {"x-stainless-retry-count": "1"}
NAMED = {"session-id": "s1"}


@pytest.fixture
def proxy(renderer: ChatRenderer, tmp_path: Path) -> Iterator[RunningProxy]:
    samples = iter(range(999))
    engine = ObservedEngine(renderer, script=lambda call: f"sample {next(samples)}")
    with running_proxy(tmp_path / "s.db", engine) as running:
        yield running


def episodes(proxy: RunningProxy) -> list[dict[str, Any]]:
    """The summaries of all episodes, oldest first."""
    listed: list[dict[str, Any]] = proxy.http.get("/episodes").json()["episodes"]
    return listed


def ask(
    proxy: RunningProxy, headers: dict[str, str] | None = None, body: dict[str, Any] = BODY
) -> httpx.Response:
    return proxy.http.post(CHAT, json=body, headers=headers)


def disconnect_while_sampled(proxy: RunningProxy, headers: dict[str, str] | None = None) -> None:
    """Make a call, and close its connection while the engine is sampling the reply."""
    before = len(proxy.engine.calls)
    connection = HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
    try:
        connection.request("POST", CHAT, json.dumps(BODY), headers or {})
        until(lambda: len(proxy.engine.calls) > before)
    finally:
        connection.close()


def finish(proxy: RunningProxy, episode_id: str) -> None:
    done = proxy.http.post(f"/episodes/{episode_id}/finish")
    assert (done.status_code, done.json()["status"]) == (200, "finished"), done.text


# -- the end of an episode


@pytest.mark.parametrize("named", [NAMED, {}])
def test_an_episode_with_retried_calls_can_be_finished(proxy: RunningProxy, named: dict[str, str]) -> None:
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    body = BODY | {"tools": [SEARCH]}
    first = ask(proxy, named, body).json()
    for headers in (RETRIED, RETRIED):
        assert ask(proxy, named | headers, body).json()["id"] == first["id"]
    [episode] = episodes(proxy)
    finish(proxy, episode["id"])
    # The finished episode is not continued: its session name and conversation open another one.
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}
    assert ask(proxy, named, {"messages": [USER, message, result], "tools": [SEARCH]}).status_code == 200
    assert [item["turns"] for item in episodes(proxy)] == [1, 1]


def test_two_episodes_with_equal_conversations_end_separately(proxy: RunningProxy) -> None:
    """After the end of the later episode, the conversation continues the earlier one."""
    proxy.engine.script = lambda call: "ok"
    ask(proxy)
    ask(proxy)
    first, second = episodes(proxy)
    finish(proxy, second["id"])
    follow_up = {"messages": [USER, {"role": "assistant", "content": "ok"}, USER]}
    assert ask(proxy, body=follow_up).status_code == 200
    assert [(item["id"], item["turns"]) for item in episodes(proxy)] == [(first["id"], 2), (second["id"], 1)]


# -- retries of the first call


def chat(client: OpenAI | Anthropic, **options: Any) -> tuple[str, str]:
    assert isinstance(client, OpenAI)
    answer = client.chat.completions.create(model="p", messages=[USER], **options)  # type: ignore[list-item]
    return answer.id.partition("-")[2], str(answer.choices[0].message.content)


def responses(client: OpenAI | Anthropic, **options: Any) -> tuple[str, str]:
    assert isinstance(client, OpenAI)
    answer = client.responses.create(model="p", input="Where is Lyon?", **options)
    return answer.id.partition("_")[2], answer.output_text


def completions(client: OpenAI | Anthropic, **options: Any) -> tuple[str, str]:
    assert isinstance(client, OpenAI)
    answer = client.completions.create(model="p", prompt="Where is Lyon?", **options)
    return answer.id.partition("-")[2], answer.choices[0].text


def messages(client: OpenAI | Anthropic, **options: Any) -> tuple[str, str]:
    assert isinstance(client, Anthropic)
    answer = client.messages.create(model="p", messages=[USER], max_tokens=50, **options)  # type: ignore[list-item]
    [block] = answer.content
    assert block.type == "text"
    return answer.id.partition("_")[2], block.text


ASKING: dict[str, Callable[..., tuple[str, str]]] = {
    "chat": chat,
    "responses": responses,
    "completions": completions,
    "messages": messages,
}


def client_at(url: str, dialect: str, **options: Any) -> OpenAI | Anthropic:
    if dialect == "messages":
        return Anthropic(base_url=url, api_key="any", **options)
    return OpenAI(base_url=f"{url}/v1", api_key="any", **options)


@pytest.mark.parametrize("named", [{}, NAMED])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("dialect", sorted(ASKING))
def test_a_first_call_whose_response_is_lost_is_not_sampled_again(
    renderer: ChatRenderer, tmp_path: Path, dialect: str, restarted: bool, named: dict[str, str]
) -> None:
    """The real clients retry the call by themselves; the proxy may have been restarted meanwhile."""
    samples = iter(range(9))
    engine = ObservedEngine(renderer, script=lambda call: f"sample {next(samples)}")
    with ExitStack() as lives:

        def start() -> RunningProxy:
            return lives.enter_context(running_proxy(tmp_path / "s.db", engine))

        def restart() -> None:
            lives.close()
            relay.upstream = start().url

        with (
            relay_to(start().url, on_cut=restart if restarted else lambda: None) as relay,
            client_at(relay.url, dialect, default_headers=named, max_retries=2) as client,
        ):
            turn_id, text = ASKING[dialect](client)
            assert relay.retry_counts == ["0", "1"]
            [episode] = httpx.get(f"{relay.upstream}/episodes", timeout=60).json()["episodes"]
    assert text == "sample 0" and turn_id in relay.lost[0].decode()
    assert len(engine.calls) == 1 and episode["turns"] == 1


@pytest.mark.parametrize("named", [{}, NAMED])
def test_an_idempotency_key_identifies_a_first_call(
    proxy: RunningProxy, named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may still be running. The same request without the key gets another sample."""
    key = {"idempotency-key": "k"} | named
    proxy.engine.delay_s = 60
    replies = joined_replies(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        under_way = [pool.submit(ask, proxy, key) for _ in range(2)]
        until(lambda: len(replies) == 2)
        proxy.engine.hurry.set()
        first, joined = (future.result().json()["id"] for future in under_way)
    again = ask(proxy, key).json()["id"]
    assert first == joined == again and len(proxy.engine.calls) == 1
    assert ask(proxy, named).json()["id"] != first
    other = ask(proxy, key, {"messages": [USER], "max_tokens": 9})
    # A key identifies a request of one episode; without a session name, this call opens another one.
    assert other.status_code == (409 if named else 200)
    assert [item["turns"] for item in episodes(proxy)] == ([2] if named else [1, 1, 1])


def test_a_retry_finds_its_own_first_call_among_equal_ones(proxy: RunningProxy) -> None:
    """An agent that has continued has received its response, so the retry is of the other call."""
    lost, other = ask(proxy).json(), ask(proxy).json()
    assert ask(proxy, body=follow_up_of(other)).status_code == 200
    assert ask(proxy, RETRIED).json()["id"] == lost["id"]
    assert ask(proxy, body=follow_up_of(lost)).status_code == 200
    assert [item["turns"] for item in episodes(proxy)] == [2, 2]
    # Now no response can have been lost.
    assert ask(proxy, RETRIED).json()["id"] not in (lost["id"], other["id"])
    assert [item["turns"] for item in episodes(proxy)] == [2, 2, 1]


def follow_up_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, answer["choices"][0]["message"], {"role": "user", "content": "And Nice?"}]}


def test_the_next_equal_request_gets_the_sample_of_a_disconnected_client(proxy: RunningProxy) -> None:
    """The turn was recorded after its client had disconnected; an equal request, a retry or not, gets it."""
    first = ask(proxy).json()["id"]
    [episode] = episodes(proxy)
    proxy.store.discard_turn(first, "the client disconnected").result()
    path = Path(str(proxy.store.url).removeprefix("sqlite:///"))
    with running_proxy(path, proxy.engine) as again:
        assert ask(again).json()["id"] == first
        assert ask(again).json()["id"] != first  # the sample has been delivered now
        assert [item["turns"] for item in episodes(again)] == [1, 1]


def test_a_retry_of_a_call_without_a_sample_does_not_get_another_agents_sample(
    proxy: RunningProxy,
) -> None:
    """Of several equal first calls, one was refused, and the client of another one disconnected."""
    script = proxy.engine.script
    proxy.engine.script = lambda call: EngineUnavailable("away")
    assert ask(proxy).status_code == 503
    proxy.engine.script, proxy.engine.delay_s = script, 30
    disconnect_while_sampled(proxy)
    until(lambda: proxy.engine.cancelled)
    proxy.engine.delay_s = 0
    answers = [ask(proxy, headers).json()["id"] for headers in ({}, RETRIED, RETRIED, RETRIED)]
    assert len(set(answers)) == 3 and answers[3] == answers[2]
    assert [item["turns"] for item in episodes(proxy)] == [1, 1, 1]


def test_a_retry_of_another_caller_gets_a_new_sample(proxy: RunningProxy) -> None:
    first = ask(proxy).json()["id"]
    somebody_else = {"authorization": "Bearer somebody else"}
    assert ask(proxy, RETRIED | somebody_else).json()["id"] != first


# -- calls that are refused


TOO_LONG = {"messages": [{"role": "user", "content": "word " * 9000}]}
REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "bad field": ({"messages": [USER], "temperature": "x"}, 400),
    "no such template option": ({"messages": [USER], "chat_template_kwargs": {"no_such": 1}}, 400),
    "too long": (TOO_LONG, 400),
    "too large": ({"messages": [{"role": "user", "content": "x" * 2**21}]}, 413),
    "no engine": (BODY, 503),
    "engine failed": (BODY, 502),
}


@pytest.mark.parametrize("named", [{}, NAMED])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_first_call_that_is_refused_leaves_no_episode(
    renderer: ChatRenderer, tmp_path: Path, kind: str, streamed: bool, named: dict[str, str]
) -> None:
    engine = ObservedEngine(renderer)
    engine.script = lambda call: EngineUnavailable("away") if kind == "no engine" else EngineError("broken")
    body, status = REFUSED[kind]
    with running_proxy(tmp_path / "s.db", engine, max_body_mb=1.0) as proxy:
        for headers in (named, named | RETRIED):
            assert ask(proxy, headers, body | {"stream": streamed}).status_code == status
            assert episodes(proxy) == [] and open_in_memory(proxy) == 0
        engine.reset()
        assert ask(proxy, named).status_code == 200  # and the session name is free
        assert [item["turns"] for item in episodes(proxy)] == [1] and open_in_memory(proxy) == 1


def open_in_memory(proxy: RunningProxy) -> int:
    """Return the number of open episodes according to the proxy's metrics."""
    lines = proxy.http.get("/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("areal_agents_open_episodes ")]
    return round(float(value))


def test_a_full_queue_leaves_no_episode(renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = ObservedEngine(renderer, delay_s=30)
    with (
        running_proxy(tmp_path / "s.db", engine, max_concurrent=1, max_queued=0) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        served = pool.submit(ask, proxy)
        until(lambda: engine.calls)
        refused = [ask(proxy, headers) for headers in ({}, NAMED)]
        assert [answer.status_code for answer in refused] == [429, 429] and open_in_memory(proxy) == 1
        engine.hurry.set()
        assert served.result().status_code == 200
        assert [item["turns"] for item in episodes(proxy)] == [1]


def test_a_client_that_disconnects_during_a_first_call_leaves_no_episode(proxy: RunningProxy) -> None:
    proxy.engine.delay_s = 30
    for headers in ({}, NAMED):
        disconnect_while_sampled(proxy, headers)
    until(lambda: open_in_memory(proxy) == 0)
    assert episodes(proxy) == []


def test_a_refused_call_does_not_end_the_session_of_other_calls(proxy: RunningProxy) -> None:
    """A call is refused while the first call of its session is running, and another one after that."""
    proxy.engine.delay_s = 30
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(ask, proxy, NAMED)
        until(lambda: proxy.engine.calls)
        assert ask(proxy, NAMED, TOO_LONG).status_code == 400
        proxy.engine.hurry.set()
        assert served.result().status_code == 200
    assert ask(proxy, NAMED, TOO_LONG).status_code == 400
    [episode] = episodes(proxy)
    assert episode["turns"] == 1 and episode["status"] == "open"
    # The limit that the refused call reached is known, although the store had no episode yet.
    assert proxy.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "truncated"


@pytest.mark.parametrize("durability", ["turn", "batched"])
def test_a_store_that_refuses_the_first_turn_has_no_episode(
    renderer: ChatRenderer, tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode and its first turn are one transaction, whatever the durability."""

    def fail(connection: object, row: object, *, owner: object) -> None:
        raise StoreError("the disk is full")

    with running_proxy(tmp_path / "s.db", ObservedEngine(renderer), durability=durability) as proxy:
        with monkeypatch.context() as broken:
            broken.setattr("areal_agents.store.episodes.insert_turn", fail)
            assert ask(proxy).status_code == 503
            assert episodes(proxy) == [] and open_in_memory(proxy) == 0
        assert ask(proxy, RETRIED).status_code == 200
        assert [item["turns"] for item in episodes(proxy)] == [1]
