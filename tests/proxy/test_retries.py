"""A repeated request gets the same sample if it is a retry, and another sample if it is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from agents_support import AGENTS, CompletionsAgent
from openai import AsyncOpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine, check_invariant, until

from areal_agents.algorithms.credit.trained import TrainedTurns
from areal_agents.errors import EngineUnavailable
from areal_agents.rendering import ChatRenderer

USER = {"role": "user", "content": "Where is Lyon?"}
BODY: dict[str, Any] = {"messages": [USER], "tools": [SEARCH]}
RETRIED = {"x-stainless-retry-count": "1"}
ALL = sorted(AGENTS)


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("retries") / "store.db"
    with running_proxy(path, ObservedEngine(renderer), keepalive_s=0.05) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: RunningProxy) -> RunningProxy:
    running.engine.reset()
    return running


def chat_path(episode: dict[str, Any]) -> str:
    return f"/e/{episode['key']}/v1/chat/completions"


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_retry_gets_the_sample_of_the_first_attempt(
    proxy: RunningProxy, dialect: str, streamed: bool
) -> None:
    """Retries are known by the SDKs' retry count or an Idempotency-Key, also in mid-conversation."""
    samples = iter(range(99))
    proxy.engine.script = lambda call: tool_call(query=f"sample {next(samples)}")
    episode = proxy.open_episode()
    agent = AGENTS[dialect](proxy, episode, "Where?")
    for _ in range(2):
        for headers in (RETRIED, {"idempotency-key": f"key {len(agent.history)}"}):
            first = agent.ask(streamed=streamed, headers=headers if "idempotency-key" in headers else None)
            again = agent.ask(streamed=not streamed, headers=headers)
            assert again == first
        [other] = agent.ask(streamed=streamed)
        assert other != first[0]
        agent.take(other)
        agent.results(other, "result")
    agent.close()
    assert len(proxy.engine.calls) == 6 == len(set(agent.received))
    check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received)


@pytest.mark.parametrize("dialect", ALL)
def test_a_client_that_hangs_up_in_mid_stream_leaves_no_trained_turn(
    proxy: RunningProxy, dialect: str
) -> None:
    proxy.engine.script = lambda call: "one two three four five six seven"
    proxy.engine.hold_after = 3
    episode = proxy.open_episode()
    agent = AGENTS[dialect](proxy, episode, "Where?")
    agent.hang_up()
    until(lambda: proxy.engine.cancelled)
    assert proxy.engine.cancelled == [proxy.engine.calls[0].rid] and not proxy.engine.go_on.is_set()
    assert proxy.tokens(episode)["turns"] == []
    proxy.engine.hold_after = None
    [reply] = agent.ask()
    assert reply.content.startswith("one two three") and len(proxy.engine.calls) == 2
    agent.close()
    [turn] = proxy.store.load_episode(episode["id"]).turns
    assert turn.id == reply.turn_id == proxy.engine.calls[1].rid and TrainedTurns().includes(turn)


def test_a_hang_up_before_the_first_piece_cancels_the_generation(proxy: RunningProxy) -> None:
    """The generation is cancelled before anything was sent, and also after keep-alive events alone."""
    for is_alive in (False, True):
        proxy.engine.reset()
        proxy.engine.delay_s = 30
        episode = proxy.open_episode()
        client = HTTPConnection(proxy.url.removeprefix("http://"))
        client.request("POST", chat_path(episode), json.dumps({**BODY, "stream": True}))
        until(lambda: proxy.engine.calls)
        if is_alive:
            client.getresponse().close()
        client.close()
        until(lambda: proxy.engine.cancelled)
        assert proxy.tokens(episode)["turns"] == []


async def test_a_retry_of_a_call_under_way_joins_it_from_its_first_piece(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "one two three four five six seven"
    proxy.engine.hold_after = 2
    episode = proxy.open_episode()
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client:
        create = client.chat.completions.create
        first = await create(model="p", messages=[USER], stream=True)
        retry = await create(model="p", messages=[USER], stream=True, extra_headers=RETRIED)
        await asyncio.to_thread(until, lambda: proxy.engine.calls)
        await first.close()  # the retry still waits for the sample
        proxy.engine.go_on.set()
        chunks = [chunk async for chunk in retry]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        "one two three four five six seven"
    )
    [call] = proxy.engine.calls
    assert {chunk.id for chunk in chunks} == {call.rid} and proxy.engine.cancelled == []
    [turn] = proxy.store.load_episode(episode["id"]).turns
    assert TrainedTurns().includes(turn)


