"""A weather agent on Pydantic AI: one tool, and an answer of a declared type.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Advice(BaseModel):
    """What the traveller is told."""

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
    api: Literal["responses", "chat"] = "responses",
    stream: bool = False,
    structured: bool = True,
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
    agent = Agent(
        kind("policy", provider=provider),
        output_type=Advice if structured else str,
        instructions="You are a weather assistant. Look the forecast up before you answer.",
        tools=[weather],
    )
    history: list[ModelMessage] = []
    answer = ""
    for question in questions:
        if stream:
            result = agent.run_stream_sync(question, message_history=history)
            answer = str(result.get_output())
        else:
            result = agent.run_sync(question, message_history=history)
            answer = str(result.output)
        history = result.all_messages()
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
