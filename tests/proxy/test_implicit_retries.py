"""Retried and refused calls without an episode key: one sample each, and no episode without a turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import until
from relay_support import relay_to
from scripted_sampler import ScriptedSampler

from areal_agents.errors import EngineUnavailable
from areal_agents.rendering import ChatRenderer

USER = {"role": "user", "content": "Where is Lyon?"}
RETRIED = {"x-stainless-retry-count": "1"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Where is Lyon?"},
    "/v1/responses": {"input": "Where is Lyon?"},
    "/v1/messages": {"messages": [USER], "max_tokens": 64},
    "/v1beta/models/x:generateContent": {"contents": [{"parts": [{"text": "Where is Lyon?"}]}]},
}


@pytest.fixture
def fresh(renderer: ChatRenderer, tmp_path: Path) -> Iterator[RunningProxy]:
    """A proxy whose samples are all different."""
    samples = iter(range(999))
    engine = ScriptedSampler(renderer, script=lambda call: f"sample {next(samples)}")
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        yield proxy


def implicit_episodes(proxy: RunningProxy) -> list[dict[str, Any]]:
    return proxy.http.get("/episodes").json()["episodes"]


def ask(proxy: RunningProxy, path: str = "/v1/chat/completions", **headers: str) -> str:
    response = proxy.http.post(path, json=BODIES[path], headers=headers)
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("headers", [RETRIED, {"idempotency-key": "k"}], ids=["count", "key"])
def test_a_repeated_first_call_gets_its_sample(
    fresh: RunningProxy, path: str, headers: dict[str, str]
) -> None:
    first = ask(fresh, path, **({} if headers is RETRIED else headers))
    again = ask(fresh, path, **headers)
    assert len(fresh.engine.calls) == 1 and "sample 0" in first and "sample 0" in again
    (episode,) = implicit_episodes(fresh)
    assert episode["turns"] == 1
    assert "sample 1" in ask(fresh, path)  # not a retry, so it is a call of another agent
    assert len(implicit_episodes(fresh)) == 2


def test_a_repeated_first_call_gets_its_sample_after_a_restart(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    answers = set()
    for headers in ({}, RETRIED):
        engine = ScriptedSampler(renderer, script=lambda call: "the sample")
        with running_proxy(tmp_path / "s.db", engine) as proxy:
            answers.add(httpx.Response(200, text=ask(proxy, **headers)).json()["id"])
            assert len(implicit_episodes(proxy)) == 1
    assert len(answers) == 1


def test_idempotency_keys_distinguish_equal_first_calls(fresh: RunningProxy) -> None:
    answers = [ask(fresh, **{"idempotency-key": f"k{i}"}) for i in range(4)]
    again = [ask(fresh, **{"idempotency-key": f"k{i}", **RETRIED}) for i in range(4)]
    assert [f"sample {i}" in text for i, text in enumerate(answers)] == [True] * 4
    assert [f"sample {i}" in text for i, text in enumerate(again)] == [True] * 4
    assert len(fresh.engine.calls) == 4 == len(implicit_episodes(fresh))


def test_a_retry_gets_the_reply_that_no_call_continues(renderer: ChatRenderer, tmp_path: Path) -> None:
    samples = iter(range(99))
    engine = ScriptedSampler(renderer, script=lambda call: tool_call(query=f"sample {next(samples)}"))
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        client = proxy.openai()
        lost, continued = (
            client.chat.completions.create(model="p", messages=[USER], tools=[SEARCH]) for _ in range(2)
        )
        message = continued.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "r"}
        client.chat.completions.create(model="p", messages=[USER, message, result], tools=[SEARCH])
        again = client.chat.completions.create(
            model="p", messages=[USER], tools=[SEARCH], extra_headers=RETRIED
        )
        assert again.id == lost.id
        assert [episode["turns"] for episode in implicit_episodes(proxy)] == [1, 2]


def test_the_openai_client_gets_the_sample_of_a_lost_response(fresh: RunningProxy) -> None:
    with (
        relay_to(fresh.url) as relay,
        openai.OpenAI(base_url=f"{relay.url}/v1", api_key="any", max_retries=3) as client,
    ):
        answer = client.chat.completions.create(model="p", messages=[USER])  # type: ignore[list-item]
    assert relay.retry_counts == ["0", "1"] and len(relay.lost) == 1
    assert answer.choices[0].message.content == "sample 0"
    assert len(fresh.engine.calls) == 1 and len(implicit_episodes(fresh)) == 1


def test_the_anthropic_client_gets_the_sample_of_a_lost_response(fresh: RunningProxy) -> None:
    with (
        relay_to(fresh.url) as relay,
        anthropic.Anthropic(base_url=relay.url, api_key="any", max_retries=3) as client,
    ):
        answer = client.messages.create(model="p", messages=[USER], max_tokens=64)  # type: ignore[list-item]
    assert relay.retry_counts == ["0", "1"] and len(relay.lost) == 1
    assert "sample 0" in answer.model_dump_json()
    assert len(fresh.engine.calls) == 1 and len(implicit_episodes(fresh)) == 1


# --- Refused calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{}, {"session-id": "s"}], ids=["unnamed", "named"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400),
        ({"messages": []}, 400),
        ({"messages": [USER], "n": 10**6}, 400),
        ({"messages": [USER], "tools": [{"type": "function"}]}, 400),
        ({"messages": [USER], "max_tokens": -1}, 400),
    ],
    ids=["too long", "empty", "n", "tools", "max_tokens"],
)
def test_a_refused_call_leaves_no_episode(
    fresh: RunningProxy, named: dict[str, str], body: dict[str, Any], status: int
) -> None:
    for headers in (named, {**named, **RETRIED}):
        assert fresh.http.post("/v1/chat/completions", json=body, headers=headers).status_code == status
        until(lambda: implicit_episodes(fresh) == [])
    ask(fresh, **named)
    assert [episode["turns"] for episode in implicit_episodes(fresh)] == [1]


@pytest.mark.parametrize("named", [{}, {"session-id": "s"}], ids=["unnamed", "named"])
def test_a_call_that_fails_in_the_engine_leaves_no_episode(
    fresh: RunningProxy, named: dict[str, str]
) -> None:
    sampled = fresh.engine.script
    fresh.engine.script = lambda call: EngineUnavailable("gone")
    assert (
        fresh.http.post(
            "/v1/chat/completions", json=BODIES["/v1/chat/completions"], headers=named
        ).status_code
        == 503
    )
    until(lambda: implicit_episodes(fresh) == [])
    fresh.engine.script = sampled
    ask(fresh, **named, **RETRIED)
    (episode,) = implicit_episodes(fresh)
    assert episode["turns"] == 1
    done = fresh.http.post(f"/episodes/{episode['id']}/finish", json={}).json()
    assert done["status"] == "finished"  # the failed call was answered in the end


def test_an_episode_with_a_turn_stays_open_after_a_refused_call(fresh: RunningProxy) -> None:
    ask(fresh, **{"session-id": "s"})
    body = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert fresh.http.post("/v1/chat/completions", json=body, headers={"session-id": "s"}).status_code == 400
    ask(fresh, **{"session-id": "s"})
    assert [episode["turns"] for episode in implicit_episodes(fresh)] == [2]


# --- The end of implicit episodes ------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{}, {"session-id": "s"}], ids=["unnamed", "named"])
def test_an_episode_with_a_retried_call_can_be_finished(fresh: RunningProxy, named: dict[str, str]) -> None:
    for headers in ({}, RETRIED, RETRIED):
        ask(fresh, **named, **headers)
    (episode,) = implicit_episodes(fresh)
    done = fresh.http.post(f"/episodes/{episode['id']}/finish", json={})
    assert done.status_code == 200 and done.json()["status"] == "finished"
    ask(fresh, **named, **RETRIED)  # a retry of a call of an ended episode opens a new one
    assert [e["status"] for e in implicit_episodes(fresh)] == ["finished", "open"]
