"""A weather agent on Inspect: an agent of its own that generates until the model calls no more tools.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Literal

from inspect_ai.agent import Agent, AgentState, agent
from inspect_ai.agent import run as run_agent
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, Model, get_model
from inspect_ai.tool import Tool, tool


@tool
def weather() -> Tool:
    async def execute(city: str, days: float) -> str:
        """The forecast of a city.

        Args:
            city: The city.
            days: The number of days.
        """
        return f"{city}, next {days:g} days: rain"

    return execute


@agent
def forecaster(model: Model) -> Agent:
    async def execute(state: AgentState) -> AgentState:
        """Looks forecasts up."""
        messages, state.output = await model.generate_loop(state.messages, tools=[weather()])
        state.messages.extend(messages)
        return state

    return execute


async def converse(questions: Sequence[str], model: Model) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    told = "You are a weather assistant. Look the forecast up before you answer."
    state = AgentState(messages=[ChatMessageSystem(content=told)])
    for question in questions:
        state.messages.append(ChatMessageUser(content=question))
        state = await run_agent(forecaster(model), state)
    return state.output.completion


def run(questions: Sequence[str], *, api: Literal["chat", "responses"] = "responses") -> str:
    """Ask with the "openai/" provider, which calls the Responses API, or with "openai-api/" for chat."""
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    if api == "responses":
        # Otherwise it first asks for "hello, world", to find out whether reasoning is summarised.
        config = GenerateConfig(reasoning_summary="none")
        model = get_model("openai/policy", config=config, **where)
    else:
        model = get_model("openai-api/local/policy", **where)
    return asyncio.run(converse(questions, model))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
