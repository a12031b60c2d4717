"""Every request is answered or clearly refused in the form of its API, and never with status 500."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents_support import GEMINI_SEARCH, MESSAGES_SEARCH, RESPONSES_SEARCH
from grammar_support import (
    BYTE_FAULTS,
    HEADER_FAULTS,
    MODEL_CALLS,
    OTHER_CALLS,
    QUESTIONS,
    Step,
    Talk,
    steps,
    with_fault,
    written,
)
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine

import areal_agents.proxy
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.rendering import ChatRenderer

pytestmark = pytest.mark.filterwarnings("error:Pydantic serializer warnings")
# The examples are the same in every run, so that only a change of the code makes a test fail.
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
google_parts = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=5) | anything,
        "thought": st.booleans() | anything,
        "thoughtSignature": st.just("YXJlYWwtMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw") | anything,
        "functionCall": st.fixed_dictionaries({"name": st.just("search"), "args": anything}) | anything,
        "function_response": st.fixed_dictionaries({"name": st.just("search"), "response": anything})
        | anything,
        "inlineData": anything,
    },
)
google_contents = st.fixed_dictionaries(
    {"parts": st.lists(google_parts, max_size=3) | google_parts | anything},
    optional={"role": st.sampled_from(["user", "model", "function"]) | anything},
)
google_schemas = st.recursive(
    st.sampled_from([{"type": "STRING"}, {"type": "NUMBER", "nullable": True}]) | anything,
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["OBJECT", "ARRAY"])},
        optional={"items": inner, "properties": st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
                  "anyOf": st.lists(inner, max_size=2), "property_ordering": anything, "minItems": anything},
    ),
    max_leaves=4,
)  # fmt: skip
GENERATION_FIELDS = [
    "temperature", "topP", "topK", "candidateCount", "maxOutputTokens", "stopSequences", "seed", "logprobs",
    "responseLogprobs", "responseMimeType", "responseJsonSchema", "responseModalities", "thinkingConfig",
    "presencePenalty", "speechConfig",
]  # fmt: skip
google_bodies = st.fixed_dictionaries(
    {"contents": st.lists(google_contents, max_size=4) | st.text(max_size=5) | anything},
    optional={
        **dict.fromkeys(["model", "stream", "alt", "safetySettings", "cachedContent"], anything),
        "generateContentRequest": anything,
        "system_instruction": google_contents | anything,
        "generationConfig": st.fixed_dictionaries(
            {}, optional={**dict.fromkeys(GENERATION_FIELDS, anything), "responseSchema": google_schemas}
        )
        | anything,
        "tool_config": st.fixed_dictionaries(
            {"functionCallingConfig": st.fixed_dictionaries(
                {"mode": st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED"]) | anything,
                 "allowedFunctionNames": st.just(["search"]) | anything})}
        ),
        "tools": st.just([{"functionDeclarations": [GEMINI_SEARCH]}])
        | st.lists(
            st.fixed_dictionaries(
                {"function_declarations": st.lists(
                    st.fixed_dictionaries({"name": st.just("x") | anything, "parameters": google_schemas}),
                    max_size=2)
                 | anything}
            ),
            max_size=2,
        )
        | anything,
    },
)  # fmt: skip
GOOGLE = "/v1beta/models/x:"
BODIES: dict[str, st.SearchStrategy[Any]] = {
    GOOGLE + "generateContent": google_bodies,
    GOOGLE + "streamGenerateContent": google_bodies,
    GOOGLE + "streamGenerateContent?alt=sse": google_bodies,
    GOOGLE + "countTokens": google_bodies,
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
        ["authorization", "x-api-key", "x-goog-api-key", "x-stainless-retry-count", "idempotency-key",
         "x-episode-label",
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
         "/health", "/ready", "/rewards", "/v1/models/a/b", "/v1/models/", "/v1beta/models/",
         "/v1beta/models/x:y", "/v1beta/x", "/v1/models/:generateContent",
         "/e/v1/v1beta/models/x:countTokens", "/v1beta/models/%00:countTokens",
         "//v1/models", "/v1/../episodes",
         "/e/%00/v1/chat/completions", "/e/%ff%fe/v1/messages", "/episodes/%00",
         "/episodes?split=%00&status=x"]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=10).map(
        lambda text: "/" + text.replace("#", "").replace("?", "").replace("%", "")
    ),
    st.sampled_from(sorted(BODIES)),
)  # fmt: skip
methods = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW"])


FAILING_ENGINE = re.compile(r"POST /\S+: 50[23] (away|broken)$")  # as some steps of the grammar require


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("fuzz") / "store.db"
    with running_proxy(path, ObservedEngine(renderer)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test if the proxy logged a bug, whatever its response was."""
    yield
    bugs = [
        record
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR and not FAILING_ENGINE.search(record.getMessage())
    ]
    assert not bugs, bugs[0].getMessage()


