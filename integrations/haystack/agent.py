"""A weather agent on Haystack: the Agent component with one tool.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def weather(city: Annotated[str, "The city."], days: Annotated[float, "The number of days."]) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    agent = Agent(
        chat_generator=OpenAIChatGenerator(model="policy", timeout=600),
        tools=[weather],
        streaming_callback=(lambda chunk: None) if stream else None,
    )
    told = "You are a weather assistant. Look the forecast up before you answer."
    messages = [ChatMessage.from_system(told)]
    for question in questions:
        messages.append(ChatMessage.from_user(question))
        messages = agent.run(messages=messages)["messages"]
    return messages[-1].text or ""


if __name__ == "__main__":
    print(run(sys.argv[1:]))
