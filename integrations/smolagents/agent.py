"""A weather agent on smolagents: a CodeAgent, which writes Python, or a ToolCallingAgent, with one tool.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str, days: float) -> str:
    """The forecast of a city.

    Args:
        city: The city.
        days: The number of days.
    """
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str], *, calls: Literal["code", "tools"] = "code") -> str:
    """Ask one question after the other in one conversation; the last answer."""
    kind = CodeAgent if calls == "code" else ToolCallingAgent
    agent = kind(tools=[weather], model=OpenAIModel(model_id="policy"), verbosity_level=0)
    answer = ""
    for question in questions:
        answer = str(agent.run(question, reset=question == questions[0]))
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
