"""The Responses dialect by itself: bodies are read into messages, and turns written as `openai.types`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from areal_agents.core.completion import Completion, Grammar, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall, canonical_key
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.fields import ignored_fields
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import Dialect, ReadContext, StreamWriter
from areal_agents.proxy.dialects.responses.dialect import ResponsesDialect
from areal_agents.proxy.dialects.turn_ids import handle_of, wire_id
from areal_agents.rendering import ChatRenderer

DIALECT: Dialect = ResponsesDialect()
SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
A, B = (f"chatcmpl-{digit * 24}" for digit in "ab")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def turn(
    turn_id: str,
    messages: Sequence[Message],
    reply: Message,
    *,
    parent: str | None = None,
    has_instructions: bool = False,
    tokens: Sequence[int] = (5, 6, 7),
    finish: Any = "stop",
    top: Any = (),
) -> Turn:
    completion = Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish, top)
    return Turn(
        turn_id,
        parent,
        tuple(messages),
        [1, 2, 3],
        completion,
        reply,
        SamplingParams(max_new_tokens=16),
        has_instructions=has_instructions,
    )


def read(body: dict[str, Any], forest: Forest | None = None, max_messages: int = 100) -> ModelRequest:
    return DIALECT.read(body, ReadContext(max_messages, "", forest or Forest()))


def messages_of(given: Any, forest: Forest | None = None, **body: Any) -> list[Message]:
    return list(read({"input": given, **body}, forest).messages)


def refusal(body: dict[str, Any], forest: Forest | None = None, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, forest, **options)
    assert caught.value.status == 400
    return caught.value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "search", "arguments": "{}", **fields}


def answered(call_id: str, output: Any = "found") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


# Reading


def test_a_string_input_is_a_user_message_after_the_instructions() -> None:
    request = read({"input": "hello", "instructions": "Be brief."})
    assert request.messages == (Message("system", "Be brief."), Message("user", "hello"))
    assert request.has_instructions
    assert not read({"input": "hello", "instructions": ""}).has_instructions


def test_messages_are_read_in_both_forms_and_with_parts() -> None:
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "bc"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": []}]},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"role": "user", "content": "e"},
    ]
    expected = [("system", "a"), ("user", "bc"), ("assistant", "d"), ("user", "e")]
    assert [(m.role, m.content) for m in messages_of(given)] == expected


def test_the_items_of_one_reply_are_one_message() -> None:
    given = [
        user("q"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmm"}]},
        {"type": "message", "role": "assistant", "content": "let me look"},
        called("call_1"),
        called("call_2", arguments='{"query": "x"}'),
        answered("call_2"),
        answered("call_1", [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "ne"}]),
        {"type": "message", "role": "assistant", "content": "done"},
    ]
    _, reply, second, first, last = messages_of(given)
    calls = (ToolCall("call_1", "search", "{}"), ToolCall("call_2", "search", '{"query": "x"}'))
    assert reply == Message("assistant", "let me look", "hmm", calls)
    assert second == Message("tool", "found", tool_call_id="call_2", name="search")
    assert first == Message("tool", "none", tool_call_id="call_1", name="search")
    assert last == Message("assistant", "done")


def test_two_texts_are_two_replies_unless_their_ids_name_the_same_turn() -> None:
    def texts(*ids: str) -> list[Any]:
        return [{"type": "message", "role": "assistant", "content": "x", "id": i} for i in ids]

    def read_back(*ids: str) -> list[tuple[str, str]]:
        return [(m.content, m.handle) for m in messages_of([user("q"), *texts(*ids)])[1:]]

    a, b = "a" * 24, "b" * 24
    assert read_back("", "") == [("x", ""), ("x", "")]
    assert read_back(f"msg_{a}", f"msg_{a}_1") == [("xx", A)]
    assert read_back(f"msg_{a}", f"msg_{b}") == [("x", A), ("x", B)]
    assert read_back("msg_" + "a" * 48) == [("x", "")]  # an id of another server


def test_calls_of_different_turns_are_different_messages() -> None:
    a, b = "a" * 24, "b" * 24
    given = [
        user("q"),
        called("1", id=f"fc_{a}_0"),
        called("2", id=f"fc_{b}_0"),
        answered("1"),
        answered("2"),
    ]
    assert [m.handle for m in messages_of(given)] == ["", A, B, "", ""]


def test_a_call_between_outputs_joins_the_turn_that_its_id_names() -> None:
    a = "a" * 24
    given = [called("1", id=f"fc_{a}_0"), answered("1"), called("2", id=f"fc_{a}_1"), answered("2")]
    reply, *outputs = messages_of(given)
    assert [call.id for call in reply.tool_calls] == ["1", "2"] and reply.handle == A
    assert [m.tool_call_id for m in outputs] == ["1", "2"]
    without = messages_of([{k: v for k, v in item.items() if k != "id"} for item in given])
    assert [m.role for m in without] == ["assistant", "tool", "assistant", "tool"]


def test_a_user_message_ends_a_reply_even_with_open_calls() -> None:
    given = [called("1"), user("never mind"), {"role": "assistant", "content": "fine"}]
    assert [m.role for m in messages_of(given)] == ["assistant", "user", "assistant"]


def test_the_handle_is_read_from_the_encrypted_content_alone() -> None:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": handle_of(A)}
    _, reply = messages_of([user("q"), reasoning, {"role": "assistant", "content": "x"}])
    assert (reply.handle, reply.content) == (A, "x")
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}
    assert messages_of([user("q"), foreign, {"role": "assistant", "content": "x"}])[1].handle == ""


def test_the_content_of_reasoning_takes_precedence_over_its_summary() -> None:
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": t} for t in ("short", "shorter")],
        "content": [{"type": "reasoning_text", "text": "at length"}],
    }
    assert messages_of([item])[0].reasoning == "at length"
    assert messages_of([{**item, "content": None}])[0].reasoning == "short\n\nshorter"


def test_tools_become_chat_tools() -> None:
    request = read({"input": "q", "tools": [SEARCH, PATCH], "parallel_tool_calls": False})
    search, patch = request.tools
    assert search == {
        "type": "function",
        "function": {"name": "search", "parameters": {"type": "object"}, "strict": True},
    }
    assert patch["function"]["name"] == "apply_patch"
    assert patch["function"]["parameters"]["required"] == ["input"]
    assert not request.parallel_calls and request.tools_id


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", ())),
        ("none", ("none", ())),
        ("required", ("required", ())),
        ({"type": "function", "name": "search"}, ("required", ("search",))),
        ({"type": "custom", "name": "apply_patch"}, ("required", ("apply_patch",))),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"name": "search"}, {"name": "apply_patch"}],
            },
            ("required", ()),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"name": "apply_patch"}]},
            ("required", ("apply_patch",)),
        ),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, tuple[str, ...]]) -> None:
    request = read({"input": "q", "tools": [SEARCH, PATCH], "tool_choice": choice})
    assert (request.calls, request.callable_tools) == expected


def test_sampling_and_output_options_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = read(
        {
            "input": "q",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    wish = request.wish
    assert (wish.max_tokens, wish.temperature, wish.top_p, wish.top_logprobs) == (9, 0.5, 0.9, 2)
    assert request.output == Grammar("json_schema", json.dumps(schema))
    assert request.template_options == {"enable_thinking": False} and request.tools_id
    plain = read({"input": "q", "top_logprobs": 2, "text": {"format": {"type": "text"}}})
    assert plain.wish.top_logprobs == 0 and plain.output is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [user("q"), {"type": "web_search_call", "id": "ws_1"}]}, "input[1].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [called("")]}, "input[0].call_id"),
        ({"input": [called("1", name="")]}, "input[0].name"),
        ({"input": [answered("")]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [3]}]}, "input[0].summary"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "x"}]}, "input[0].input"),
        ({"input": "q", "instructions": ["x"]}, "instructions"),
        ({"input": "q", "tools": {}}, "tools"),
        ({"input": "q", "tools": [{"type": "local_shell"}]}, "tools[0]"),
        ({"input": "q", "tools": [{"type": []}]}, "tools[0]"),
        ({"input": "q", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"input": "q", "tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools[0].tools"),
        ({"input": "q", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "q", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "q", "tool_choice": "required"}, "tool_choice"),
        ({"input": "q", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"input": "q", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "q", "tools": [SEARCH], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"input": "q", "background": True}, "background"),
        ({"input": "q", "conversation": "conv_1"}, "conversation"),
        ({"input": "q", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "q", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "q", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "q", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "q", "text": "x"}, "text"),
        ({"input": "q", "metadata": []}, "metadata"),
        ({"input": "q", "include": "x"}, "include"),
        ({"input": "q", "previous_response_id": 7}, "previous_response_id"),
    ],
)
def test_a_refusal_names_its_field(body: dict[str, Any], param: str) -> None:
    assert refusal(body).param == param


def test_tools_of_namespaces_are_functions_and_hosted_tools_are_left_out() -> None:
    inner = {"type": "function", "name": "lookup", "description": "Looks it up."}
    group = {"type": "namespace", "name": "atlas", "description": "Maps.", "tools": [inner]}
    body = {"input": "q", "tools": [group, {"type": "web_search"}, SEARCH]}
    request = read(body)
    functions = [tool["function"] for tool in request.tools]
    assert [function["name"] for function in functions] == ["atlas__lookup", "search"]
    assert functions[0]["description"] == "Maps.\n\nLooks it up."
    assert inner["name"] == "lookup"  # the answer repeats the tools as they were sent
    assert ignored_fields("responses", body) == ("tools: web_search",)
    chosen = {"type": "function", "name": "lookup", "namespace": "atlas"}
    assert read({**body, "tool_choice": chosen}).callable_tools == ("atlas__lookup",)


def test_a_request_that_the_response_cannot_repeat_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"k": deep}
    assert refusal({"input": "q", "metadata": deep}).message.startswith("the request cannot be repeated")


def test_the_number_of_items_is_bounded() -> None:
    assert read({"input": [user("q")] * 3}, max_messages=3)
    assert refusal({"input": [user("q")] * 4}, max_messages=3).param == "input"


def test_unknown_references_are_refused_with_openais_messages() -> None:
    missing = refusal({"input": "q", "previous_response_id": wire_id(A, "resp_")})
    assert missing.code == "previous_response_not_found"
    assert missing.message == f"Previous response with id 'resp_{'a' * 24}' not found."
    forest = Forest([turn(A, [Message("user", "q")], Message("assistant", "x"))])
    for name in ("rs_" + "b" * 24, f"fc_{'a' * 24}_0", "resp_" + "a" * 24, None):
        item = {"type": "item_reference", "id": name}
        assert refusal({"input": [item]}, forest).param == "input[0].id"


def test_the_turn_that_a_body_refers_to_is_found() -> None:
    item = called("1", id=f"fc_{'b' * 24}_0")
    assert DIALECT.referenced_turn({"input": [user("q"), item]}) == B
    assert DIALECT.referenced_turn({"input": [item], "previous_response_id": wire_id(A, "resp_")}) == A
    assert (
        DIALECT.referenced_turn({"input": [3, {"type": "reasoning", "encrypted_content": handle_of(A)}]}) == A
    )
    assert DIALECT.referenced_turn({"input": "q", "previous_response_id": "x"}) is None


# Writing


def completed(recorded: Turn, created_at: float = 1700000000.5) -> CompletedTurn:
    return CompletedTurn(recorded, prompt_tokens=11, created_at=created_at, reused_tokens=4)


def answer(body: dict[str, Any], recorded: Turn, renderer: ChatRenderer) -> dict[str, Any]:
    text = DIALECT.answer(body, [completed(recorded)], renderer.tokenizer)
    Response.model_validate_json(text, strict=True)
    return orjson.loads(text)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked against its type."""
    events = []
    for block in data.decode().strip().split("\n\n"):
        name, content = block.split("\n")
        found = orjson.loads(content.removeprefix("data: "))
        assert name == f"event: {found['type']}"
        EVENT.validate_python(found, strict=True)
        events.append(found)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def writer(body: dict[str, Any], recorded: Turn, renderer: ChatRenderer) -> StreamWriter:
    request = ModelRequest((Message("user", "q"),), (), "", read({"input": "q"}).wish)
    return DIALECT.stream(body, request, [recorded.id], 1700000000.5, renderer.tokenizer)


