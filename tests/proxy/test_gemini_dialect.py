"""How the dialect of Google's API reads requests, and that a refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.fields import ignored_fields
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.gemini.dialect import Gemini
from areal_agents.proxy.dialects.gemini.schemas import json_schema
from areal_agents.proxy.dialects.gemini.signatures import signature_of, turn_of_signature
from areal_agents.proxy.dialects.gemini.urls import endpoint_of, upstream_call, url_fields

DIALECT = Gemini()
CONTEXT = ReadContext(max_messages=50, label="main", forest=Forest())
USER = {"role": "user", "parts": [{"text": "Where is Lyon?"}]}
SEARCH = {"functionDeclarations": [{"name": "search"}, {"name": "read"}]}
THREE = [SEARCH, {"functionDeclarations": [{"name": "write"}]}]
TURN = "chatcmpl-" + "ab" * 12


def read(*contents: Any, **fields: Any) -> ModelRequest:
    return DIALECT.read({"contents": list(contents) or [USER], **fields}, CONTEXT)


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"q": 1}} | ({"id": call_id} if call_id else {})}


def result(name: str, call_id: str | None = None, response: Any = None) -> dict[str, Any]:
    made = {"name": name, "response": {"output": "x"} if response is None else response}
    return {"functionResponse": made | ({"id": call_id} if call_id else {})}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def test_contents_with_either_spelling_of_names_become_messages() -> None:
    signed = {"thought_signature": signature_of(TURN)}
    request = read(
        USER,
        model({"text": "hm", "thought": True}, {"text": "I "} | signed),
        model({"text": "look."}, {"function_call": {"id": "c1", "name": "search", "args": {"q": "é"}}}),
        user({"function_response": {"id": "c1", "name": "search", "response": {"result": 1}}}, {"text": "a"}),
        {"parts": [{"text": "b"}, {"text": "c"}]},
        system_instruction={"parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
    )
    assert request.messages == (
        Message("system", "Be brief.\nBe kind."),
        Message("user", "Where is Lyon?"),
        Message("assistant", "I look.", "hm", (ToolCall("c1", "search", '{"q": "é"}'),)),
        Message("tool", '{"result": 1}', tool_call_id="c1", name="search"),
        Message("user", "a"),
        Message("user", "b\nc"),
    )
    assert request.messages[2].handle == TURN and request.label == "main"
    assert read("Hi", systemInstruction="Be brief.").messages == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
    )


def test_results_without_ids_answer_calls_by_name_and_order() -> None:
    """A result is for the last reply with such a call, which may be several contents, then earlier ones."""
    request = read(
        USER,
        model(call("read", "r0")),
        model(call("search", "s1")),
        user({"text": "wait"}),
        model(call("search", "s2")),
        model(call("read", "r1"), call("search", "s3")),
        user(result("search"), result("read"), result("search", "s3"), result("search")),
    )
    assert [m.tool_call_id for m in request.messages if m.role == "tool"] == ["s2", "r1", "s3", "s1"]
    with pytest.raises(RequestError, match="no content before it has an unanswered functionCall") as caught:
        read(USER, model(call("search", "s1")), user(result("search"), result("search")))
    assert caught.value.code == "invalid_conversation"


def test_results_of_calls_without_ids_have_none() -> None:
    request = read(USER, model(call("search"), call("search")), user(result("search"), result("search")))
    assert [m.tool_call_id for m in request.messages[2:]] == [None, None]


@pytest.mark.parametrize(
    ("response", "text"),
    [({"output": "plain"}, "plain"), ({"output": {"a": 1}}, '{"a": 1}'), ({"error": "é"}, '{"error": "é"}'),
     ({"output": "a", "error": "b"}, '{"output": "a", "error": "b"}'), ({}, "{}")],
)  # fmt: skip
def test_a_tool_message_has_the_output_or_the_whole_response(response: Any, text: str) -> None:
    request = read(USER, model(call("search", "c")), user(result("search", "c", response)))
    assert request.messages[-1].content == text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("auto", ())),
        ({"mode": "AUTO"}, ("auto", ())),
        ({"mode": "validated", "allowedFunctionNames": ["read", "search"]}, ("auto", ())),
        ({"mode": "NONE"}, ("none", ())),
        ({"mode": "ANY"}, ("required", ())),
        ({"mode": "ANY", "allowedFunctionNames": ["read"]}, ("required", ("read",))),
        ({"mode": "ANY", "allowed_function_names": ["read", "search"]}, ("required", ())),
    ],
)
def test_all_modes_of_function_calling_are_read(config: Any, expected: Any) -> None:
    request = read(tools=[SEARCH], tool_config={"function_calling_config": config})
    assert (request.calls, request.callable_tools) == expected


def test_mode_any_may_be_limited_to_several_functions() -> None:
    config = {"mode": "ANY", "allowedFunctionNames": ["write", "search"]}
    request = read(tools=THREE, toolConfig={"functionCallingConfig": config})
    assert (request.calls, request.callable_tools) == ("required", ("search", "write"))
    with pytest.raises(RequestError, match="needs mode ANY"):
        read(tools=THREE, toolConfig={"functionCallingConfig": config | {"mode": "AUTO"}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [USER] * 51}, "contents"),
        ({"contents": [7]}, "contents[0]"),
        ({"contents": [USER, model({"text": "The"})]}, "contents"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": 7}]}, "contents[0].parts"),
        ({"contents": [user({"inline_data": {}})]}, "contents[0].parts[0].inlineData"),
        ({"contents": [user({"text": 7})]}, "contents[0].parts[0].text"),
        ({"contents": [user({})]}, "contents[0].parts[0]"),
        ({"contents": [user(call("search"))]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model({"functionCall": {}}), USER]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [user({"functionResponse": {}})]}, "contents[0].parts[0].functionResponse.name"),
        ({"systemInstruction": 7}, "systemInstruction"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"google_search": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        ({"generationConfig": {"candidateCount": 200}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        (
            {"generationConfig": {"responseMimeType": "text/plain", "responseSchema": {}}},
            "generationConfig.responseMimeType",
        ),
        (
            {"generationConfig": {"responseSchema": {}, "responseJsonSchema": {}}},
            "generationConfig.responseJsonSchema",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"includeThoughts": 7}}},
            "generationConfig.thinkingConfig.includeThoughts",
        ),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
    ],
)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields) if "contents" not in fields else DIALECT.read(fields, CONTEXT)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_googles_schemas_become_json_schema() -> None:
    schema = {
        "type": "OBJECT", "property_ordering": ["b", "a"], "required": ["a"], "example": {},
        "properties": {
            "a": {"type": "STRING", "nullable": True, "format": "enum", "enum": ["x", "NULL"]},
            "b": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int64"}, "minItems": "2"},
            "type": {"type": "NUMBER", "nullable": True},
        },
    }  # fmt: skip
    found = json_schema(schema)
    assert found == {
        "type": "object",
        "required": ["a"],
        "properties": {
            "b": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "a": {"anyOf": [{"type": "string", "enum": ["x", "NULL"]}, {"type": "null"}]},
            "type": {"type": ["number", "null"]},
        },
    }
    assert list(found["properties"]) == ["b", "a", "type"]
    assert json_schema(found) == found


@pytest.mark.parametrize("count", ["9" * 5_000, "-1", "٣", "2.5", ""])
def test_a_count_that_is_not_a_64_bit_integer_is_left_unchanged(count: str) -> None:
    schema = {"type": "ARRAY", "items": {}, "minItems": count}
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    output = read(generationConfig=config).output
    assert output is not None and json.loads(output.text) == {**schema, "type": "array"}


def test_a_signature_identifies_its_turn() -> None:
    assert turn_of_signature(signature_of(TURN)) == TURN
    for foreign in ("skip_thought_signature_validator", "", "é", None, 7, "A" * 10_000):
        assert turn_of_signature(foreign) is None
    body = {"contents": [USER, model({"text": "a", "thoughtSignature": signature_of(TURN)}), 7, USER]}
    assert DIALECT.referenced_turn(body) == TURN
    assert DIALECT.referenced_turn({"contents": "x"}) is None


def test_urls_name_the_model_the_method_and_the_form_of_a_stream() -> None:
    path = "/v1/models/org/a:b:streamGenerateContent"
    endpoint = "/v1beta/models/{model}:streamGenerateContent"
    assert endpoint_of(path) == endpoint and endpoint_of("/v1/messages") == "/v1/messages"
    fields = url_fields(path, {"alt": "sse"})
    assert fields == {"model": "org/a:b", "stream": True, "alt": "sse"} and url_fields("/v1/x:y", {}) == {}
    assert upstream_call(endpoint, {"contents": [], **fields}, "judge") == (
        "/models/judge:streamGenerateContent?alt=sse",
        {"contents": []},
    )
    assert upstream_call("/v1/messages", {"model": "x"}, "judge") == ("/messages", {"model": "judge"})


def test_fields_without_effect_are_listed() -> None:
    config = {"mediaResolution": "LOW", "temperature": 1, "thinking_config": {"thinkingBudget": 5}}
    body = {"contents": "x", "safety_settings": [1], "generation_config": config, "model": "m", "alt": "sse"}
    assert ignored_fields("gemini", body) == (
        "generationConfig.mediaResolution",
        "generationConfig.thinkingConfig.thinkingBudget",
        "safetySettings",
    )
