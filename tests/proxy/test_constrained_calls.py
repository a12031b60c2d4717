"""Replies that are constrained to a schema or to tool calls, with real clients and the embedded engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from anthropic import Anthropic
from proxy_support import MODEL, RecordingEngine, RunningProxy, running_proxy
from scripted_sampler import ScriptedSampler

from areal_agents.algorithms.credit.trained import TrainedTurns
from areal_agents.core.trajectory import Turn
from areal_agents.errors import EngineRejected
from areal_agents.inference import running_engine
from areal_agents.rendering import ChatRenderer

QUESTION = "Where is Lyon?"
ASKED = [{"role": "user", "content": QUESTION}]
ANSWER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Lyon"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city", "days", "sure"],
    "additionalProperties": False,
}
LOOKUP = {
    "type": "object",
    "properties": {"place": {"enum": ["Lyon", "Rome"]}, "deep": {"type": "boolean"}},
    "required": ["place", "deep"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
PARAMETERS = {"lookup": LOOKUP, "count": COUNT}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}  # an untrained model does not end its reasoning
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": ANSWER}}
Calls = list[tuple[str, str]]  # name and arguments


@pytest.fixture(scope="module")
def proxy(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path = tmp_path_factory.mktemp("constrained") / "store.db"
    with running_engine(MODEL, threads=1, slots=8, max_context=2048, seed=7, start_timeout_s=400) as url:
        engine = RecordingEngine(url, renderer)
        with running_proxy(path, engine) as running:
            yield running


@pytest.fixture
def episode(proxy: RunningProxy) -> dict[str, Any]:
    proxy.engine.calls.clear()
    return proxy.open_episode()


def the_turn(proxy: RunningProxy, episode: dict[str, Any]) -> Turn:
    """Return the only turn of the episode, which must be complete and recorded as constrained."""
    [turn] = proxy.store.load_episode(episode["id"]).turns
    assert (
        turn.constrained
        and not TrainedTurns().includes(turn)
        and TrainedTurns(constrained=True).includes(turn)
    )
    assert turn.completion.finish_reason == "stop"
    assert np.isfinite(turn.completion.logprobs).all() and turn.completion.logprobs.min() < 0
    return turn


def check_answer(text: str) -> None:
    jsonschema.validate(json.loads(text), ANSWER)


def check_calls(calls: Calls, *, named: str | None = None) -> None:
    assert calls
    for name, arguments in calls:
        assert named in (None, name)
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def chat(
    proxy: RunningProxy, episode: dict[str, Any], *, stream: bool, messages: Any = ASKED, **body: Any
) -> tuple[str, Calls, str | None]:
    """Return the content, calls and finish reason of a chat completion."""
    client = proxy.openai(episode).chat.completions
    fields: Any = {"model": "m", "messages": messages, "max_tokens": 1500, "extra_body": QUIET, **body}
    if not stream:
        [choice] = client.create(**fields).choices
        made = choice.message.tool_calls or []
        return (
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in made],
            choice.finish_reason,
        )
    text, calls, reason = "", {}, None
    for chunk in client.create(stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                )
    return text, list(calls.values()), reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_reply_fits_its_schema(proxy: RunningProxy, episode: dict[str, Any], stream: bool) -> None:
    text, calls, reason = chat(proxy, episode, stream=stream, response_format=SCHEMA_FORMAT)
    check_answer(text)
    assert calls == [] and reason == "stop"
    assert the_turn(proxy, episode).reply.content == text


def test_reasoning_may_come_before_the_constrained_content(
    proxy: RunningProxy, episode: dict[str, Any]
) -> None:
    for _ in range(3):
        chat(proxy, episode, stream=False, response_format=SCHEMA_FORMAT, max_tokens=300, extra_body={})
    for turn in proxy.store.load_episode(episode["id"]).turns:
        assert turn.constrained
        if turn.completion.finish_reason == "stop":
            check_answer(turn.reply.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_a_json_object_if_one_is_requested(
    proxy: RunningProxy, episode: dict[str, Any], stream: bool
) -> None:
    text, calls, reason = chat(
        proxy, episode, stream=stream, response_format={"type": "json_object"}, max_tokens=200
    )
    assert calls == [] and text.startswith("{")
    if reason == "stop":  # the model may also run out of tokens within a string
        assert isinstance(json.loads(text), dict)
    [turn] = proxy.store.load_episode(episode["id"]).turns
    assert turn.constrained and turn.reply.content == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("required", None),
        ({"type": "function", "function": {"name": "count"}}, "count"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "count"}}],
                },
            },
            "count",
        ),
    ],
)
def test_a_chat_reply_has_the_required_calls(
    proxy: RunningProxy, episode: dict[str, Any], stream: bool, choice: Any, named: str | None
) -> None:
    text, calls, reason = chat(
        proxy, episode, stream=stream, tools=TOOLS, tool_choice=choice, parallel_tool_calls=named is None
    )
    check_calls(calls, named=named)
    assert text == "" and reason == "tool_calls"
    assert named is None or len(calls) == 1
    reply = the_turn(proxy, episode).reply
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls


@pytest.mark.parametrize("stream", [False, True])
def test_with_tools_and_a_schema_a_reply_has_calls_or_fits_the_schema(
    proxy: RunningProxy, stream: bool
) -> None:
    kinds: set[str | None] = set()
    for seed in (16, 19, *range(100)):  # with the first two, the model answers once and calls a tool once
        episode = proxy.open_episode(sampling={"base_seed": seed})
        text, calls, reason = chat(proxy, episode, stream=stream, tools=TOOLS, response_format=SCHEMA_FORMAT)
        the_turn(proxy, episode)
        kinds.add(reason)
        if calls:
            check_calls(calls)
            assert text == ""
        else:
            check_answer(text)
        if len(kinds) == 2:
            break
    assert kinds == {"stop", "tool_calls"}  # the schema of the content does not prevent tool calls


def test_the_schema_applies_if_tool_calls_are_disabled(proxy: RunningProxy, episode: dict[str, Any]) -> None:
    text, calls, _ = chat(
        proxy, episode, stream=False, tools=TOOLS, tool_choice="none", response_format=SCHEMA_FORMAT
    )
    check_answer(text)
    assert calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_turn_after_a_forced_call_continues_with_the_exact_tokens(
    proxy: RunningProxy, episode: dict[str, Any], stream: bool
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    _, [(name, arguments)], _ = chat(proxy, episode, stream=stream, **fields)
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "In France."},
    ]
    text, _, _ = chat(
        proxy, episode, stream=stream, messages=messages, tools=TOOLS, tool_choice="none",
        response_format=SCHEMA_FORMAT,
    )  # fmt: skip
    check_answer(text)
    before, after = proxy.engine.calls
    known = np.concatenate([before.input_ids, before.completion.token_ids])
    assert after.input_ids[: len(known)].tolist() == known.tolist()
    first, second = proxy.store.load_episode(episode["id"]).turns
    assert second.parent == first.id and second.forked_from is None


RESPONSE_TOOLS = [{"type": "function", "name": n, "parameters": p} for n, p in PARAMETERS.items()]


def respond(proxy: RunningProxy, episode: dict[str, Any], *, stream: bool, **body: Any) -> tuple[str, Calls]:
    """Return the text and calls of a response."""
    client = proxy.openai(episode).responses
    fields: Any = {"model": "m", "input": QUESTION, "max_output_tokens": 1500, "extra_body": QUIET, **body}
    if stream:
        events = list(client.create(stream=True, **fields))
        response = events[-1].response
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == response.output_text
    else:
        response = client.create(**fields)
    assert response.status == "completed"
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    return response.output_text, calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_fits_its_format(proxy: RunningProxy, episode: dict[str, Any], stream: bool) -> None:
    form = {"type": "json_schema", "name": "a", "schema": ANSWER, "strict": True}
    text, calls = respond(proxy, episode, stream=stream, text={"format": form})
    check_answer(text)
    assert calls == [] and the_turn(proxy, episode).reply.content == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "named"), [("required", None), ({"type": "function", "name": "lookup"}, "lookup")]
)
def test_a_response_has_the_required_calls(
    proxy: RunningProxy, episode: dict[str, Any], stream: bool, choice: Any, named: str | None
) -> None:
    text, calls = respond(proxy, episode, stream=stream, tools=RESPONSE_TOOLS, tool_choice=choice)
    check_calls(calls, named=named)
    assert text == "" and len(the_turn(proxy, episode).reply.tool_calls) == len(calls)


MESSAGE_TOOLS = [{"name": name, "input_schema": schema} for name, schema in PARAMETERS.items()]


def message(proxy: RunningProxy, episode: dict[str, Any], *, stream: bool, **body: Any) -> tuple[str, Calls]:
    """Return the text and calls of a message."""
    client = Anthropic(base_url=f"{proxy.url}/e/{episode['key']}", api_key=episode["key"], max_retries=0)
    extra = {**QUIET, **body.pop("extra_body", {})}
    fields: Any = {"model": "m", "messages": ASKED, "max_tokens": 1500, "extra_body": extra, **body}
    if stream:
        with client.messages.stream(**fields) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(**fields)
    calls = [(block.name, json.dumps(block.input)) for block in reply.content if block.type == "tool_use"]
    assert reply.stop_reason == ("tool_use" if calls else "end_turn")
    return "".join(block.text for block in reply.content if block.type == "text"), calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_fits_its_output_format(proxy: RunningProxy, episode: dict[str, Any], stream: bool) -> None:
    output = {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}}
    text, calls = message(proxy, episode, stream=stream, extra_body=output)
    check_answer(text)
    assert calls == [] and the_turn(proxy, episode).reply.content == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "named"), [({"type": "any"}, None), ({"type": "tool", "name": "count"}, "count")]
)
def test_a_message_has_the_required_calls(
    proxy: RunningProxy, episode: dict[str, Any], stream: bool, choice: Any, named: str | None
) -> None:
    text, calls = message(proxy, episode, stream=stream, tools=MESSAGE_TOOLS, tool_choice=choice)
    check_calls(calls, named=named)
    assert text == "" and len(the_turn(proxy, episode).reply.tool_calls) == len(calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_keyword_that_would_be_ignored_is_refused(proxy: RunningProxy, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="keyword uniqueItems is not supported") as caught:
        chat(proxy, proxy.open_episode(), stream=stream, response_format=form)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "response_format")


async def test_the_engine_refuses_schema_keywords_that_it_would_ignore(proxy: RunningProxy) -> None:
    engine = RecordingEngine(proxy.engine.base_url, proxy.engine.renderer)
    with pytest.raises(EngineRejected, match=r"\(400\): json_schema .* keyword not is not supported, at #"):
        await engine._call(
            "POST", "/generate", {"input_ids": [9], "sampling_params": {"json_schema": '{"not": {}}'}}
        )
    await engine.aclose()


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_the_engine_rejects_is_a_bad_request(
    renderer: ChatRenderer, tmp_path: Path, stream: bool
) -> None:
    engine = ScriptedSampler(renderer, script=lambda call: EngineRejected("no grammars here (400)"))
    with running_proxy(tmp_path / "store.db", engine) as plain:
        for body in ({"response_format": SCHEMA_FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="no grammars here") as caught:
                chat(plain, plain.open_episode(), stream=stream, **body)
            assert caught.value.code == "unsupported_parameter"
