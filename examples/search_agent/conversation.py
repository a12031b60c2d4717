"""What the policy sees and says: the instructions, the tool and the limits.

agent.py and make_model.py share this module, so the starting policy is trained on exactly the
conversations that the agent holds.
"""

from __future__ import annotations

import json
from typing import Any

SYSTEM_PROMPT = "You are a search agent. Search for facts, then reply with the short answer only."

SEARCH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}

MAX_MODEL_CALLS = 4
MAX_TOKENS = 48  # of one model call


def opening(question: str) -> list[dict[str, Any]]:
    """The messages that an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def call_text(query: str) -> str:
    """How the model writes a search: the Qwen3 form of a tool call."""
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>\n{call}\n</tool_call>"
