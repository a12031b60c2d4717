"""A weather agent on the bare OpenAI SDK: a loop over chat completions, or over the Responses API.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel

INSTRUCTIONS = "You are a weather assistant. Look the forecast up before you answer."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "The forecast of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}


class Advice(BaseModel):
    """What the traveller is told, where the answer is an object."""

    umbrella: bool
    why: str


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(
    questions: Sequence[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    api: Literal["chat", "parse", "responses", "previous_response"] = "chat",
    stream: bool = False,
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        if api == "parse":
            return run_parse(client, questions)
        if api == "chat":
            return run_chat(client, questions, stream)
        return run_responses(client, questions, api, stream)


def run_chat(client: OpenAI, questions: Sequence[str], stream: bool) -> str:
    """Chat completions: the whole conversation is sent at every call."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    message: Any = None
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            options: Any = {
                "model": "policy",
                "messages": messages,
                "tools": [{"type": "function", "function": WEATHER}],
            }
            if stream:
                with client.chat.completions.stream(**options) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**options).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


def run_parse(client: OpenAI, questions: Sequence[str]) -> str:
    """Chat completions whose answers are objects of a class; they have no tools."""
    messages: list[Any] = []
    parsed: Advice | None = None
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.parse(model="policy", messages=messages, response_format=Advice)
        message = reply.choices[0].message
        messages.append(message)
        parsed = message.parsed
    return str(parsed)


def run_responses(client: OpenAI, questions: Sequence[str], api: str, stream: bool) -> str:
    """Responses: earlier output is sent back, or named by `previous_response_id`."""
    items: list[Any] = []
    response: Any = None
    for question in questions:
        items.append({"role": "user", "content": question})
        while True:
            options: Any = {"model": "policy", "input": items, "instructions": INSTRUCTIONS}
            options["tools"] = [{"type": "function", **WEATHER}]
            if api == "previous_response" and response is not None:
                options["previous_response_id"] = response.id
            if stream:
                with client.responses.stream(**options) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(**options)
            items = [] if api == "previous_response" else [*items, *response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                result = weather(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return response.output_text


if __name__ == "__main__":
    print(run(sys.argv[1:]))
