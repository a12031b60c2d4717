"""A weather crew on CrewAI: one agent with one tool, and a task for each question, in sequence.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
from crewai import LLM, Agent, Crew, Task  # noqa: E402
from crewai.tools import tool  # noqa: E402


@tool("weather")
def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """Give the crew a task for each question; the answer of the last one."""
    forecaster = Agent(
        role="Weather assistant",
        goal="Advise travellers about the weather",
        backstory="You look the forecast up before you answer.",
        llm=LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], stream=stream),
        tools=[weather],
    )
    tasks = [
        Task(description=question, expected_output="Advice in one sentence", agent=forecaster)
        for question in questions
    ]
    return str(Crew(agents=[forecaster], tasks=tasks).kickoff())


if __name__ == "__main__":
    print(run(sys.argv[1:]))
