"""Whatever a client sends, the answer is a success or a clear refusal in its own API's form: never a 500."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents_support import MESSAGES_SEARCH, RESPONSES_SEARCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine

from areal_agents.rendering import ChatRenderer

pytestmark = pytest.mark.filterwarnings("error:Pydantic serializer warnings")
# The same examples in every run: a failure is a change of the code, never of the dice.
STEADY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(STEADY, max_examples=1500)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "\0", "<|im_end|>", "<tool_call>", "{", "é\U0001f600", "areal-" + "0" * 24, "auto"]
    )
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
functions = st.fixed_dictionaries({}, optional={"name": st.just("search") | anything, "arguments": anything})
calls = st.fixed_dictionaries(
    {}, optional={"id": anything, "type": anything, "function": functions | anything}
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | anything},
    optional={
        "content": st.text(max_size=9)
        | st.lists(st.fixed_dictionaries({"text": anything}), max_size=2)
        | anything,
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
        "name": anything,
    },
)
CHAT_FIELDS = [
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias", "seed", "stop",
    "max_tokens", "n", "stream", "tool_choice", "parallel_tool_calls", "logprobs", "prompt_cache_key",
    "response_format",
]  # fmt: skip
tools = st.just([SEARCH]) | st.lists(st.fixed_dictionaries({"function": functions}), max_size=2) | anything
chat_bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=4) | anything},
    optional={**dict.fromkeys(CHAT_FIELDS, anything), "tools": tools},
)
episode_bodies = st.fixed_dictionaries(
    {},
    optional={
        "task": st.fixed_dictionaries({"id": st.text(max_size=3)}, optional={"input": anything}) | anything,
        "group": st.sampled_from(["a", "b/c@0"]) | anything,
        "group_size": st.integers(1, 3) | anything,
        "surplus": st.integers(0, 2) | anything,
        "index": st.integers(-1, 3) | anything,
        "split": st.sampled_from(["train", "eval"]) | anything,
        "metadata": anything,
        "limits": st.dictionaries(st.sampled_from(["max_turns", "max_tokens", "time_s", "x"]), anything)
        | anything,
        "sampling": st.dictionaries(st.sampled_from(["temperature", "top_p", "seed", "x"]), anything)
        | anything,
    },
)
reward_bodies = st.fixed_dictionaries(
    {},
    optional={
        "reward": st.floats() | st.dictionaries(st.text(max_size=3), anything, max_size=2) | anything,
        "completion_id": anything,
        "name": anything,
        "scope": st.sampled_from(["episode", "turn", "branch"]) | anything,
    },
)

items = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
             "custom_tool_call_output", "item_reference", "configuration_update"]
        )
        | anything
    },
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]) | anything,
        "content": st.text(max_size=9)
        | st.lists(st.fixed_dictionaries({"text": anything}), max_size=2)
        | anything,
        "id": st.sampled_from(["msg_" + "0" * 24, "rs_" + "a" * 24, "fc_" + "0" * 24 + "_9"]) | anything,
        "call_id": st.text(max_size=3) | anything,
        "name": st.just("search") | anything,
        "arguments": st.just("{}") | anything,
        "input": anything,
        "output": st.text(max_size=3) | anything,
        "summary": st.lists(st.fixed_dictionaries({"text": anything}), max_size=2) | anything,
        "encrypted_content": anything,
    },
)  # fmt: skip
RESPONSES_FIELDS = [
    "model", "instructions", "temperature", "top_p", "max_output_tokens", "previous_response_id", "stream",
    "tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "metadata", "store", "top_logprobs",
    "truncation", "conversation", "background", "n", "stop", "seed", "user", "chat_template_kwargs",
]  # fmt: skip
responses_bodies = st.fixed_dictionaries(
    {"input": st.lists(items, max_size=4) | st.text(max_size=5) | anything},
    optional={
        **dict.fromkeys(RESPONSES_FIELDS, anything),
        "stream": st.booleans() | anything,
        "text": st.fixed_dictionaries(
            {"format": st.fixed_dictionaries({"type": anything, "schema": anything})}
        )
        | anything,
        "tools": st.just([RESPONSES_SEARCH])
        | st.lists(st.fixed_dictionaries({"type": anything}), max_size=2)
        | anything,
    },
)
blocks = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])
        | anything
    },
    optional={
        "text": st.text(max_size=5) | anything,
        "thinking": st.text(max_size=5) | anything,
        "signature": anything,
        "data": anything,
        "id": st.text(max_size=3) | anything,
        "name": st.just("search") | anything,
        "input": anything,
        "tool_use_id": st.text(max_size=3) | anything,
        "content": st.text(max_size=5) | anything,
        "cache_control": anything,
    },
)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | anything},
    optional={"content": st.text(max_size=9) | st.lists(blocks, max_size=3) | anything, "id": anything},
)
MESSAGES_FIELDS = [
    "model", "temperature", "top_p", "top_k", "stop_sequences", "thinking", "tool_choice", "metadata",
    "service_tier", "output_config", "context_management", "container", "mcp_servers",
]  # fmt: skip
messages_bodies = st.fixed_dictionaries(
    {"messages": st.lists(turns, max_size=4) | anything, "max_tokens": st.integers(1, 30) | anything},
    optional={
        **dict.fromkeys(MESSAGES_FIELDS, anything),
        "stream": st.booleans() | anything,
        "system": st.text(max_size=5) | st.lists(blocks, max_size=2) | anything,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])})
        | anything,
        "tools": st.just([MESSAGES_SEARCH]) | st.lists(blocks, max_size=2) | anything,
    },
)
COMPLETIONS_FIELDS = [
    "model", "max_tokens", "temperature", "top_p", "n", "logprobs", "stop", "seed", "echo", "suffix",
    "best_of", "user", "logit_bias", "stream_options",
]  # fmt: skip
completions_bodies = st.fixed_dictionaries(
    {"prompt": st.text(max_size=9) | st.lists(st.integers(-3, 300), max_size=4) | anything},
    optional={**dict.fromkeys(COMPLETIONS_FIELDS, anything), "stream": st.booleans() | anything},
)
BODIES: dict[str, st.SearchStrategy[Any]] = {
    "/v1/chat/completions": chat_bodies,
    "/v1/completions": completions_bodies,
    "/v1/responses": responses_bodies,
    "/v1/messages": messages_bodies,
    "/v1/messages?beta=true": messages_bodies,
    "/v1/messages/count_tokens": messages_bodies,
    "/v1/embeddings": anything,
}
model_calls = st.sampled_from(sorted(BODIES)).flatmap(lambda path: st.tuples(st.just(path), BODIES[path]))
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12).filter(
    lambda value: value == value.strip()
)
odd_headers = st.dictionaries(
    st.sampled_from(
        ["authorization", "x-api-key", "x-stainless-retry-count", "idempotency-key", "x-episode-label",
         "session-id", "x-claude-code-agent-id", "content-type", "accept", "anthropic-version", "user-agent",
         "x-forwarded-proto", "x-forwarded-host", "connection", "content-encoding", "origin", "cookie"]
    ),
    header_values
    | st.sampled_from(["Bearer", "Bearer ep-x", "Basic eA==", "upgrade", "gzip", "9", "x" * 300]),
    max_size=3,
)  # fmt: skip
odd_paths = st.one_of(
    st.sampled_from(
        ["/", "/v1", "/v1/", "/e", "/e/", "/e//v1/messages", "/e/x/v1", "/v1/messages/",
         "/v1/messages/batches",
         "/v1/responses/resp_1", "/episodes/", "/episodes/x/y", "/groups//drop", "/groups/a/b/drop",
         "/metrics",
         "/health", "/ready", "/rewards", "/v1/models/a/b", "/v1/models/", "//v1/models", "/v1/../episodes",
         "/e/%00/v1/chat/completions", "/e/%ff%fe/v1/messages", "/episodes/%00",
         "/episodes?split=%00&status=x"]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=10).map(
        lambda text: "/" + text.replace("#", "").replace("?", "").replace("%", "")
    ),
    st.sampled_from(sorted(BODIES)),
)  # fmt: skip
methods = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW"])


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("fuzz") / "store.db"
    with running_proxy(path, ObservedEngine(renderer)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A bug is logged with its trace, whatever became of its answer."""
    yield
    bugs = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not bugs, bugs[0].getMessage()


