"""The Messages dialect by itself: how it reads a body, and what the SDK makes of a recorded turn."""

from __future__ import annotations

import json
import random
import secrets
from typing import Any

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from proxy_support import MODEL
from pydantic import TypeAdapter

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall, canonical_key
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.messages.dialect import Messages
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.rendering import Tokenizer

DIALECT = Messages()
CONTEXT = ReadContext(max_messages=50, label="main", forest=Forest())
TOKENIZER = Tokenizer.from_folder(MODEL)
END = 3  # the token that ends the model's turn
USER = {"role": "user", "content": "Where is Lyon?"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 64, "messages": list(messages) or [USER], **fields}


def read(*messages: dict[str, Any], **fields: Any) -> ModelRequest:
    return DIALECT.read(body(*messages, **fields), CONTEXT)


def refusal(request: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        DIALECT.read(request, CONTEXT)
    assert caught.value.status == 400
    return caught.value


def recorded(
    reply: Message, *, sampled: list[int] | None = None, reason: Any = "stop", stop: tuple[str, ...] = ()
) -> CompletedTurn:
    """Return a turn that answers 10 prompt tokens, 6 of which were known, with this reply."""
    ids = [5, 6, END] if sampled is None else sampled
    turn = Turn(
        id=new_turn_id(),
        parent=None,
        new_messages=(Message("user", "?"),),
        new_prompt_ids=list(range(10)),
        completion=Completion(ids, [-0.5] * len(ids), [0] * len(ids), reason),
        reply=reply,
        sampling=SamplingParams(64, stop=stop, stop_token_ids=(END,)),
    )
    return CompletedTurn(turn, 10, 1.8e9, 6)


def answered(done: CompletedTurn) -> SdkMessage:
    return SdkMessage.model_validate_json(DIALECT.answer(body(), [done], TOKENIZER))


def streamed(done: CompletedTurn, rng: random.Random) -> tuple[SdkMessage, list[Any]]:
    """Return the message that the SDK accumulates from a stream in random pieces, and the events."""
    writer = DIALECT.stream(body(), read(), [done.turn.id], 1.8e9, TOKENIZER)
    reply = done.turn.reply
    out = writer.start()
    for write, text in ((writer.reasoning, reply.reasoning), (writer.content, reply.content)):
        while text:
            size = rng.randint(1, len(text))
            out += write(0, text[:size]) + (DIALECT.keepalive if rng.random() < 0.3 else b"")
            text = text[size:]
    for call in reply.tool_calls:
        out += writer.call(0, call)
    return accumulated(out + writer.finish([done]))


def accumulated(stream: bytes) -> tuple[Any, list[Any]]:
    message: Any = None
    buffers: dict[int, bytes] = {}
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        head, data = block.split("\n")
        assert head == f"event: {json.loads(data[6:])['type']}"
        if head != "event: ping":
            events.append(EVENT.validate_json(data.removeprefix("data: ")))
            message = accumulate_event(event=events[-1], current_snapshot=message, json_bufs=buffers)
    return message, events


def assert_well_formed(events: list[Any]) -> None:
    """One block is open at a time, and indexes ascend from 0."""
    assert [events[0].type, *(e.type for e in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    opened, index = False, -1
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not opened
            opened, index = True, index + 1
        assert opened and event.index == index
        opened = event.type != "content_block_stop"
    assert not opened


# Reading


def test_system_and_text_forms_are_one_canonical_message() -> None:
    marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    for system, text in (
        ("Be brief.", "Be brief."),
        ([marked], "Be brief."),
        ([{"type": "text", "text": "x-header: 1"}, marked], "x-header: 1\nBe brief."),
    ):
        for content in ("Hi", [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]):
            request = read({"role": "user", "content": content}, system=system)
            assert request.messages == (Message("system", text), Message("user", "Hi"))
    assert read(USER, system=[]).messages == (Message("user", "Where is Lyon?"),)


def test_blocks_of_a_conversation_become_messages_in_order() -> None:
    request = read(
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "areal-" + "ab" * 12},
            {"type": "redacted_thinking", "data": "opaque"},
            {"type": "text", "text": "I "}, {"type": "text", "text": "look."},
            {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "é"}},
            {"type": "tool_use", "id": "c2", "name": "read", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c2", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "text", "text": "Well?"},
            {"type": "tool_result", "tool_use_id": "c1", "content": "broken", "is_error": True},
            {"type": "text", "text": "Go on."}]},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c9"}]},
    )  # fmt: skip
    calls = (ToolCall("c1", "search", '{"q": "é"}'), ToolCall("c2", "read", "{}"))
    assert request.messages == (
        Message("user", "Where is Lyon?"),
        Message("assistant", "I look.", "hm", calls),
        Message("tool", "a\nb", tool_call_id="c2", name="read"),
        Message("tool", "broken", tool_call_id="c1", name="search"),
        Message("user", "Well?\nGo on."),
        Message("system", "Be quick."),
        Message("tool", "", tool_call_id="c9"),
    )
    assert request.messages[1].handle == "chatcmpl-" + "ab" * 12
    assert request.label == "main"


