"""A weather agent on Deep Agents: `create_deep_agent`, with its planning, files and sub-agents, and one tool.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str]) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    agent = create_deep_agent(
        model=ChatOpenAI(model="policy"),
        tools=[weather],
        system_prompt="You are a weather assistant. Look the forecast up before you answer.",
    )
    messages: list[Any] = []
    for question in questions:
        messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
    return messages[-1].text


if __name__ == "__main__":
    print(run(sys.argv[1:]))