def check(response: httpx.Response, sent: Any) -> None:
    """Check that a response is a success or a refusal in the form of its API, without internal details."""
    text = response.text
    assert response.status_code < 500 or response.status_code == 501, (sent, text)
    for leak in ("Traceback", 'File "', "internal_error", "site-packages", "the proxy failed"):
        assert leak not in text, (sent, text)
    if response.status_code < 400 or response.request.method == "HEAD" or response.status_code == 426:
        return
    data = response.json()
    if "/v1beta/" in response.request.url.path:
        assert set(data["error"]) == {"code", "message", "status", "details"}, (sent, text)
    elif "/v1/messages" in response.request.url.path:
        assert set(data) == {"type", "error"} and set(data["error"]) == {"type", "message"}, (sent, text)
    else:
        assert set(data["error"]) == {"message", "type", "param", "code"}, (sent, text)


def answer(proxy: RunningProxy, path: str, body: Any) -> dict[str, Any]:
    """Send a request, and return the response, which must be a success or a refusal."""
    response = proxy.http.post(path, content=json.dumps(body))
    check(response, body)
    data: dict[str, Any] = response.json()
    return data


def call_model(proxy: RunningProxy, path: str, body: Any) -> None:
    """Make a call in a new episode, again as its retry, and then without an episode."""
    proxy.engine.reset()
    proxy.engine.script = lambda call: "<think>\nhm\n</think>\n\nLet me look. " + tool_call(query="x")
    episode = proxy.open_episode(split="eval")
    content = json.dumps(body)
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        check(proxy.http.post(f"/e/{episode['key']}{path}", content=content, headers=headers), body)
    check(proxy.http.post(path, content=content), body)


@STEADY
@given(model_calls)
def test_model_requests_are_answered_or_refused(running: RunningProxy, call: tuple[str, Any]) -> None:
    call_model(running, *call)


@pytest.mark.slow
@LONG
@given(model_calls)
def test_very_many_model_requests_are_answered_or_refused(
    running: RunningProxy, call: tuple[str, Any]
) -> None:
    call_model(running, *call)


@STEADY
@given(episode_bodies, st.lists(reward_bodies, max_size=2), anything)
def test_control_requests_are_answered_or_refused(
    running: RunningProxy, body: Any, rewards: list[Any], junk: Any
) -> None:
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
def test_odd_requests_are_answered_or_refused(
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
    if "invalid http request" not in response.text.lower():  # invalid HTTP does not reach the proxy
        check(response, (method, path, headers, body))


@STEADY
@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode("utf-16")))
def test_arbitrary_bodies_are_answered_or_refused(running: RunningProxy, body: bytes) -> None:
    for path in BODIES:
        check(running.http.post(path, content=body), body)


# -- the grammar: requests of an agent and of its harness, with faults

ADMIN, PROJECT = "admin-secret", "project-secret"
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
PROXY = Path(areal_agents.proxy.__file__).parent
GRAMMAR = settings(STEADY, max_examples=250)
LONG_GRAMMAR = settings(
    deadline=None, database=None, max_examples=2500, suppress_health_check=list(HealthCheck)
)
ANTHROPIC_ERRORS = {
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
    "request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error",
}  # fmt: skip
WITH_FAILING_ENGINE = {502: {"engine_error", "engine_rejected"}, 503: {"engine_unavailable"}}
REPLIES = ["fine", "", "<think>\nhm\n</think>\n\nLet me look. " + tool_call(query="x"), "a. STOP b"]


