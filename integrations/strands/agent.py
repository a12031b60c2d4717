"""A weather agent on Strands Agents: an Agent with one tool, which streams and keeps the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str]) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    agent = Agent(
        model=OpenAIModel(model_id="policy"),
        tools=[weather],
        system_prompt="You are a weather assistant. Look the forecast up before you answer.",
        callback_handler=None,  # which would print the pieces of the answers
    )
    answer = ""
    for question in questions:
        answer = str(agent(question))
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
