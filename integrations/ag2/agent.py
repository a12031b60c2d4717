"""A weather agent on AG2: an Agent with one tool, whose replies continue the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from ag2 import Agent, tool
from ag2.config import OpenAIConfig


@tool
async def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask the first question, and each further one in reply to the answer."""
    agent = Agent(
        "forecaster",
        prompt="You are a weather assistant. Look the forecast up before you answer.",
        config=OpenAIConfig(model="policy", streaming=stream),
        tools=[weather],
    )
    reply = await agent.ask(questions[0])
    for question in questions[1:]:
        reply = await reply.ask(question)
    return str(reply.body)


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
