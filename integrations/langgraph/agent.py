"""A weather agent on LangGraph: `create_agent`, which builds the graph, with ChatOpenAI and one tool.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(
    questions: Sequence[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    api: Literal["chat", "responses"] = "chat",
    stream: bool = False,
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    model = ChatOpenAI(
        model="policy",
        base_url=base_url,
        api_key=api_key,  # type: ignore[arg-type]
        use_responses_api=api == "responses",
        streaming=stream,
    )
    prompt = "You are a weather assistant. Look the forecast up before you answer."
    graph = create_agent(model, [weather], system_prompt=prompt)
    messages: list[Any] = []
    for question in questions:
        messages = graph.invoke({"messages": [*messages, ("user", question)]})["messages"]
    return messages[-1].text


if __name__ == "__main__":
    print(run(sys.argv[1:]))