def streamed(body: dict[str, Any], recorded: Turn, renderer: ChatRenderer) -> list[dict[str, Any]]:
    stream, reply = writer(body, recorded, renderer), recorded.reply
    data = stream.start()
    data += b"".join(stream.reasoning(0, piece) for piece in reply.reasoning)
    data += b"".join(stream.content(0, piece) for piece in reply.content)
    data += b"".join(stream.call(0, call) for call in reply.tool_calls)
    return events_of(data + stream.finish([completed(recorded)]))


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that a client assembles from a stream; deltas must add up to their done events."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = {}
        elif kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_summary_text.done"):
            assert texts.get(event["item_id"], "") == event["text"]
        elif kind == "function_call_arguments.done":
            assert texts[event["item_id"]] == event["arguments"]
        elif kind == "custom_tool_call_input.done":
            assert texts[event["item_id"]] == event["input"]
        elif kind == "output_item.done":
            items[event["output_index"]] = event["item"]
    return [items[index] for index in sorted(items)]


FULL = Message(
    "assistant",
    "héllo",
    "hmm",
    (ToolCall("call_1", "search", '{"query": 1}'), ToolCall("call_2", "apply_patch", '{"input": "*** x"}')),
)
REPLIES = [
    FULL,
    Message("assistant", "héllo"),
    Message("assistant", "", "hmm"),
    Message("assistant", "", "hmm", FULL.tool_calls[:1]),
    Message("assistant"),
]