def test_adjacent_assistant_messages_are_one_reply_unless_they_name_two_turns() -> None:
    def says(text: str, digit: str = "") -> dict[str, Any]:
        signed = {"type": "thinking", "thinking": text, "signature": "areal-" + digit * 24}
        content = [signed] if digit else [{"type": "text", "text": text}]
        return {"role": "assistant", "content": content}

    late = read(USER, says("b"), says("a", "1"), USER)
    assert late.messages[1:-1] == (Message("assistant", "b", "a"),)
    assert late.messages[1].handle == "chatcmpl-" + "1" * 24
    request = read(USER, says("a", "1"), says("b"), says("c", "1"), says("d", "2"), USER)
    found = [(m.reasoning, m.content, m.handle[-1]) for m in request.messages[1:-1]]
    assert found == [("ac", "b", "1"), ("d", "", "2")]


def test_a_tool_result_gets_its_name_from_the_call_before_it() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]}
    names = []
    for name in ("search", "read"):
        call = {"type": "tool_use", "id": "c1", "name": name, "input": {}}
        names.append(read(USER, {"role": "assistant", "content": [call]}, result).messages[-1].name)
    names.append(read(result).messages[-1].name)
    assert names == ["search", "read", None]


def test_the_turn_that_a_body_refers_to_is_found() -> None:
    first, second = (f"areal-{digit * 24}" for digit in "12")
    replies = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": s}]}
        for s in (first, second)
    ]
    assert DIALECT.referenced_turn(body(*replies, USER)) == "chatcmpl-" + "2" * 24
    foreign = {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "EqQB"}]}
    assert DIALECT.referenced_turn(body(replies[0], foreign, USER)) == "chatcmpl-" + "1" * 24
    assert DIALECT.referenced_turn(body(foreign)) is None
    kept = {"role": "assistant", "id": "msg_" + "3" * 24, "content": "Hi"}
    assert DIALECT.referenced_turn(body(kept, USER)) == "chatcmpl-" + "3" * 24
    assert read(USER, kept, USER).messages[1].handle == "chatcmpl-" + "3" * 24
    for broken in ({}, {"messages": 3}, {"messages": [7, {"role": "assistant", "content": [None, 3]}]}):
        assert DIALECT.referenced_turn(broken) is None


def test_tools_become_chat_function_tools_whatever_their_cache_marks() -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    plain = {"name": "search", "description": "Looks.", "input_schema": schema}
    marked = {
        **plain,
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
    }
    one, two = read(tools=[plain]), read(tools=[marked])
    function = {"name": "search", "description": "Looks.", "parameters": schema}
    assert one.tools == two.tools == ({"type": "function", "function": function},)
    assert one.tools_id == two.tools_id != read().tools_id == ""


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", (), True)),
        ({"type": "auto"}, ("auto", (), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", (), False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", (), True)),
        ({"type": "tool", "name": "search"}, ("required", ("search",), True)),
        ({"type": "none"}, ("none", (), True)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[Any, ...]) -> None:
    request = read(tools=[{"name": "search", "input_schema": {}}], tool_choice=choice)
    assert (request.calls, request.callable_tools, request.parallel_calls) == expected


def test_sampling_and_output_options_are_read_and_unknown_fields_ignored() -> None:
    schema = {"type": "object"}
    request = read(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, stop_sequences=["END"],
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "enabled", "budget_tokens": 2048}, metadata={"user_id": "u"}, mcp_servers=[],
        context_management={"edits": []}, betas=["x"], container=None, something_new=1,
    )  # fmt: skip
    wish = request.wish
    assert (wish.max_tokens, wish.temperature, wish.top_p, wish.top_k, wish.stop) == (
        7,
        0.5,
        0.9,
        0,
        ("END",),
    )
    assert request.output is not None and json.loads(request.output.text) == schema
    older = read(output_format={"type": "json_schema", "schema": schema})
    assert older.output == request.output
    assert request.template_options == {} and request.tools_id == ""
    off = read(chat_template_kwargs={"enable_thinking": False})
    assert off.template_options == {"enable_thinking": False} and off.tools_id != ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER] * 51}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]}]},
         "messages.0.content.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]},
         "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
         "messages.0.content.0.name"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"system": 3}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "END", "top_k": 1.5}, "top_k"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"container": "c1"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)  # fmt: skip
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(body(**fields)).param == param


