"""A weather agent on Agno: an Agent with one tool, and a database in memory for the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat, OpenAIResponses


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str], *, api: Literal["chat", "responses"] = "chat", stream: bool = False) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    agent = Agent(
        model=OpenAIChat(id="policy") if api == "chat" else OpenAIResponses(id="policy"),
        instructions="You are a weather assistant. Look the forecast up before you answer.",
        tools=[weather],
        db=InMemoryDb(),
        add_history_to_context=True,
        telemetry=False,
    )
    answer = ""
    for question in questions:
        if stream:
            pieces = agent.run(question, session_id="conversation", stream=True)
            answer = "".join(piece.content or "" for piece in pieces if piece.event == "RunContent")
        else:
            answer = str(agent.run(question, session_id="conversation").content)
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
