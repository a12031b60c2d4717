"""Access and limits in every dialect; calls of other models are passed on and never recorded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx
import openai
import pytest
import uvicorn
from agents_support import AGENTS
from anthropic import Anthropic
from google.genai import errors as google_errors
from openai import OpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy
from record_support import ObservedEngine, burst, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_agents.rendering import ChatRenderer
from areal_agents.sockets import listen, url_of

USER = {"role": "user", "content": "Where is Lyon?"}
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "completions": ("/v1/completions", {"prompt": "Where?"}),
    "responses": ("/v1/responses", {"input": "Where?"}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
    "gemini": ("/v1beta/models/x:generateContent", {"contents": "Where?"}),
    "counting": ("/v1/messages/count_tokens", {"messages": [USER]}),
}
CALLS = [name for name in PATHS if name != "counting"]


def refused(response: httpx.Response, dialect: str, status: int, kind: str) -> str:
    """Check the form of an error, and return its message. `kind` is the code, or Anthropic's type."""
    assert response.status_code == status, response.text
    data = response.json()
    assert "Traceback" not in response.text and 'File "' not in response.text
    if dialect in ("messages", "counting"):
        assert set(data) == {"type", "error"} and data["type"] == "error"
        assert set(data["error"]) == {"type", "message"} and data["error"]["type"] == kind
    elif dialect == "gemini":
        assert set(data["error"]) == {"code", "message", "status", "details"}
        assert data["error"]["details"][0]["reason"] == kind.upper()
    else:
        assert set(data["error"]) == {"message", "type", "param", "code"} and data["error"]["code"] == kind
    message: str = data["error"]["message"]
    return message


# --- Keys -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("security") / "s.db"
    keys: dict[str, Any] = {"admin_key": "admin-secret", "project_keys": ("project-secret",)}
    headers = {"authorization": "Bearer admin-secret"}
    with running_proxy(path, ObservedEngine(renderer), headers=headers, **keys) as running:
        yield running


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_gives_access_to_its_episode_and_no_other(
    guarded: RunningProxy, dialect: str, header: str
) -> None:
    mine, other = guarded.open_episode(), guarded.open_episode()
    path, body = PATHS[dialect]

    def send(path: str, key: str | None) -> httpx.Response:
        value = f"Bearer {key}" if header == "authorization" else str(key)
        headers = {header: value.encode()} if key else {}
        return httpx.post(f"{guarded.url}{path}", json=body, headers=headers, timeout=60)

    in_mine = f"/e/{mine['key']}{path}"
    for allowed in (send(path, mine["key"]), send(in_mine, mine["key"]), send(in_mine, None)):
        assert allowed.status_code == 200, allowed.text
    wrong = "authentication_error" if dialect in ("messages", "counting") else "invalid_api_key"
    for denied in (
        send(in_mine, other["key"]),
        send(in_mine, "project-secret"),
        send(in_mine, "ep-wrong"),
        send(in_mine, "é"),
        send(path, "ep-wrong"),
        send(path, "wrong"),
        send(path, None),
        send("/e/ep-wrong" + path, None),
        send(f"/e/{mine['key']}x{path}", mine["key"]),
    ):
        message = refused(denied, dialect, 401, wrong)
        assert mine["key"] not in message and other["key"] not in message
        assert denied.headers["x-should-retry"] == "false"
    expected = 0 if dialect == "counting" else 3
    assert len(guarded.tokens(mine)["turns"]) == expected and guarded.tokens(other)["turns"] == []


