"""The HTTP API as an OpenAPI document, from which schemathesis generates valid and invalid requests."""

from __future__ import annotations

import re
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 30}
COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": 20}
METADATA: Schema = {"type": "object", "additionalProperties": TEXT, "maxProperties": 3}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _some(items: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": 3}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


PARAMETERS: Schema = _object(
    ["type"], type={"const": "object"}, properties={"const": {"q": {"type": "string"}}}
)
FUNCTION = _object(["name", "parameters"], name={"const": "search"}, description=TEXT, parameters=PARAMETERS)
CALL = _object(
    ["id", "type", "function"],
    id=TEXT,
    type={"const": "function"},
    function=_object(["name", "arguments"], name=TEXT, arguments={"const": "{}"}),
)
CHAT_MESSAGE: Schema = {
    "oneOf": [
        _object(["role", "content"], role=_one_of("system", "developer", "user"), content=TEXT),
        _object(["role"], role={"const": "assistant"}, content=TEXT, tool_calls=_some(CALL, least=1)),
        _object(["role", "content", "tool_call_id"], role={"const": "tool"}, content=TEXT, tool_call_id=TEXT),
    ]
}
SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
    "metadata": METADATA,
}
CHAT = _object(
    ["messages"],
    messages=_some(CHAT_MESSAGE, least=1),
    tools=_some(_object(["type", "function"], type={"const": "function"}, function=FUNCTION)),
    tool_choice=_one_of("auto", "none", "required"),
    max_tokens=COUNT,
    n={"type": "integer", "minimum": 1, "maximum": 3},
    stop={"anyOf": [TEXT, _some(TEXT)]},
    seed={"type": "integer"},
    logprobs={"type": "boolean"},
    top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
    response_format=_object(["type"], type=_one_of("text", "json_object")),
    **SAMPLING,
)
COMPLETION = _object(["prompt"], prompt=TEXT, max_tokens=COUNT, echo={"type": "boolean"}, **SAMPLING)
ITEM: Schema = {
    "oneOf": [
        _object(["role", "content"], role=_one_of("user", "system", "developer", "assistant"), content=TEXT),
        _object(
            ["type", "call_id", "output"],
            type={"const": "function_call_output"},
            call_id=TEXT,
            output=TEXT,
        ),
        _object(["type", "id"], type={"const": "item_reference"}, id=TEXT),
    ]
}
RESPONSE = _object(
    ["input"],
    input={"anyOf": [TEXT, _some(ITEM, least=1)]},
    instructions=TEXT,
    previous_response_id=TEXT,
    max_output_tokens=COUNT,
    tools=_some(
        _object(["type", "name", "parameters"], type={"const": "function"}, name=TEXT, parameters=PARAMETERS)
    ),
    **SAMPLING,
)
BLOCK: Schema = {
    "oneOf": [
        _object(["type", "text"], type={"const": "text"}, text=TEXT),
        _object(["type", "tool_use_id"], type={"const": "tool_result"}, tool_use_id=TEXT, content=TEXT),
        _object(
            ["type", "id", "name", "input"], type={"const": "tool_use"}, id=TEXT, name=TEXT, input=METADATA
        ),
    ]
}
SPOKEN = _object(
    ["role", "content"],
    role=_one_of("user", "assistant"),
    content={"anyOf": [TEXT, _some(BLOCK, least=1)]},
)
MESSAGES = _object(
    ["messages", "max_tokens"],
    messages=_some(SPOKEN, least=1),
    max_tokens=COUNT,
    system=TEXT,
    tools=_some(_object(["name", "input_schema"], name=TEXT, input_schema=PARAMETERS)),
    stop_sequences=_some(TEXT),
    **SAMPLING,
)
PART: Schema = {
    "oneOf": [
        _object(["text"], text=TEXT, thought={"type": "boolean"}, thoughtSignature=TEXT),
        _object(["functionCall"], functionCall=_object(["name"], name=TEXT, id=TEXT, args=METADATA)),
        _object(
            ["functionResponse"], functionResponse=_object(["name"], name=TEXT, id=TEXT, response=METADATA)
        ),
    ]
}
CONTENT = _object(["parts"], role=_one_of("user", "model"), parts=_some(PART, least=1))
DECLARATION = _object(["name"], name=TEXT, description=TEXT, parametersJsonSchema=PARAMETERS)
GENERATION = _object(
    [],
    temperature=SAMPLING["temperature"],
    topP=SAMPLING["top_p"],
    topK=COUNT,
    maxOutputTokens=COUNT,
    candidateCount={"type": "integer", "minimum": 1, "maximum": 3},
    stopSequences=_some(TEXT),
    seed={"type": "integer"},
    responseLogprobs={"type": "boolean"},
    responseMimeType=_one_of("text/plain", "application/json"),
    thinkingConfig=_object([], includeThoughts={"type": "boolean"}),
)
GEMINI = _object(
    ["contents"],
    contents=_some(CONTENT, least=1),
    systemInstruction=CONTENT,
    tools=_some(_object(["functionDeclarations"], functionDeclarations=_some(DECLARATION))),
    generationConfig=GENERATION,
)
EPISODE = _object(
    [],
    task=_object(["id"], id=TEXT, input=METADATA),
    group=TEXT,
    group_size=COUNT,
    surplus=COUNT,
    split=_one_of("train", "eval"),
    metadata=METADATA,
    limits=_object([], max_turns=COUNT, max_tokens=COUNT, time_s={"type": "number", "exclusiveMinimum": 0}),
)
VALUE: Schema = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "object"}]}
REWARD = _object(
    ["reward"], reward=VALUE, name=TEXT, scope=_one_of("episode", "turn", "branch"), completion_id=TEXT
)
POSTS: dict[str, Schema] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1beta/models/{model}:generateContent": GEMINI,
    "/v1beta/models/{model}:streamGenerateContent": GEMINI,
    "/v1beta/models/{model}:countTokens": GEMINI,
    "/v1/embeddings": _object(["input"], input=TEXT, model=TEXT),
    "/episodes": EPISODE,
    "/rewards": REWARD,
    "/episodes/{episode}/reward": REWARD,
    "/episodes/{episode}/finish": _object([], rewards=METADATA),
    "/episodes/{episode}/fail": _object([], error=TEXT, aborted={"type": "boolean"}),
    "/groups/{group}/drop": _object([], reason=TEXT),
}
GETS = (
    "/v1/models",
    "/v1/models/{model}",
    "/v1beta/models",
    "/v1beta/models/{model}",
    "/episodes",
    "/episodes/{episode}",
    "/metrics",
    "/health",
    "/ready",
)
_HEADERS = ("x-stainless-retry-count", "idempotency-key", "x-episode-label", "session-id")


def document() -> Schema:
    """Return the OpenAPI document."""
    paths: dict[str, Schema] = {}
    for path, body in POSTS.items():
        content = {"application/json": {"schema": body}}
        operation = {"requestBody": {"required": True, "content": content}, **_common(path, headers=True)}
        paths.setdefault(path, {})["post"] = operation
    for path in GETS:
        paths.setdefault(path, {})["get"] = _common(path, headers=False)
    return {"openapi": "3.1.0", "info": {"title": "the proxy", "version": "1"}, "paths": paths}


def _common(path: str, *, headers: bool) -> Schema:
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    if headers:
        parameters += [{"name": name, "in": "header", "schema": TEXT} for name in _HEADERS]
    return {"parameters": parameters, "responses": {"default": {"description": "an answer or a refusal"}}}