def test_an_unsupported_type_is_named_in_the_refusal() -> None:
    error = refusal(body(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert "web_search_20250305" in error.message
    assert "'image'" in refusal(body({"role": "user", "content": [{"type": "image"}]})).message
    assert refusal(body(max_tokens=None)).message == "max_tokens: Field required"
    assert "too deeply" in refusal(body(*nested(5000))).message
    assert json.loads(read(*nested(300)).messages[0].tool_calls[0].arguments)


def nested(depth: int) -> list[dict[str, Any]]:
    """Return a conversation with a call whose input is nested `depth` levels deep."""
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    call = {"type": "tool_use", "id": "c", "name": "x", "input": value}
    return [{"role": "assistant", "content": [call]}, USER]


def test_counting_needs_no_max_tokens_and_may_end_with_a_reply() -> None:
    asked = {"messages": [USER, {"role": "assistant", "content": "France."}]}
    assert [m.role for m in DIALECT.read_for_counting(asked, CONTEXT).messages] == ["user", "assistant"]
    assert json.loads(DIALECT.count_answer(14)) == {"input_tokens": 14}


# Answering

CALL = ToolCall("call_1", "search", '{"q": "Lyon",  "k": 2.0}')


def test_a_whole_reply_has_every_field() -> None:
    done = recorded(Message("assistant", "Look.", "Hm.", (CALL,)))
    hexes = done.turn.id.removeprefix("chatcmpl-")
    assert json.loads(DIALECT.answer(body(), [done], TOKENIZER)) == {
        "id": f"msg_{hexes}",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": f"areal-{hexes}"},
            {"type": "text", "text": "Look."},
            {"type": "tool_use", "id": "call_1", "name": "search", "input": {"q": "Lyon", "k": 2.0}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 6,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("reply", "kinds"),
    [
        (Message("assistant", "Hi"), ["text"]),
        (Message("assistant", "", "Hm"), ["thinking"]),
        (Message("assistant", "", "", (CALL, CALL)), ["tool_use", "tool_use"]),
        (Message("assistant"), ["text"]),
    ],
)
def test_a_reply_has_a_block_for_each_part_and_at_least_one(reply: Message, kinds: list[str]) -> None:
    done = recorded(reply)
    message = answered(done)
    assert [block.type for block in message.content] == kinds
    again, events = streamed(done, random.Random(0))
    assert_well_formed(events)
    assert again.model_dump() == message.model_dump()


def test_the_stop_reason_says_why_a_reply_ended() -> None:
    def why(**fields: Any) -> tuple[str | None, str | None]:
        message = answered(recorded(Message("assistant", "x"), **fields))
        return message.stop_reason, message.stop_sequence

    ids = TOKENIZER.encode("the END of it")
    assert why() == ("end_turn", None)
    assert why(reason="length") == ("max_tokens", None)
    assert why(stop=("END",)) == ("end_turn", None)
    assert why(stop=("END",), sampled=[*TOKENIZER.encode("END"), END]) == ("end_turn", None)
    assert why(stop=("END", "never"), sampled=TOKENIZER.encode("see the END")) == ("stop_sequence", "END")
    assert why(stop=(" of", "D of"), sampled=ids[:-1]) == ("stop_sequence", "D of")
    assert why(stop=("END",), sampled=ids[:1], reason="length") == ("max_tokens", None)
    called = recorded(Message("assistant", "", "", (CALL,)), stop=("x",), sampled=TOKENIZER.encode("x"))
    assert answered(called).stop_reason == "tool_use"


def test_text_after_a_call_and_thinking_after_text_stay_in_order() -> None:
    done = recorded(Message("assistant", "ab", "hm", (CALL,)))
    writer = DIALECT.stream(body(), read(), [done.turn.id], 1.8e9, TOKENIZER)
    out = writer.start() + writer.content(0, "a") + writer.reasoning(0, "hm")
    called = writer.call(0, CALL)
    assert called.endswith(b'data: {"type":"content_block_stop","index":2}\n\n')  # the block ends at once
    message, events = accumulated(out + called + writer.content(0, "b") + writer.finish([done]))
    assert_well_formed(events)
    assert [block.type for block in message.content] == ["text", "thinking", "tool_use", "text"]
    replayed = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    assert canonical_key(read(USER, replayed, USER).messages[1]) == canonical_key(done.turn.reply)


def test_a_tool_input_that_is_nested_too_deeply_is_refused() -> None:
    arguments = '{"a": ' + "[" * 300 + "]" * 300 + "}"
    done = recorded(Message("assistant", "", "", (ToolCall("c", "x", arguments),)))
    with pytest.raises(RequestError, match="cannot be written") as caught:
        DIALECT.answer(body(), [done], TOKENIZER)
    assert caught.value.status == 502


def test_errors_have_the_type_of_their_status() -> None:
    def told(error: RequestError) -> tuple[str, str]:
        form = json.loads(DIALECT.error(error))
        assert form.keys() == {"type", "error"} and form["type"] == "error"
        return form["error"]["type"], form["error"]["message"]

    statuses = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
        404: "not_found_error", 409: "invalid_request_error", 413: "request_too_large",
        429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error",
        504: "timeout_error", 529: "overloaded_error",
    }  # fmt: skip
    assert {s: told(RequestError("no", status=s))[0] for s in statuses} == statuses
    assert told(RequestError("must be odd", param="top_k"))[1] == "top_k: must be odd"
    assert told(RequestError("top_k must be odd", param="top_k"))[1] == "top_k must be odd"
    too_long = RequestError(
        "This model's …",
        code="context_length_exceeded",
        param="messages",
        details={"tokens": 9000, "limit": 4096},
    )
    assert told(too_long) == ("invalid_request_error", "prompt is too long: 9000 tokens > 4096 maximum")
    writer = DIALECT.stream(body(), read(), [new_turn_id()], 1.8e9, TOKENIZER)
    event = writer.error(RequestError("gone", status=503)).decode()
    assert event.startswith("event: error\ndata: {") and event.endswith("}\n\n")
    assert json.loads(event.split("data: ")[1])["error"] == {"type": "overloaded_error", "message": "gone"}


# Replaying

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INTEGER = st.integers(-(2**63), 2**63 - 1)
VALUE = st.recursive(
    st.none() | st.booleans() | INTEGER | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
INPUT = st.dictionaries(TEXT, VALUE, max_size=3)


@st.composite
def replies(draw: Any) -> Message:
    names = draw(st.lists(st.sampled_from(["search", "read"]), max_size=3))
    indent = draw(st.sampled_from([None, 1]))
    calls = [
        ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(draw(INPUT), indent=indent))
        for name in names
    ]
    return Message("assistant", draw(TEXT), draw(TEXT), tuple(calls))


def reserialised(value: Any, rng: random.Random) -> Any:
    """The same JSON as another language might write it: keys in another order, 2.0 as 2."""
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {key: reserialised(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [reserialised(item, rng) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def as_replayed(blocks: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the blocks as a client sends them back, with a cache mark on one of them or none."""
    out = [reserialised(block, rng) for block in blocks]
    if out and rng.random() < 0.5:
        rng.choice(out)["cache_control"] = {"type": "ephemeral"}
    return out


@given(st.lists(st.tuples(replies(), TEXT), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_conversation_that_the_sdk_replays_is_the_recorded_one(
    turns: list[tuple[Message, str]], rng: random.Random
) -> None:
    wire: list[dict[str, Any]] = [USER]
    history = [Message("user", "Where is Lyon?")]
    for reply, text in turns:
        done = recorded(reply)
        message, events = streamed(done, rng)
        assert_well_formed(events)
        whole = answered(done)
        assert message.model_dump() == whole.model_dump()
        blocks = [block.model_dump() for block in rng.choice([message, whole]).content]
        said = [{"type": "text", "text": text}] if text or not reply.tool_calls else []
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"found {text}"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        wire += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results + said}]
        history.append(Message(**{**_fields(reply), "handle": done.turn.id if reply.reasoning else ""}))
        history += [
            Message("tool", f"found {text}", tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        ]
        history += [Message("user", text)] if said else []
    sent = [{**item, "content": as_sent(item["content"], rng)} for item in wire]
    request = read(*orjson.loads(json.dumps(sent)))
    assert [canonical_key(m) for m in request.messages] == [canonical_key(m) for m in history]
    for found, expected in zip(request.messages, history, strict=True):
        assert found.handle == expected.handle and found.reasoning == expected.reasoning
        assert [call.id for call in found.tool_calls] == [call.id for call in expected.tool_calls]
        assert (found.tool_call_id, found.name) == (expected.tool_call_id, expected.name)


def as_sent(content: Any, rng: random.Random) -> Any:
    return content if isinstance(content, str) else as_replayed(content, rng)


def _fields(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": message.tool_calls,
    }