def test_the_real_clients_raise_their_authentication_error(guarded: RunningProxy) -> None:
    mine, other = guarded.open_episode(), guarded.open_episode()
    base = f"{guarded.url}/e/{mine['key']}"
    with OpenAI(base_url=f"{base}/v1", api_key=other["key"], max_retries=0) as client:
        for call in (
            lambda: client.chat.completions.create(model="p", messages=[USER]),
            lambda: client.responses.create(model="p", input="x"),
            lambda: client.completions.create(model="p", prompt="x"),
            lambda: client.models.list(),
            lambda: client.embeddings.create(model="p", input="x"),
        ):
            with pytest.raises(openai.AuthenticationError):
                call()
    with (
        Anthropic(base_url=base, api_key=other["key"], max_retries=0) as client_of_other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client_of_other.messages.create(model="p", max_tokens=9, messages=[USER])


def test_an_episode_cannot_read_responses_of_another(guarded: RunningProxy) -> None:
    """Neither a previous_response_id nor a reference to an item nor a handle gives access."""
    mine, other = guarded.open_episode(), guarded.open_episode()
    secret = {"input": "the secret question"}
    theirs = guarded.http.post(f"/e/{other['key']}/v1/responses", json=secret).json()
    path = f"/e/{mine['key']}/v1/responses"
    stolen = guarded.http.post(path, json={"input": "go on", "previous_response_id": theirs["id"]})
    refused(stolen, "responses", 400, "previous_response_not_found")
    item = {"type": "item_reference", "id": theirs["output"][0]["id"]}
    refused(guarded.http.post(path, json={"input": [item]}), "responses", 400, "item_not_found")
    handle = "areal-" + theirs["id"].removeprefix("resp_")
    thinking = {"type": "thinking", "thinking": "hm", "signature": handle}
    history = [USER, {"role": "assistant", "content": [thinking]}, USER]
    guarded.http.post(f"/e/{mine['key']}/v1/messages", json={"messages": history, "max_tokens": 9})
    [turn] = guarded.tokens(mine)["turns"]
    assert turn["parent"] is None and "secret question" not in json.dumps(turn)


def test_implicit_episodes_are_separate_for_each_key(guarded: RunningProxy) -> None:
    """Callers with different keys share no episode, even with the same conversation and session name."""
    body = {"messages": [{"role": "user", "content": "the same words"}]}
    ids = []
    for key in ("project-secret", "admin-secret"):
        headers = {"authorization": f"Bearer {key}", "session-id": "s"}
        answer = httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        ids.append(answer.raise_for_status().json()["id"])
    episodes = guarded.http.get("/episodes").json()["episodes"]
    holders = [
        episode["id"]
        for episode in episodes
        for turn in guarded.http.get(f"/episodes/{episode['id']}", params={"tokens": 1}).json()["turns"]
        if turn["id"] in ids
    ]
    assert len(set(holders)) == 2


# --- Limits ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("limits") / "s.db"
    limits: dict[str, Any] = {"max_body_mb": 0.01, "max_messages": 3, "max_completion_tokens": 20}
    with running_proxy(path, ObservedEngine(renderer), **limits, max_concurrent=1, max_queued=1) as running:
        yield running


TOO_MANY: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER] * 4},
    "responses": {"input": [USER] * 4},
    "messages": {"messages": [USER] * 4, "max_tokens": 9},
    "gemini": {"contents": ["Where?"] * 4},
    "counting": {"messages": [USER] * 4},
}


@pytest.mark.parametrize("dialect", PATHS)
def test_a_body_that_is_too_large_or_malformed_is_refused(limited: RunningProxy, dialect: str) -> None:
    path, body = PATHS[dialect]
    is_messages = dialect in ("messages", "counting")
    large = limited.http.post(path, json={**body, "padding": "x" * 20_000})
    refused(large, dialect, 413, "request_too_large")
    for content in (b"{", b"[]", b"\xff\xfe", b'{"messages": NaN}', b'"text"'):
        kind = "invalid_request_error" if is_messages else None
        answer = limited.http.post(path, content=content)
        code = "not_finite" if b"NaN" in content else "invalid_json"
        refused(answer, dialect, 400, kind or code)
    zipped = limited.http.post(path, content=b"x", headers={"content-encoding": "gzip"})
    refused(zipped, dialect, 415, "invalid_request_error" if is_messages else "unsupported_encoding")