def documented_codes() -> set[str]:
    """Return the error codes of docs/protocol.md."""
    table = PROTOCOL.read_text().partition("| status | codes |")[2].partition("\n\n")[0]
    return set(re.findall(r"`([a-z_]+)`", table))


def test_every_error_code_is_documented() -> None:
    sources = "".join(path.read_text() for path in PROXY.rglob("*.py"))
    used = set(re.findall(r'\bcode="([a-z_]+)"', sources))
    assert len(used) > 30 and used <= documented_codes(), used - documented_codes()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Record:
    """Reads the part of the store that no refused call may change."""

    def __init__(self, store: Path) -> None:
        self._connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)

    def close(self) -> None:
        self._connection.close()

    def of_all(self) -> dict[str, tuple[Any, ...]]:
        """Return the row, the turn ids and the rewards of each episode, and the state of each group."""
        ask = self._connection.execute
        found: dict[str, list[Any]] = {
            row[0]: [row]
            for row in ask("SELECT id, group_id, status, error, ended_at, metadata FROM episodes")
        }
        for episode, turn in ask("SELECT episode_id, id FROM turns ORDER BY seq"):
            found[episode].append(turn)
        for row in ask("SELECT episode_id, scope, target, name, value FROM rewards ORDER BY 1, 2, 3, 4"):
            found[row[0]].append(row)
        groups = {
            f"group {row[0]}": row for row in ask("SELECT id, state, reason, size, surplus FROM groups")
        }
        return {episode: tuple(rows) for episode, rows in found.items()} | groups


