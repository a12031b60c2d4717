"""A weather agent on the Anthropic SDK: a tool loop over the Messages API, with thinking.

python agent.py "Do I need an umbrella in Zürich?"      (ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from anthropic import Anthropic

INSTRUCTIONS = "You are a weather assistant. Look the forecast up before you answer."
WEATHER = {
    "name": "weather",
    "description": "The forecast of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        "required": ["city", "days"],
    },
}


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(
    questions: Sequence[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    stream: bool = False,
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    messages: list[Any] = []
    reply: Any = None
    with Anthropic(base_url=base_url, api_key=api_key) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            while True:
                options: Any = {
                    "model": "policy",
                    "max_tokens": 2048,
                    "system": INSTRUCTIONS,
                    "messages": messages,
                }
                options |= {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
                if stream:
                    with client.messages.stream(**options) as events:
                        reply = events.get_final_message()
                else:
                    reply = client.messages.create(**options)
                messages.append({"role": "assistant", "content": reply.content})
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
    return "".join(block.text for block in reply.content if block.type == "text")


if __name__ == "__main__":
    print(run(sys.argv[1:]))