@pytest.mark.parametrize("dialect", TOO_MANY)
def test_a_conversation_with_too_many_messages_is_refused(limited: RunningProxy, dialect: str) -> None:
    answer = limited.http.post(PATHS[dialect][0], json=TOO_MANY[dialect])
    kind = "invalid_request_error" if dialect in ("messages", "counting") else "invalid_value"
    assert "at most 3" in refused(answer, dialect, 400, kind)
    assert limited.engine.calls == []


@pytest.mark.parametrize("dialect", CALLS)
def test_a_completion_is_limited_to_max_completion_tokens(limited: RunningProxy, dialect: str) -> None:
    path, body = PATHS[dialect]

    def limited_to(tokens: int) -> dict[str, Any]:
        if dialect == "gemini":
            return {**body, "generationConfig": {"maxOutputTokens": tokens}}
        return {**body, {"responses": "max_output_tokens"}.get(dialect, "max_tokens"): tokens}

    limited.engine.reset()
    answer = limited.http.post(path, json=limited_to(21))
    assert answer.status_code == 400 and "at most 20 tokens" in answer.text and not limited.engine.calls
    limited.engine.script = lambda call: "word " * 50
    assert limited.http.post(path, json=limited_to(20)).status_code == 200
    if dialect != "messages":  # where max_tokens is required
        assert limited.http.post(path, json=body).status_code == 200
    limits = [call.sampling.max_new_tokens for call in limited.engine.calls]
    assert limits[0] == 20 and all(limit <= 20 for limit in limits)


@pytest.mark.parametrize("dialect", CALLS)
def test_a_full_queue_is_answered_with_429_and_retry_after(limited: RunningProxy, dialect: str) -> None:
    path, body = PATHS[dialect]
    limited.engine.reset()
    limited.engine.delay_s = 30
    requests = [(path, {**body, "stream": index % 2 == 0}) for index in range(4)]
    responses = asyncio.run(burst(limited, requests, refused=2))
    full = [response for response in responses if response.status_code == 429]
    assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
    for response in full:
        refused(response, dialect, 429, "rate_limit_error" if dialect == "messages" else "queue_full")
        assert int(response.headers["retry-after"]) >= 1 and "x-should-retry" not in response.headers
    assert limited.engine.most_running == 1


@pytest.mark.parametrize("dialect", CALLS)
def test_ids_outside_the_vocabulary_never_reach_the_engine(
    renderer: ChatRenderer, tmp_path: Path, dialect: str
) -> None:
    class SmallModel(ObservedEngine):
        async def model_info(self) -> Any:
            info = await super().model_info()
            return type(info)(info.model_path, info.version, 70, info.max_context)

    engine = SmallModel(renderer)
    path, body = PATHS[dialect]
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        answer = proxy.http.post(path, json=body)
        kind = "invalid_request_error" if dialect == "messages" else "token_out_of_vocabulary"
        assert "vocabulary of 70" in refused(answer, dialect, 400, kind)
    assert not engine.calls


@pytest.mark.parametrize("prompt", [[-1], [10**6], [2**31 - 1], [2**63], [1, 2, 10**6]])
def test_prompt_ids_outside_the_vocabulary_are_refused(limited: RunningProxy, prompt: list[int]) -> None:
    limited.engine.reset()
    answer = limited.http.post("/v1/completions", json={"prompt": prompt})
    refused(answer, "completions", 400, answer.json()["error"]["code"])
    assert not limited.engine.calls


