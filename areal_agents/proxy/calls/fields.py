"""Finds the fields of a request that have no effect, so that they can be reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_agents.proxy.dialects.gemini.reading import camel, ignored_settings
from areal_agents.proxy.dialects.responses.tools import hosted_tools

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"}
_COMMON = {"model", "stream", "chat_template_kwargs", "enable_thinking", *_SAMPLING}
_HONOURED: Mapping[str, frozenset[str]] = {
    "chat": frozenset(
        {
            *_COMMON, "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "n",
            "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "logit_bias",
            "stream_options", "prompt_cache_key",
        }
    ),
    "completions": frozenset(
        {*_COMMON, "prompt", "max_tokens", "n", "stop", "logprobs", "logit_bias", "stream_options"}
    ),
    "responses": frozenset(
        {
            *_COMMON, "input", "instructions", "previous_response_id", "tools", "tool_choice",
            "parallel_tool_calls", "max_output_tokens", "text", "top_logprobs", "include", "prompt_cache_key",
            "store", "metadata", "stop", "logit_bias",
        }
    ),
    "messages": frozenset(
        {
            *_COMMON, "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences",
            "output_config", "output_format",
        }
    ),
    "gemini": frozenset(
        {
            "model", "stream", "alt", "chatTemplateKwargs", "enableThinking", "contents", "systemInstruction",
            "tools", "toolConfig", "generationConfig",
        }
    ),
}  # fmt: skip


def ignored_fields(dialect: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted names of the request fields that have no effect, except null and empty fields.

    A tool that is left out is listed with its type.
    """
    honoured = _HONOURED[dialect]
    fields = camel(body) if dialect == "gemini" else body
    ignored = {
        name for name, value in fields.items() if name not in honoured and value not in (None, [], {}, "")
    }
    if dialect == "gemini":
        ignored.update(ignored_settings(fields))
    if dialect == "responses":
        ignored.update(f"tools: {kind}" for kind in hosted_tools(body))
    return tuple(sorted(ignored))
