"""A travel desk on the OpenAI Agents SDK: a forecaster is an agent as a tool, a clerk takes handoffs.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Literal

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


@function_tool
def book(hotel: str) -> str:
    """Book a hotel."""
    return f"booked: {hotel}"


def travel_desk() -> Agent[None]:
    """The agent that is asked, with its sub-agents."""
    forecaster = Agent[None](name="Forecaster", instructions="You look forecasts up.", tools=[weather])
    clerk = Agent[None](name="Clerk", instructions="You book hotels.", tools=[book])
    return Agent[None](
        name="Desk",
        instructions="You advise travellers. Ask the forecaster about the weather; bookings go to the clerk.",
        tools=[forecaster.as_tool("ask_forecaster", "Ask about the weather.")],
        handoffs=[clerk],
    )


async def converse(
    questions: Sequence[str], client: AsyncOpenAI, api: Literal["responses", "chat"], stream: bool
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    provider = OpenAIProvider(openai_client=client, use_responses=api == "responses")
    config = RunConfig(model_provider=provider, model="policy", tracing_disabled=True)
    agent, result = travel_desk(), None
    history: list[Any] = []
    for question in questions:
        history.append({"role": "user", "content": question})
        if stream:
            result = Runner.run_streamed(agent, history, run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history, run_config=config)
        agent, history = result.last_agent, result.to_input_list()
    return str(result.final_output)


def run(
    questions: Sequence[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    api: Literal["responses", "chat"] = "responses",
    stream: bool = False,
) -> str:
    """`converse` with a client of its own. `api` "chat" takes the SDK's OpenAIChatCompletionsModel."""

    async def main() -> str:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            return await converse(questions, client, api, stream)

    return asyncio.run(main())


if __name__ == "__main__":
    print(run(sys.argv[1:]))