@pytest.mark.parametrize("dialect", sorted(AGENTS))
@pytest.mark.parametrize("end", ["finish", "fail"])
def test_a_sealed_episode_accepts_no_calls(guarded: RunningProxy, dialect: str, end: str) -> None:
    guarded.engine.reset()
    episode = guarded.open_episode()
    agent = AGENTS[dialect](guarded, episode, "Where?")
    agent.ask()
    body = {"error": "it gave up"} if end == "fail" else {}
    assert guarded.http.post(f"/episodes/{episode['id']}/{end}", json=body).status_code == 200
    for streamed in (False, True):
        with pytest.raises(
            (openai.ConflictError, anthropic.ConflictError, google_errors.ClientError)
        ) as caught:
            agent.ask(streamed=streamed)
        assert caught.value.response.status_code == 409
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert episode["key"] not in str(caught.value)
    agent.close()
    assert len(guarded.engine.calls) == 1


def test_a_sealed_episode_accepts_no_token_counts_or_embeddings(guarded: RunningProxy) -> None:
    episode = guarded.open_episode()
    guarded.http.post(f"/episodes/{episode['id']}/finish", json={})
    base = f"/e/{episode['key']}/v1"
    answer = guarded.http.post(f"{base}/messages/count_tokens", json={"messages": [USER]})
    refused(answer, "counting", 409, "invalid_request_error")
    refused(guarded.http.post(f"{base}/embeddings", json={"input": "x"}), "chat", 409, "episode_sealed")


# --- Other models ---------------------------------------------------------------------------------------