def test_an_answer_has_every_field(renderer: ChatRenderer) -> None:
    body = {
        "model": "m",
        "input": "q",
        "instructions": "i",
        "metadata": {"k": "v"},
        "tools": [SEARCH, PATCH],
        "temperature": 0.3,
    }
    found = answer(body, turn(A, [Message("user", "q")], FULL), renderer)
    a = "a" * 24
    reasoning, text, call, patch = found["output"]
    assert (found["id"], found["status"], found["created_at"]) == (f"resp_{a}", "completed", 1700000000)
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hmm"}]
    assert (reasoning["id"], reasoning["encrypted_content"]) == (f"rs_{a}", f"areal-{a}")
    assert text["content"] == [{"type": "output_text", "text": "héllo", "annotations": [], "logprobs": []}]
    assert (call["id"], call["call_id"], call["arguments"]) == (f"fc_{a}_0", "call_1", '{"query": 1}')
    assert (patch["type"], patch["id"], patch["input"]) == ("custom_tool_call", f"ctc_{a}_1", "*** x")
    assert found["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }
    echoed = {name: found[name] for name in ("model", "instructions", "metadata", "temperature", "top_p")}
    assert echoed == {
        "model": "m",
        "instructions": "i",
        "metadata": {"k": "v"},
        "temperature": 0.3,
        "top_p": 1.0,
    }
    assert found["tools"] == [{**SEARCH, "description": None}, PATCH]
    assert (found["tool_choice"], found["parallel_tool_calls"], found["error"]) == ("auto", True, None)
    assert found["text"] == {"format": {"type": "text"}}


def test_a_cut_answer_is_incomplete(renderer: ChatRenderer) -> None:
    cut = turn(A, [Message("user", "q")], Message("assistant", "hé"), finish="length")
    found = answer({"input": "q"}, cut, renderer)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"
    assert streamed({"input": "q"}, cut, renderer)[-1]["response"] == found


def test_logprobs_are_included_on_request(renderer: ChatRenderer) -> None:
    ids = renderer.tokenizer.encode("ok")
    top = tuple(((token, -0.5), (ids[0], -2.0)) for token in ids)
    recorded = turn(A, [Message("user", "q")], Message("assistant", "ok"), tokens=ids, top=top)
    body = {"input": "q", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = answer(body, recorded, renderer)["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in found) == "ok"
    assert [t["logprob"] for t in found[0]["top_logprobs"]] == [-0.5, -2.0]
    assert streamed(body, recorded, renderer)[-1]["response"] == answer(body, recorded, renderer)


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_ends_with_the_answer_that_its_events_make(
    reply: Message, finish: str, renderer: ChatRenderer
) -> None:
    body = {"input": "q", "tools": [SEARCH, PATCH]}
    recorded = turn(A, [Message("user", "q")], reply, finish=finish)
    events = streamed(body, recorded, renderer)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == ("response.incomplete" if finish == "length" else "response.completed")
    assert last["response"] == answer(body, recorded, renderer)
    assert put_together(events) == last["response"]["output"]


def test_the_events_of_a_text_are_in_order() -> None:
    renderer = None  # not needed here
    stream = DIALECT.stream({"input": "q"}, None, [A], 0.0, renderer)  # type: ignore[arg-type]
    data = stream.start() + stream.content(0, "a") + stream.content(0, "b")
    done = completed(turn(A, [Message("user", "q")], Message("assistant", "ab")))
    names = [event["type"].removeprefix("response.") for event in events_of(data + stream.finish([done]))]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_text_after_a_call_is_another_item_of_the_same_message(renderer: ChatRenderer) -> None:
    call = FULL.tool_calls[0]
    recorded = turn(A, [Message("user", "q")], Message("assistant", "beforeafter", "", (call,)))
    stream = writer({"input": "q"}, recorded, renderer)
    data = stream.start() + stream.content(0, "before") + stream.call(0, call) + stream.content(0, "after")
    events = events_of(data + stream.finish([completed(recorded)]))
    output = events[-1]["response"]["output"]
    assert put_together(events) == output
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    for items in (output, [without_ids(item) for item in output]):
        [reply] = messages_of(items)
        assert canonical_key(reply) == canonical_key(recorded.reply)
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    [reply] = messages_of(references, Forest([recorded]))
    assert canonical_key(reply) == canonical_key(recorded.reply)


@pytest.mark.parametrize(
    ("status", "code", "sent"),
    [
        (400, "context_length_exceeded", "context_length_exceeded"),
        (429, "too_many_requests", "rate_limit_exceeded"),
        (503, "engine_unavailable", "server_error"),
    ],
)
def test_a_failure_after_the_stream_has_begun_is_an_event(
    status: int, code: str, sent: str, renderer: ChatRenderer
) -> None:
    stream = writer({"input": "q"}, turn(A, [Message("user", "q")], FULL), renderer)
    data = (
        stream.start()
        + stream.content(0, "half")
        + stream.error(RequestError("no", status=status, code=code))
    )
    blocks = data.decode().strip().split("\n\n")
    failed = orjson.loads(blocks[-1].split("\ndata: ")[1])
    assert failed["type"] == "response.failed" and failed["sequence_number"] == len(blocks) - 1
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": sent, "message": "no"}


def test_a_custom_tool_takes_text_and_returns_what_the_model_wrote(renderer: ChatRenderer) -> None:
    odd = ['{"patch": "x"}', "{oops", '{"input": 1}', '{"input": "x", "more": 1}']
    for arguments, text in [('{"input":  "x"}', "x"), *zip(odd, odd, strict=True)]:
        reply = Message("assistant", "", "", (ToolCall("call_1", "apply_patch", arguments),))
        recorded = turn(A, [Message("user", "q")], reply)
        body = {"input": "q", "tools": [PATCH]}
        [item] = answer(body, recorded, renderer)["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", text)
        result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
        replayed, output = messages_of([item, result], Forest([recorded]))
        assert canonical_key(replayed) == canonical_key(reply)
        assert output == Message("tool", "done", tool_call_id="call_1", name="apply_patch")
        [edited] = messages_of([{**item, "input": "y"}], Forest([recorded]))
        assert edited.tool_calls[0].arguments == '{"input": "y"}'


# Any JSON

NAMES = [
    *("input", "instructions", "tools", "tool_choice", "text", "include", "metadata", "previous_response_id"),
    *("type", "role", "content", "id", "call_id", "name", "arguments", "output", "summary", "format", "mode"),
    *("encrypted_content", "parameters", "schema", "reasoning", "stream", "top_logprobs", "n", "stop"),
]
WORDS = [
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference"),
    *(
        "function",
        "custom",
        "allowed_tools",
        "user",
        "assistant",
        "required",
        "json_schema",
        "grammar",
        "text",
    ),
    *("rs_" + "a" * 24, "fc_" + "a" * 24 + "_7", "msg_" + "a" * 24, "resp_" + "a" * 24, handle_of(A)),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 30) | st.text(max_size=2) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(st.sampled_from(NAMES), ANYTHING), item=ANYTHING, tool=ANYTHING)
def test_any_json_is_read_or_refused(
    body: dict[str, Any], item: Any, tool: Any, renderer: ChatRenderer
) -> None:
    recorded = turn(A, [Message("user", "q")], FULL)
    for asked in (body, {**body, "input": [item]}, {"input": [item], "tools": [SEARCH, tool]}):
        DIALECT.referenced_turn(asked)
        try:
            read(asked, Forest([recorded]))
        except RequestError as error:
            assert error.status == 400
        else:
            DIALECT.answer(asked, [completed(recorded)], renderer.tokenizer)
            streamed_to_end = writer(asked, recorded, renderer)
            assert streamed_to_end.start() and streamed_to_end.finish([completed(recorded)])


# Replays


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SOME_TEXT = TEXT.filter(lambda text: bool(text.strip()))
STYLES = ["previous", "items", "no ids", "handles", "references", "sdk", "streamed"]


@st.composite
def replies(draw: st.DrawFn) -> Message:
    arguments = st.dictionaries(TEXT, st.integers() | TEXT, max_size=2).map(json.dumps)
    names = draw(st.lists(st.sampled_from(["search", "apply_patch"]), max_size=2))
    calls = tuple(ToolCall(f"call_{draw(st.uuids())}", name, draw(arguments)) for name in names)
    return Message("assistant", draw(TEXT), draw(TEXT), calls)


def news_after(reply: Message, texts: list[str]) -> list[dict[str, Any]]:
    """What the client adds after a reply: the outputs of its calls, or a user message."""
    if not reply.tool_calls:
        return [user(texts[0])]
    kinds = {"search": "function_call_output", "apply_patch": "custom_tool_call_output"}
    return [
        {"type": kinds[call.name], "call_id": call.id, "output": text}
        for call, text in zip(reply.tool_calls, texts, strict=False)
    ]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=25, deadline=None)
@given(
    recorded=st.lists(replies(), min_size=1, max_size=4),
    texts=st.lists(SOME_TEXT, min_size=10, max_size=10),
    instructions=st.sampled_from([None, "Be brief."]),
)
def test_a_replayed_conversation_reads_as_it_was_recorded(
    recorded: list[Message], texts: list[str], style: str, instructions: str | None, renderer: ChatRenderer
) -> None:
    """However a client sends a conversation back, it is read as the history, the reply and the new items."""
    forest = Forest()
    body: dict[str, Any] = {"instructions": instructions, "tools": [SEARCH, PATCH]}
    given: list[dict[str, Any]] = [user(texts[0])]
    history: list[Message] = [] if instructions is None else [Message("system", instructions)]
    history.append(Message("user", texts[0]))
    handles: list[str] = []
    parent, sent = None, 0
    for number, reply in enumerate(recorded):
        request = read({**body, "input": given}, forest)
        assert [canonical_key(m) for m in request.messages] == [canonical_key(m) for m in history]
        seen = [m for m in request.messages if m.role == "assistant"]
        assert [m.handle for m in seen] == handles
        for replayed, original in zip(seen, recorded, strict=False):
            assert [c.id for c in replayed.tool_calls] == [c.id for c in original.tool_calls]
            assert replayed.reasoning in ("", original.reasoning)
        turn_id = f"chatcmpl-{number:024x}"
        done = turn(turn_id, history[sent:], reply, parent=parent, has_instructions=instructions is not None)
        forest.record(done)
        answered_items = answer(body, done, renderer)["output"]
        news = news_after(reply, texts)
        handles.append(turn_id)
        if style == "previous":
            body["previous_response_id"] = wire_id(turn_id, "resp_")
            given = []
        elif style == "items":
            given = given + answered_items
        elif style == "no ids":
            given = given + [without_ids(item) for item in answered_items if item["type"] != "reasoning"]
            handles[-1] = ""
        elif style == "handles":
            given = given + [without_ids(item) for item in answered_items]
            handles[-1] = turn_id if reply.reasoning else ""
        elif style == "references":
            given = given + [{"type": "item_reference", "id": item["id"]} for item in answered_items]
        elif style == "sdk":
            parsed = Response.model_validate({**answer(body, done, renderer)})
            given = given + [item.model_dump(mode="json") for item in parsed.output]
        else:
            given = given + streamed(body, done, renderer)[-1]["response"]["output"]
        given = given + news
        parent, sent = turn_id, len(history) + 1
        history = [*history, reply, *messages_of(news)]
    request = read({**body, "input": given}, forest)
    assert [canonical_key(m) for m in request.messages] == [canonical_key(m) for m in history]
    assert forest.continuation(request.messages).parent is forest[parent]  # type: ignore[index]
