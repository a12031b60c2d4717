"""Writes the Response object and its output items, as `openai.types.responses` defines them.

They are plain dicts, because the object repeats fields of the request as they are. All ids are derived from
the id of the turn, so a reply has the same ids whether it is streamed or not, and no table of ids is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from areal_agents.core.completion import Completion
from areal_agents.core.messages import ToolCall
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.responses.items import ItemKind, item_id
from areal_agents.proxy.dialects.responses.tools import ClientTool, client_tools, custom_input
from areal_agents.proxy.dialects.turn_ids import handle_of, wire_id
from areal_agents.proxy.dialects.writing import TokenTexts, model_name
from areal_agents.rendering import Tokenizer

Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# The fields of the request that the Response object repeats, and their defaults.
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the request asks for the logprobs of the text."""
    return "message.output_text.logprobs" in (body.get("include") or ())


def reasoning_item(turn_id: str, text: str, status: Status, piece: int = 0) -> Item:
    """Return a reasoning item with the text as its summary, which every client shows and replays."""
    return {
        "id": item_id(turn_id, "reasoning", piece),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if text else [],
        "encrypted_content": handle_of(turn_id),
        "status": status,
    }


def text_part(text: str, logprobs: list[Item]) -> Item:
    """Return the content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(turn_id: str, parts: list[Item], status: Status, piece: int = 0) -> Item:
    """Return an assistant message item."""
    return {
        "id": item_id(turn_id, "message", piece),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": parts,
    }


def call_item(turn_id: str, index: int, call: ToolCall, tools: Mapping[str, ClientTool]) -> Item:
    """Return the item of the `index`-th call of a reply; `tools` are those of `client_tools`."""
    tool = tools.get(call.name) or ClientTool(call.name)
    kind: ItemKind = "custom_tool_call" if tool.is_custom else "function_call"
    item = {"id": item_id(turn_id, kind, index), "type": kind, "call_id": call.id, "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if kind == "custom_tool_call":
        return {**item, "input": custom_input(call.arguments), "status": "completed"}
    return {**item, "arguments": call.arguments, "status": "completed"}


def output_items(body: Mapping[str, Any], done: CompletedTurn, tokens: list[Item]) -> list[Item]:
    """Return the output items of a recorded turn: reasoning, text with the logprobs `tokens`, and calls.

    Without a call there is always a message, even if it is empty. A message that the length limit cut off has
    status "incomplete".
    """
    reply, turn_id = done.turn.reply, done.turn.id
    out: list[Item] = []
    if reply.reasoning:
        out.append(reasoning_item(turn_id, reply.reasoning, "completed"))
    if reply.content or not reply.tool_calls:
        part = text_part(reply.content, tokens)
        cut = done.finish_reason == "length" and not reply.tool_calls
        out.append(message_item(turn_id, [part], "incomplete" if cut else "completed"))
    if reply.tool_calls:
        tools = client_tools(body)
        out += [call_item(turn_id, index, call, tools) for index, call in enumerate(reply.tool_calls)]
    return out


def logprobs(body: Mapping[str, Any], completion: Completion, tokenizer: Tokenizer) -> list[Item]:
    """Return one entry for each sampled token if the request asks for logprobs, else []."""
    if not wants_logprobs(body):
        return []
    return TokenTexts(tokenizer).entries(completion)


def response(
    body: Mapping[str, Any], turn_id: str, created_at: float, status: Status, **fields: Any
) -> dict[str, Any]:
    """Return a Response object with a status; `fields` replace those of a response that has just begun."""
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    return {
        "id": wire_id(turn_id, "resp_"),
        "object": "response",
        "created_at": int(created_at),
        "status": status,
        "model": model_name(body),
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tools": [_echoed_tool(tool) for tool in body.get("tools") or ()],
        **echoed,
        **fields,
    }


def ended_response(
    body: Mapping[str, Any], created_at: float, done: CompletedTurn, output: list[Item]
) -> dict[str, Any]:
    """Return the Response object of a recorded turn, which is complete or cut off by the length limit."""
    turn_id, usage = done.turn.id, _usage(done)
    if done.finish_reason == "length":
        details = {"reason": "max_output_tokens"}
        return response(
            body, turn_id, created_at, "incomplete", output=output, usage=usage, incomplete_details=details
        )
    ended = int(done.created_at)
    return response(body, turn_id, created_at, "completed", output=output, usage=usage, completed_at=ended)


def _usage(done: CompletedTurn) -> dict[str, Any]:
    sampled = len(done.turn.completion)
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {
            "reasoning_tokens": 0
        },  # reasoning is recognised in the text, so its tokens are not counted
        "total_tokens": done.prompt_tokens + sampled,
    }


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return dict(tool)
    return {"description": None, "parameters": None, "strict": None, **tool}
