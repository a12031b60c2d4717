"""What the policy sees, and its limits: the instructions and the tool.

agent.py and make_model.py share this module, so the starting policy is trained on exactly the
conversations that the agent holds.
"""

from __future__ import annotations

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