def check(response: httpx.Response, sent: Any) -> None:
    """A success, or a refusal in the form of the API that the path belongs to; no trace of the inside."""
    text = response.text
    assert response.status_code < 500 or response.status_code == 501, (sent, text)
    for leak in ("Traceback", 'File "', "internal_error", "site-packages", "the proxy failed"):
        assert leak not in text, (sent, text)
    if response.status_code < 400 or response.request.method == "HEAD" or response.status_code == 426:
        return
    data = response.json()
    if "/v1/messages" in response.request.url.path:
        assert set(data) == {"type", "error"} and set(data["error"]) == {"type", "message"}, (sent, text)
    else:
        assert set(data["error"]) == {"message", "type", "param", "code"}, (sent, text)


def answer(proxy: RunningProxy, path: str, body: Any) -> dict[str, Any]:
    """The answer, which must be a success or a refusal."""
    response = proxy.http.post(path, content=json.dumps(body))
    check(response, body)
    data: dict[str, Any] = response.json()
    return data


def call_model(proxy: RunningProxy, path: str, body: Any) -> None:
    """The call in an episode of its own, twice as a retry would, and without one."""
    proxy.engine.reset()
    proxy.engine.script = lambda call: "<think>\nhm\n</think>\n\nLet me look. " + tool_call(query="x")
    episode = proxy.open_episode(split="eval")
    content = json.dumps(body)
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        check(proxy.http.post(f"/e/{episode['key']}{path}", content=content, headers=headers), body)
    check(proxy.http.post(path, content=content), body)


