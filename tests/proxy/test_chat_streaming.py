"""In every dialect, the pieces of a stream add up to the whole response and to the recorded turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agents_support import AGENTS, Agent, ChatAgent, GeminiAgent, MessagesAgent, Reply, ResponsesAgent
from google.genai import errors as google_errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine, check_invariant

from areal_agents.core.completion import Completion
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.proxy.calls import routes
from areal_agents.rendering import ChatRenderer

STEADY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(STEADY, max_examples=800)
USER = {"role": "user", "content": "Where is Lyon?"}
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "completions": ("/v1/completions", {"prompt": "Where?", "max_tokens": 99}),
    "responses": ("/v1/responses", {"input": "Where?"}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 99}),
    "gemini": (
        "/v1beta/models/p:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "Where?"}]}]},
    ),
}
DIALECTS = sorted(PATHS)
KINDS: list[type[Agent]] = [AGENTS[name] for name in DIALECTS]

fragments = st.sampled_from(
    [
        "plain ", "  ", "\n\n", "x", "naïve ", "日本", "\U0001f600", "<", "</", "<th", "ink>", "STO", "STOP",
        "OPST", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "<tool_call>", "</tool_call>", "<tool_",
        "call>\n", tool_call(query="Lyon"), tool_call(query="日\U0001f600\"", n=2.0), '{"name": "search"',
        "}", "<|im_end|>",
        '<tool_call>\n{"name": "search", "arguments": 7}\n</tool_call>', "<tool_call>\n[]\n</tool_call>",
    ]
)  # fmt: skip
texts = st.lists(fragments, max_size=6).map("".join)
stops = st.none() | st.sampled_from([["STOP"], ["STOP", "TO"], ["\n"], ["OP", "STOP", "n"], ["日本"], ["<"]])


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("streaming") / "store.db"
    with running_proxy(path, ObservedEngine(renderer), keepalive_s=0.03) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def patient(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A proxy that sends no keep-alive events, however long a response takes."""
    path: Path = tmp_path_factory.mktemp("patient") / "store.db"
    with running_proxy(path, ObservedEngine(renderer), keepalive_s=600) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: RunningProxy) -> RunningProxy:
    running.engine.reset()
    return running


def as_compared(replies: list[Reply]) -> list[Any]:
    """Return the contents of replies without their ids, which differ in every call."""
    return [
        (reply.content, reply.reasoning, [(c.name, c.arguments) for c in reply.calls], reply.finish)
        for reply in replies
    ]


def compare(proxy: RunningProxy, kind: type[Agent], text: str, cut: int | None, stop: Any, n: int) -> None:
    """Make a call whole and then streamed, with the same sampled ids, and compare the replies and turns."""
    engine = proxy.engine
    engine.reset()
    ids = [*engine.renderer.tokenizer.encode(text), *engine.renderer.stop_token_ids[:1]]
    # A prefix of the ids, which may end in the middle of a character, a marker or a call.
    ids = ids[: max(cut, 1)] if cut is not None else ids
    reason: Any = "stop" if cut is None else "length"
    engine.script = lambda call: Completion(ids, [-0.25] * len(ids), [3] * len(ids), reason)
    episode = proxy.open_episode(split="eval")
    agent = kind(proxy, episode, "Where?")
    options = {name: value for name, value in (("stop", stop), ("n", n if agent.many else None)) if value}
    whole = agent.ask(**options)
    streamed = agent.ask(streamed=True, **options)
    agent.close()
    assert as_compared(streamed) == as_compared(whole)
    assert len(whole) == (n if agent.many else 1)
    if stop:
        assert not any(word in reply.content for reply in whole for word in stop)
    turns = proxy.store.load_episode(episode["id"]).turns
    first, second = turns[: len(whole)], turns[len(whole) :]
    for one, other in zip(first, second, strict=True):
        assert one.completion.token_ids.tolist() == other.completion.token_ids.tolist() == ids
        assert (one.reply.content, one.reply.reasoning) == (other.reply.content, other.reply.reasoning)
        assert one.sampling == other.sampling
    check_invariant(proxy.store, episode["id"], engine.calls, agent.received)


