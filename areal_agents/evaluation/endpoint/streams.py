"""Puts the reply of a streamed chat completion together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StreamedReply:
    """The message of the first choice, and the usage, from the chunks of a stream; `has_ended` once it has a
    finish reason."""

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] = {}
        self.has_ended = False
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Mapping[str, Any]) -> bool:
        """Add a chunk; return whether it has nothing but the usage."""
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.has_ended = self.has_ended or choice.get("finish_reason") is not None
            for name in ("content", "reasoning_content", "refusal"):
                if delta.get(name):
                    self._texts[name] = self._texts.get(name, "") + delta[name]
            for part in delta.get("tool_calls") or ():
                self._add_call(part)
        return not chunk.get("choices") and bool(chunk.get("usage"))

    def message(self) -> dict[str, Any]:
        """Return the message so far, in the form of an answer that is not streamed."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        message: dict[str, Any] = {"role": "assistant", "content": self._texts.get("content")}
        message |= {name: text for name, text in self._texts.items() if name != "content"}
        return message | ({"tool_calls": calls} if calls else {})

    def _add_call(self, part: Mapping[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(int(part.get("index") or 0), empty)
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