@STEADY
@given(model_calls)
def test_model_requests(running: RunningProxy, call: tuple[str, Any]) -> None:
    call_model(running, *call)


@pytest.mark.slow
@LONG
@given(model_calls)
def test_very_many_model_requests(running: RunningProxy, call: tuple[str, Any]) -> None:
    call_model(running, *call)


@STEADY
@given(episode_bodies, st.lists(reward_bodies, max_size=2), anything)
def test_control_requests(running: RunningProxy, body: Any, rewards: list[Any], junk: Any) -> None:
    running.engine.reset()
    opened = answer(running, "/episodes", body)
    if "id" not in opened:
        return
    for reward in rewards:
        answer(running, f"/episodes/{opened['id']}/reward", reward)
        answer(running, "/rewards", reward)
    key_call = {"messages": [{"role": "user", "content": "x"}]}
    answer(running, f"/e/{opened['key']}/v1/chat/completions", key_call)
    answer(running, f"/episodes/{opened['id']}/fail", {"error": junk, "aborted": junk})
    answer(running, f"/episodes/{opened['id']}/finish", {"rewards": junk})
    assert running.http.get(f"/episodes/{opened['id']}").status_code == 200


@STEADY
@given(methods, odd_paths, odd_headers, st.binary(max_size=20) | st.just(b'{"messages": []}'))
def test_odd_requests(
    running: RunningProxy, method: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    running.engine.reset()
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    url = httpx.URL(running.url).copy_with(raw_path=path.encode())
    request = httpx.Request(method, url, headers=raw, content=body)
    try:
        response = running.http.send(request)
    except httpx.LocalProtocolError:  # the client itself refuses to send it
        return
    if "invalid http request" not in response.text.lower():  # what is no HTTP is not answered by the proxy
        check(response, (method, path, headers, body))


@STEADY
@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode("utf-16")))
def test_bodies_that_are_no_json(running: RunningProxy, body: bytes) -> None:
    for path in BODIES:
        check(running.http.post(path, content=body), body)
