"""A weather agent on Microsoft's Agent Framework: an Agent with one tool, and a session for the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], api: str, stream: bool) -> str:
    """Ask one question after the other in one session; the last answer."""
    client = OpenAIChatClient if api == "responses" else OpenAIChatCompletionClient
    agent = Agent(
        client=client(model="policy"),
        instructions="You are a weather assistant. Look the forecast up before you answer.",
        tools=[weather],
    )
    session = agent.create_session()
    answer = ""
    for question in questions:
        if stream:
            answer = ""
            async for update in agent.run(question, session=session, stream=True):
                answer += update.text or ""
        else:
            answer = (await agent.run(question, session=session)).text
    return answer


def run(
    questions: Sequence[str], *, api: Literal["responses", "chat"] = "responses", stream: bool = False
) -> str:
    """`converse` on an event loop of its own. OpenAIChatClient, the default, calls the Responses API."""
    return asyncio.run(converse(questions, api, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