def test_the_sdk_retries_until_the_engine_is_back(proxy: RunningProxy) -> None:
    """A first turn that is sent repeatedly is recorded once, and the episode does not fail."""
    answers: list[Any] = [EngineUnavailable("away"), EngineUnavailable("away"), "ok"]
    proxy.engine.script = lambda call: answers.pop(0)
    episode = proxy.open_episode()
    with proxy.openai(episode, max_retries=3) as client:
        answer = client.chat.completions.create(model="p", messages=[USER])
    assert answer.choices[0].message.content == "ok"
    assert [turn["id"] for turn in proxy.tokens(episode)["turns"]] == [answer.id]
    assert proxy.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "finished"


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "none"},
        {"max_tokens": 3},
        {"stop": ["Lyon"]},
        {"response_format": {"type": "json_object"}},
        {"messages": [USER, USER]},
        {"tools": []},
    ],
)
def test_a_retry_of_a_different_request_gets_another_sample(
    proxy: RunningProxy, change: dict[str, Any]
) -> None:
    """A retry that differs from the first request in any option is not answered with its sample."""
    proxy.engine.script = lambda call: "Let me look. " + tool_call(query="Lyon")
    episode = proxy.open_episode()
    first = proxy.http.post(chat_path(episode), json=BODY).json()
    other = proxy.http.post(chat_path(episode), json=BODY | change, headers=RETRIED)
    assert other.status_code == 200 and other.json()["id"] != first["id"]
    again = proxy.http.post(chat_path(episode), json=BODY | change, headers=RETRIED)
    assert again.json()["id"] == other.json()["id"] and len(proxy.engine.calls) == 2


def test_an_idempotency_key_of_another_request_is_refused(proxy: RunningProxy) -> None:
    episode, other = proxy.open_episode(), proxy.open_episode()
    headers = {"idempotency-key": "k"}
    first = proxy.http.post(chat_path(episode), json=BODY, headers=headers)
    assert proxy.http.post(chat_path(episode), json=BODY, headers=headers).json()["id"] == first.json()["id"]
    refused = proxy.http.post(chat_path(episode), json=BODY | {"max_tokens": 3}, headers=headers)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "idempotency_key_reused"
    # A key names a request of one episode only.
    elsewhere = proxy.http.post(chat_path(other), json=BODY, headers=headers)
    assert elsewhere.status_code == 200 and elsewhere.json()["id"] != first.json()["id"]
    long = proxy.http.post(chat_path(episode), json=BODY, headers={"idempotency-key": "k" * 256})
    assert long.status_code == 400


@pytest.mark.parametrize("count", ["", "0", "-1", "x", "²", "9" * 30, "1.5"])
def test_a_retry_count_that_is_zero_or_invalid_is_no_retry(proxy: RunningProxy, count: str) -> None:
    episode = proxy.open_episode()
    headers = {"x-stainless-retry-count": count.encode()}
    ids = {
        proxy.http.post(chat_path(episode), json=BODY, headers=headers).raise_for_status().json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 2


def test_a_retry_of_several_choices_gets_them_all(proxy: RunningProxy) -> None:
    samples = iter(range(9))
    proxy.engine.script = lambda call: f"sample {next(samples)}"
    episode = proxy.open_episode()
    with proxy.openai(episode) as client:
        ask = client.chat.completions.create
        first = ask(model="p", messages=[USER], n=3)
        again = ask(model="p", messages=[USER], n=3, extra_headers=RETRIED)
    assert [c.message.content for c in again.choices] == [c.message.content for c in first.choices]
    assert len({c.message.content for c in first.choices}) == 3 and len(proxy.engine.calls) == 3


def test_a_retry_under_a_grammar_gets_its_sample(proxy: RunningProxy) -> None:
    """This also holds for a request with its own template options."""
    episode = proxy.open_episode()
    schema = {"name": "city", "schema": {"type": "object"}}
    for change in (
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": False}},
    ):
        body = {"messages": [USER], **change}
        first = proxy.http.post(chat_path(episode), json=body).raise_for_status().json()["id"]
        again = proxy.http.post(chat_path(episode), json=body, headers=RETRIED).json()["id"]
        assert again == first
    assert len(proxy.engine.calls) == 2


def test_a_raw_prompt_continues_after_all_sampled_tokens(proxy: RunningProxy) -> None:
    """A client gets the text up to its stop string, although the tokens of that string were sampled too."""
    text = "look up Lyon\nObservation:"
    proxy.engine.script = lambda call: proxy.engine.renderer.tokenizer.encode(text)
    episode = proxy.open_episode()
    agent = CompletionsAgent(proxy, episode, "Where?")
    [reply] = agent.ask(stop=["Observation:"])
    assert reply.content == "look up Lyon\n"
    agent.take(reply)
    agent.history.append(["Observation: France"])
    agent.ask(stop=["Observation:"])
    agent.close()
    decode = proxy.engine.renderer.tokenizer.decode
    assert decode(proxy.engine.calls[1].input_ids.tolist()) == "".join(agent.items)
    assert check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received) == 1
    # Without the stop string, the prompt does not continue the sampled tokens.
    agent.history[-1] = ["But no."]
    agent.client = proxy.openai(episode)
    agent.ask(stop=["Observation:"])
    agent.close()
    assert decode(proxy.engine.calls[2].input_ids.tolist()) == "".join(agent.items)
    assert check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received) == 1


def test_an_error_that_another_attempt_cannot_change_is_not_retried(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: RuntimeError("a bug")
    with (
        proxy.openai(proxy.open_episode(), max_retries=3) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model="p", messages=[USER])
    assert len(proxy.engine.calls) == 1
