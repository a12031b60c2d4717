"""A weather agent on LiteLLM: a loop over `litellm.completion`.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its prices are not fetched at the import
import litellm  # noqa: E402

WEATHER = {
    "name": "weather",
    "description": "The forecast of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        "required": ["city", "days"],
    },
}


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def complete(messages: list[Any], stream: bool) -> Any:
    """The model's message."""
    options: Any = {"model": "openai/policy", "messages": messages}
    options["tools"] = [{"type": "function", "function": WEATHER}]
    if not stream:
        return litellm.completion(**options).choices[0].message
    chunks = list(litellm.completion(**options, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    told = "You are a weather assistant. Look the forecast up before you answer."
    messages: list[Any] = [{"role": "system", "content": told}]
    message: Any = None
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            message = complete(messages, stream)
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


if __name__ == "__main__":
    print(run(sys.argv[1:]))