class Agents:
    """Takes the steps of one example, in an episode with a key, in a named session, and without either."""

    def __init__(self, proxy: RunningProxy, record: Record, tag: str) -> None:
        self.proxy, self.record, self.tag = proxy, record, tag
        self.codes = documented_codes()
        self.outcomes: Counter[str] = Counter()
        self.group = f"group {tag}"
        self.task = {"group": self.group, "group_size": 3, "task": {"id": tag}, "split": "eval"}
        self.episode = proxy.open_episode(**self.task)
        self.is_open = True
        self.talks: dict[tuple[str, str], Talk] = {}
        self.completion = "chatcmpl-" + "0" * 24
        self.implicit = "implicit-none"  # the implicit episode of the latest call

    def take(self, step: Step) -> None:
        """Send one request, and check its response and its effect on the store."""
        failure = EngineUnavailable("away") if step.pieces[0] % 2 else EngineError("broken")
        reply = REPLIES[step.pieces[1] % len(REPLIES)]
        self.proxy.engine.script = lambda call: failure if step.engine_fails else reply
        path, body, headers = self.request(step)
        sound, body = body, json.loads(json.dumps(body))  # a copy, which the faults change
        for fault in step.faults:
            body = with_fault(body, fault)
        content = written(body).encode()
        if step.byte_fault is not None:
            content = BYTE_FAULTS[step.byte_fault](content)
        for name in step.header_faults:
            headers |= HEADER_FAULTS[name]
        before = self.record.of_all()
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        response = self.proxy.http.post(path, content=content, headers=raw)
        sent = (step, path, content[:500], response.text[:500])
        self.check_answer(step, response, sent)
        self.check_record(step, response, before, sent)
        if step.call in MODEL_CALLS and response.status_code == 200 and step.is_valid and not step.streamed:
            self.talks[step.caller, step.call].take(sound, response.json())

    def request(self, step: Step) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Return the path, the valid body and the headers of a step."""
        headers = {"content-type": "application/json"}
        if step.call in MODEL_CALLS or step.call in OTHER_CALLS:
            prefix, headers = self.caller(step, headers)
            if step.call == "embeddings":
                return f"{prefix}/v1/embeddings", {"model": "e", "input": ["x"]}, headers
            name = "messages" if step.call == "count" else step.call
            talk = self.talks.setdefault((step.caller, name), Talk(name))
            body = talk.body(replace(step, streamed=False) if step.call == "count" else step)
            if step.call == "count":
                body = {key: value for key, value in body.items() if key not in ("stream", "max_tokens")}
                return f"{prefix}/v1/messages/count_tokens", body, headers
            return prefix + MODEL_CALLS[step.call], body, headers
        headers["authorization"] = f"Bearer {ADMIN}"
        episode = f"/episodes/{self.episode['id']}"
        value = [1, 0.5, True, {"a": 1, "b": 0}][step.pieces[0] % 4]
        reward = {"reward": value} | ({} if isinstance(value, dict) else {"name": "n"})
        match step.call:
            case "open":
                limits = {
                    "limits": {"max_turns": 3},
                    "metadata": {"a": "b"},
                    "sampling": {"temperature": 0.5},
                }
                return "/episodes", self.task | limits, headers
            case "reward":
                return f"{episode}/reward", reward, headers
            case "rewards":
                return "/rewards", {"completion_id": self.completion, "reward": 1.0}, headers
            case "finish":
                return f"{episode}/finish", {"rewards": [reward], "truncated": False}, headers
            case "end":
                return f"/episodes/{self.implicit}/finish", {}, headers
            case "fail":
                return f"{episode}/fail", {"error": "it crashed", "aborted": False}, headers
            case _:
                return f"/groups/{self.group}/drop", {"reason": "no more"}, headers

    def caller(self, step: Step, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return the prefix of the path, and the headers with those of the caller."""
        if step.caller == "keyed":
            return f"/e/{self.episode['key']}", headers | {"authorization": f"Bearer {self.episode['key']}"}
        session = {"session-id": self.tag} if step.caller == "named" else {}
        return "", headers | {"authorization": f"Bearer {PROJECT}"} | session

    def check_answer(self, step: Step, response: httpx.Response, sent: Any) -> None:
        status, text = response.status_code, response.text
        self.outcomes[f"{'valid' if step.is_valid else 'faulty'} {status // 100}xx"] += 1
        for leak in ("Traceback", 'File "', "site-packages", "the proxy failed"):
            assert leak not in text, sent
        if status == 200:
            if "text/event-stream" in response.headers["content-type"]:
                self.check_stream(step, text, sent)
            return
        data = response.json()
        if "/v1/messages" in response.request.url.path:
            assert set(data) == {"type", "error"} and set(data["error"]) == {"type", "message"}, sent
            assert data["type"] == "error" and data["error"]["type"] in ANTHROPIC_ERRORS, sent
        else:
            assert set(data["error"]) == {"message", "type", "param", "code"}, sent
            code = data["error"]["code"]
            assert code in self.codes and code != "internal_error", sent
            if status >= 500:
                allowed = {501: {"not_supported"}} | (WITH_FAILING_ENGINE if step.engine_fails else {})
                assert code in allowed.get(status, ()), sent
        assert status < 500 or status == 501 or step.engine_fails, sent
        if step.is_valid and step.call in MODEL_CALLS and not step.engine_fails:
            is_sealed = step.caller == "keyed" and not self.is_open
            assert status == 409 if is_sealed else "context length" in text, sent

    def check_stream(self, step: Step, text: str, sent: Any) -> None:
        """Check that every event of a stream is JSON, and that none is an error unless the engine failed."""
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        assert parsed, sent
        has_failed = any("error" in event and event["error"] for event in parsed)
        assert not has_failed or step.engine_fails, sent

    def check_record(
        self, step: Step, response: httpx.Response, before: dict[str, tuple[Any, ...]], sent: Any
    ) -> None:
        """Check that a refused call changed nothing, and that another call changed only its own episode."""
        after = self.record.of_all()
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if response.status_code >= 400 or step.call in OTHER_CALLS:
            assert not changed, sent
            return
        own = {self.episode["id"], f"group {self.group}"}
        if step.call in MODEL_CALLS:
            assert len(changed) <= 1, sent
            for name in changed:
                new = [turn for turn in after[name][1:] if turn not in before.get(name, ())]
                assert new and all(isinstance(turn, str) for turn in new), sent
                self.completion = new[-1]
                self.implicit = self.implicit if step.caller == "keyed" else name
            is_own = changed <= own if step.caller == "keyed" else not changed & own
            assert is_own and all(name in own or name.startswith("implicit-") for name in changed), sent
        elif step.call == "open":
            assert response.json()["id"] in changed and not (changed & before.keys()) - own, sent
        elif step.call == "end":
            assert changed <= {self.implicit}, sent
        elif step.call == "rewards":
            assert all(self.completion in after[name] or name in own for name in changed), sent
        else:
            # Open episodes of a complete group are aborted, and the dropped group is the agents' own.
            assert changed <= own | {name for name in changed if before[name][0][1] == self.group}, sent
        if step.call in ("finish", "fail"):
            self.is_open = False