@STEADY
@given(
    kind=st.sampled_from(KINDS),
    text=texts,
    cut=st.none() | st.integers(1, 30),
    stop=stops,
    n=st.sampled_from([1, 1, 2]),
)
def test_the_pieces_of_a_stream_add_up_to_the_whole_response(
    running: RunningProxy, kind: type[Agent], text: str, cut: int | None, stop: Any, n: int
) -> None:
    compare(running, kind, text, cut, stop, n)


@pytest.mark.slow
@LONG
@given(
    kind=st.sampled_from(KINDS),
    text=texts,
    cut=st.none() | st.integers(1, 60),
    stop=stops,
    n=st.sampled_from([1, 1, 2]),
)
def test_the_pieces_of_very_many_streams_add_up(
    running: RunningProxy, kind: type[Agent], text: str, cut: int | None, stop: Any, n: int
) -> None:
    compare(running, kind, text, cut, stop, n)


@pytest.mark.parametrize(
    "reply",
    [
        "In France.",
        "",
        "<think>\nhm\n</think>\n\nLet me look.\n" + tool_call(query="Lyon") + "\n" + tool_call(query="日本"),
        "<think>\nnever closed",
    ],
)
def test_the_stream_helper_of_the_openai_client_accumulates_the_whole_reply(
    proxy: RunningProxy, reply: str
) -> None:
    proxy.engine.script = lambda call: reply
    with proxy.openai(proxy.open_episode()) as client:
        body: dict[str, Any] = {"model": "p", "messages": [USER], "tools": [SEARCH]}
        whole = client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion().choices[0]
    assert (final.message.content or "") == (whole.message.content or "")
    assert final.finish_reason == whole.finish_reason
    found, expected = (
        [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        for message in (final.message, whole.message)
    )
    assert found == expected


def test_a_chat_stream_has_a_role_a_finish_reason_a_usage_and_an_end(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "<think>\nhm\n</think>\n\nLet me look.\n" + tool_call(query="Lyon")
    episode = proxy.open_episode()
    body = {"messages": [USER], "tools": [SEARCH], "stream": True, "stream_options": {"include_usage": True}}
    path = f"/e/{episode['key']}/v1/chat/completions"
    with proxy.http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    [call] = proxy.engine.calls
    assert {chunk["id"] for chunk in chunks} == {call.rid}
    *others, usage = chunks
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == len(call.input_ids)
    assert usage["usage"]["completion_tokens"] == len(call.completion)
    deltas = [chunk["choices"][0]["delta"] for chunk in others]
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    assert [c["choices"][0]["finish_reason"] for c in others] == [None] * (len(others) - 1) + ["tool_calls"]
    assert not any(delta.get("content") and delta.get("tool_calls") for delta in deltas)
    assert all(chunk.get("usage") is None for chunk in others)
    assert len([delta for delta in deltas if delta.get("content")]) > 1  # it came in pieces
    # Without the option there is no usage chunk, because some clients fail on a chunk without choices.
    del body["stream_options"]
    text = proxy.http.post(path, json=body).text
    assert '"choices":[]' not in text and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pieces_are_sent_while_the_engine_is_still_sampling(proxy: RunningProxy, dialect: str) -> None:
    """The first piece and keep-alive events reach the client before the reply is complete."""
    path, body = PATHS[dialect]
    proxy.engine.script = lambda call: "one two three four five six seven €"
    proxy.engine.hold_after = 3
    episode = proxy.open_episode()
    seen, alive = "", 0
    with proxy.http.stream("POST", f"/e/{episode['key']}{path}", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        while "one" not in seen or alive < 3:  # a stream of the Messages API begins with one ping
            line = next(lines)
            seen += line
            alive += line.startswith(":") or line == "event: ping" or (dialect == "gemini" and not line)
        assert len(proxy.engine.calls) == 1 and proxy.engine.cancelled == []
        assert proxy.tokens(episode)["turns"] == [] and "€" not in seen
        proxy.engine.go_on.set()
        rest = "".join(lines)
    assert "€" in rest
    assert len(proxy.tokens(episode)["turns"]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_clients_ignore_keep_alive_events(
    proxy: RunningProxy, kind: type[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers only after the proxy has sent keep-alive events."""
    proxy.engine.script = lambda call: "In France."
    proxy.engine.delay_s = 60
    events_of = routes.events_of

    async def watched(*given: Any) -> AsyncIterator[bytes]:
        sent, dialect = 0, given[3]
        async for part in events_of(*given):
            yield part
            sent += part == dialect.keepalive
            if sent == 2:
                proxy.engine.hurry.set()

    monkeypatch.setattr(routes, "events_of", watched)
    episode = proxy.open_episode()
    agent = kind(proxy, episode, "Where?")
    [reply] = agent.ask(streamed=True)
    agent.close()
    assert proxy.engine.hurry.is_set()
    assert reply.content == "In France." and [reply.turn_id] == [
        turn["id"] for turn in proxy.tokens(episode)["turns"]
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("failure", "status"),
    [(EngineUnavailable("away"), 503), (EngineError("garbage"), 502), (RuntimeError("a secret bug"), 500)],
)
def test_a_failure_before_the_first_piece_is_an_ordinary_error(
    patient: RunningProxy, dialect: str, failure: Exception, status: int
) -> None:
    proxy, (path, body) = patient, PATHS[dialect]
    proxy.engine.script = lambda call: failure
    episode = proxy.open_episode()
    response = proxy.http.post(f"/e/{episode['key']}{path}", json={**body, "stream": True})
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (response.json().get("type") == "error") == (dialect == "messages")
    assert error["message"] and "secret" not in response.text and "Traceback" not in response.text


def consume(agent: Agent) -> list[Any]:
    """Return the raw events of a streamed call with the SDK."""
    if isinstance(agent, MessagesAgent):
        return list(agent.client.messages.create(stream=True, **agent.body({})))
    if isinstance(agent, ResponsesAgent):
        return list(agent.client.responses.create(stream=True, **agent.body({})))
    if isinstance(agent, GeminiAgent):
        return list(agent.client.models.generate_content_stream(**agent.call({}, {})))
    make = agent.client.chat if isinstance(agent, ChatAgent) else agent.client
    return list(make.completions.create(stream=True, **agent.body({})))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["engine", "bug", "sealed"])
def test_a_failure_in_mid_stream_is_an_event_that_the_sdk_raises(
    proxy: RunningProxy, kind: type[Agent], how: str
) -> None:
    """The engine becomes unavailable, a bug occurs, or the episode ends while the reply is streamed."""
    proxy.engine.script = lambda call: "one two three four five six seven eight"
    episode = proxy.open_episode()
    agent = kind(proxy, episode, "Where?")
    if how == "sealed":
        proxy.engine.hold_after = 3
    else:
        proxy.engine.fail_after = 3
        proxy.engine.failure = EngineUnavailable("away") if how == "engine" else RuntimeError("a secret bug")
    raised: tuple[type[Exception], ...] = (openai.APIError, anthropic.APIError, google_errors.APIError)
    text = ""
    if how == "sealed":
        path, body = PATHS[agent.dialect]
        with proxy.http.stream(
            "POST", f"/e/{episode['key']}{path}", json={**body, "stream": True}
        ) as response:
            lines = response.iter_lines()
            while "one" not in text:
                text += next(lines)
            assert proxy.http.post(f"/episodes/{episode['id']}/finish", json={}).status_code == 200
            text += "\n".join(lines)
        assert "finished" in text and "takes no more model calls" in text
        assert proxy.engine.cancelled == [proxy.engine.calls[0].rid]
        with pytest.raises(raised) as refused:
            agent.ask()
        assert 409 in (getattr(refused.value, "status_code", None), getattr(refused.value, "code", None))
    elif isinstance(agent, ResponsesAgent):
        events = consume(agent)  # this API has an event for errors
        assert events[-1].type == "response.failed" and "secret" not in events[-1].to_json()
    else:
        with pytest.raises(raised) as caught:
            consume(agent)
        assert "secret" not in str(caught.value) and "Traceback" not in str(caught.value)
    agent.close()
    assert proxy.tokens(episode)["turns"] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_failure_after_keep_alive_events_ends_the_stream_with_an_error(
    proxy: RunningProxy, dialect: str
) -> None:
    """The response has begun, although without content, so the error can only be an event."""
    path, body = PATHS[dialect]
    proxy.engine.delay_s = 30
    proxy.engine.script = lambda call: EngineUnavailable("away")
    with proxy.http.stream(
        "POST", f"/e/{proxy.open_episode()['key']}{path}", json={**body, "stream": True}
    ) as response:
        assert response.status_code == 200
        proxy.engine.hurry.set()
        assert "the model is not available" in "".join(response.iter_text())