class Upstream:
    """A small API server for other models; `seen` has the requests that it received."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        paths = ("/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses")
        self.app = Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])
        self.hung_up = False

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((request.url.path, body, dict(request.headers)))
        if body.get("fail"):
            error = {"error": {"message": "slow down", "type": "x", "param": None, "code": "busy"}}
            return JSONResponse(error, status_code=429, headers={"retry-after": "7", "x-secret": "inside"})
        if body.get("stream"):
            return StreamingResponse(self.chunks(body), media_type="text/event-stream")
        if request.url.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return JSONResponse({"object": "list", "model": body["model"], "data": data, "usage": usage})
        message = {"role": "assistant", "content": "I judge."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        fields = {"id": "up-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return JSONResponse({**fields, "choices": [choice]})

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        fields = {"id": "up-2", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        try:
            for index in range(10_000 if body.get("endless") else 3):
                choice = {"index": 0, "delta": {"content": f"{index} "}, "finish_reason": None}
                yield f"data: {json.dumps({**fields, 'choices': [choice]})}\n\n".encode()
                await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.hung_up = True
            raise


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serve an app on a real server, and yield its URL."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(timeout=20)


@pytest.fixture(scope="module")
def passing(
    renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningProxy, Upstream]]:
    upstream = Upstream()
    with ExitStack() as stack:
        url = stack.enter_context(served(upstream.app))
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))  # it does not listen, and keeps others from the port
        models = {
            "judge": {"base_url": f"{url}/v1/", "key": "upstream-secret", "model": "judge-large"},
            "keyless": {"base_url": f"{url}/v1"},
            "away": {"base_url": f"{url_of(unused)}/v1"},
        }
        path = tmp_path_factory.mktemp("upstream") / "s.db"
        proxy = stack.enter_context(running_proxy(path, ObservedEngine(renderer), models=models))
        yield proxy, upstream


@pytest.fixture
def passed(passing: tuple[RunningProxy, Upstream]) -> tuple[RunningProxy, Upstream]:
    proxy, upstream = passing
    proxy.engine.reset()
    upstream.seen.clear()
    upstream.hung_up = False
    return proxy, upstream


def test_another_model_is_passed_on_and_not_recorded(passed: tuple[RunningProxy, Upstream]) -> None:
    proxy, upstream = passed
    episode = proxy.open_episode()
    with proxy.openai(episode) as client:
        extra = {"tools": [SEARCH], "temperature": 0.1, "unknown": [1, {"a": None}]}
        answer = client.chat.completions.create(model="judge", messages=[USER], extra_body=extra)
        assert answer.choices[0].message.content == "I judge." and answer.id == "up-1"
        stream = client.chat.completions.create(model="judge", messages=[USER], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "0 1 2 "
        vector = client.embeddings.create(model="judge", input="x", encoding_format="float")
        assert vector.data[0].embedding == [0.5, -0.5]
        own = client.chat.completions.create(model="policy", messages=[USER])
    (path, body, headers), *_ = upstream.seen
    assert path == "/v1/chat/completions"
    assert body == {"model": "judge-large", "messages": [USER], **extra}
    assert headers["authorization"] == "Bearer upstream-secret"
    assert not any(episode["key"] in value for _, _, each in upstream.seen for value in each.values())
    assert [turn["id"] for turn in proxy.tokens(episode)["turns"]] == [own.id]
    with proxy.openai(episode) as client:
        assert [model.id for model in client.models.list()] == ["policy", "judge", "keyless", "away"]


def test_the_agents_key_is_not_sent_to_an_upstream_without_a_key(
    passed: tuple[RunningProxy, Upstream],
) -> None:
    proxy, upstream = passed
    episode = proxy.open_episode()
    with proxy.openai(episode) as client:
        client.chat.completions.create(model="keyless", messages=[USER])
    [(_, _, headers)] = upstream.seen
    assert "authorization" not in headers and "x-api-key" not in headers


def test_an_error_of_an_upstream_is_passed_on_to_the_client(passed: tuple[RunningProxy, Upstream]) -> None:
    proxy, upstream = passed
    episode = proxy.open_episode()
    with proxy.openai(episode) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="policy", messages=[USER])
        client.chat.completions.create(model="judge", messages=[USER], extra_body={"fail": True})
    assert caught.value.code == "busy" and caught.value.response.headers["retry-after"] == "7"
    assert "x-secret" not in caught.value.response.headers
    # A busy judge is no failure of the policy.
    assert proxy.http.post(f"/episodes/{episode['id']}/finish", json={}).json()["status"] == "finished"


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unreachable_upstream_is_reported_as_unavailable(
    passed: tuple[RunningProxy, Upstream], dialect: str, stream: bool
) -> None:
    proxy, _ = passed
    path, body = PATHS[dialect]
    episode = proxy.open_episode()
    path = path.replace("/x:generate", "/away:streamGenerate" if stream else "/away:generate")
    answer = proxy.http.post(f"/e/{episode['key']}{path}", json={**body, "model": "away", "stream": stream})
    refused(answer, dialect, 503, "overloaded_error" if dialect == "messages" else "engine_unavailable")
    assert proxy.tokens(episode)["turns"] == [] and proxy.engine.calls == []


def test_calls_of_another_model_need_an_open_episode_and_its_key(
    passed: tuple[RunningProxy, Upstream],
) -> None:
    proxy, upstream = passed
    episode = proxy.open_episode()
    proxy.http.post(f"/episodes/{episode['id']}/finish", json={})
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        body = {"model": "judge", "messages": [USER], "input": "x"}
        sealed = proxy.http.post(f"/e/{episode['key']}{path}", json=body)
        refused(sealed, "chat", 409, "episode_sealed")
        refused(proxy.http.post(f"/e/ep-wrong{path}", json=body), "chat", 401, "invalid_api_key")
    assert upstream.seen == []


def test_a_client_that_disconnects_ends_the_stream_of_the_upstream(
    passed: tuple[RunningProxy, Upstream],
) -> None:
    proxy, upstream = passed
    body = {"model": "judge", "messages": [USER], "stream": True, "endless": True}
    with proxy.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    until(lambda: upstream.hung_up)


def test_embeddings_without_an_upstream_are_not_implemented(guarded: RunningProxy) -> None:
    episode = guarded.open_episode()
    answer = guarded.http.post(f"/e/{episode['key']}/v1/embeddings", json={"model": "p", "input": "x"})
    assert "models" in refused(answer, "chat", 501, "not_supported")
    assert answer.headers["x-should-retry"] == "false"