@dataclass
class Guarded:
    """A proxy with keys, episodes that no step may change, and the number of requests of each outcome."""

    proxy: RunningProxy
    record: Record
    others: list[str]
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: Iterator[int] = field(default_factory=itertools.count)

    def untouched(self) -> list[dict[str, Any]]:
        """Return everything about the other episodes, including the tokens."""
        return [self.proxy.tokens({"id": episode_id}) for episode_id in self.others]

    def play(self, steps: list[Step]) -> None:
        """Take the steps of one example in order, and check that the proxy still serves afterwards."""
        self.proxy.engine.reset()
        before = self.untouched()
        agents = Agents(self.proxy, self.record, f"t{next(self.examples)}")
        for step in steps:
            agents.take(step)
        self.outcomes += agents.outcomes
        assert self.untouched() == before
        self.proxy.engine.reset()
        episode = self.proxy.open_episode()
        said = {"messages": [{"role": "user", "content": "Do you serve?"}]}
        served = self.proxy.http.post(
            f"/e/{episode['key']}/v1/chat/completions", json=said, headers=bearer(episode["key"])
        )
        assert served.json()["choices"][0]["message"]["content"] == "ok"


@pytest.fixture
def guarded(renderer: ChatRenderer, tmp_path: Path) -> Iterator[Guarded]:
    """A proxy with an open episode, a sealed one in a group, and an implicit one, all with turns."""
    keys: dict[str, Any] = {"admin_key": ADMIN, "project_keys": (PROJECT,), "models": {}}
    headers = {"authorization": f"Bearer {ADMIN}"}
    with running_proxy(tmp_path / "s.db", ObservedEngine(renderer), headers=headers, **keys) as proxy:
        question = {"messages": [{"role": "user", "content": QUESTIONS[0]}]}
        opened = [proxy.open_episode(), proxy.open_episode(group="others", group_size=1)]
        for episode in opened:
            path = f"/e/{episode['key']}/v1/chat/completions"
            proxy.http.post(path, json=question, headers=bearer(episode["key"])).raise_for_status()
            rewarded = proxy.http.post(f"/episodes/{episode['id']}/reward", json={"reward": 1})
            rewarded.raise_for_status()
        proxy.http.post(f"/episodes/{opened[1]['id']}/finish").raise_for_status()
        proxy.http.post("/v1/chat/completions", json=question).raise_for_status()
        others = [item["id"] for item in proxy.http.get("/episodes").json()["episodes"]]
        record = Record(tmp_path / "s.db")
        yield Guarded(proxy, record, others)
        record.close()


def check_outcomes(outcomes: Counter[str]) -> None:
    """Check that valid requests are accepted, and that many faulty requests are refused, but not all."""
    total = outcomes.total()
    assert outcomes["valid 2xx"] > total / 20 and outcomes["faulty 4xx"] > total / 5, outcomes
    assert outcomes["faulty 2xx"] > total / 20 and outcomes["valid 5xx"] > 0, outcomes


def test_requests_of_the_grammar_are_answered_or_refused(guarded: Guarded) -> None:
    @GRAMMAR
    @given(st.lists(steps, min_size=1, max_size=6))
    def play(taken: list[Step]) -> None:
        guarded.play(taken)

    play()
    check_outcomes(guarded.outcomes)


@pytest.mark.slow
def test_very_many_requests_of_the_grammar_are_answered_or_refused(guarded: Guarded) -> None:
    """FUZZ_SEED selects other examples."""

    @LONG_GRAMMAR
    @seed(int(os.environ.get("FUZZ_SEED", "0")))
    @given(st.lists(steps, min_size=1, max_size=10))
    def play(taken: list[Step]) -> None:
        guarded.play(taken)

    play()
    check_outcomes(guarded.outcomes)
