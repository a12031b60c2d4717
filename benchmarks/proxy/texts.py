"""The messages of the benchmark's agents and model: prose and Python from the standard library, cut to
length.

Every reply consists of a little reasoning, some text and one tool call, as is typical of agents.
"""

from __future__ import annotations

import asyncio
import pydoc_data.topics
from pathlib import Path
from typing import Any

from areal_agents.rendering import Tokenizer

ARGUMENTS = '{"path": "src/service/handlers.py", "first_line": 120, "last_line": 180}'
_CALL = f'\n<tool_call>\n{{"name": "read_lines", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
_POOL = 64  # number of different texts of the same length

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "A path relative to the repository's root."},
                    "first_line": {"type": "integer"},
                    "last_line": {"type": "integer"},
                },
                "required": ["path"],
            },
        },
    }
    for name, description in (
        ("read_lines", "Read lines of a file."),
        ("search", "Search a file for a regular expression and show the lines around each hit."),
        ("write_lines", "Replace lines of a file and run the formatter over it."),
    )
]


class Texts:
    """Texts and replies of chosen lengths in tokens, the same in every run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        topics = pydoc_data.topics.topics
        self._prose = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
        modules = sorted(Path(asyncio.__file__).parent.glob("*.py"))
        self._code = tokenizer.encode("\n".join(path.read_text() for path in modules))

    def prose(self, tokens: int) -> str:
        """Return a text of about `tokens` tokens."""
        return self._tokenizer.decode(self._prose[:tokens])

    def results(self, tokens: int) -> list[str]:
        """Different texts of about `tokens` tokens, such as a tool that reads files returns."""
        step = max(1, (len(self._code) - tokens) // _POOL)
        return [self._tokenizer.decode(self._code[i * step : i * step + tokens]) for i in range(_POOL)]

    def reply(self, tokens: int, *, reasoning: bool = True) -> dict[str, Any]:
        """The sampled ids [tokens] and their texts [tokens], and the chat message that they mean."""
        opening = "<think>\n" if reasoning else ""
        closing = "\n</think>\n\n" if reasoning else ""
        marks = [self._tokenizer.encode(mark) for mark in (opening, closing, _CALL)]
        room = tokens - sum(len(mark) for mark in marks)
        if room < 2:
            raise ValueError(f"a reply with a tool call needs more than {tokens} tokens")
        thought = self._prose[1000 : 1000 + room * 2 // 5] if reasoning else []
        said = self._prose[3000 : 3000 + room - len(thought)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._tokenizer.decode(said).strip(),
            "tool_calls": [
                {
                    "id": "call_0123456789abcdef01234567",
                    "type": "function",
                    "function": {"name": "read_lines", "arguments": ARGUMENTS},
                }
            ],
        }
        if reasoning:
            message["reasoning_content"] = self._tokenizer.decode(thought).strip()
        ids = [*marks[0], *thought, *marks[1], *said, *marks[2]]
        return {"ids": ids, "texts": [self._tokenizer.decode([i]) for i in ids], "message": message}
