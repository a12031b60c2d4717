"""A weather agent on AutoGen's AgentChat: an AssistantAgent with one tool, which keeps the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

MODEL_INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


async def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask one question after the other; the agent keeps the conversation."""
    client = OpenAIChatCompletionClient(model="policy", model_info=MODEL_INFO)
    agent = AssistantAgent(
        "forecaster",
        model_client=client,
        model_client_stream=stream,
        tools=[weather],
        max_tool_iterations=10,
        reflect_on_tool_use=True,
        system_message="You are a weather assistant. Look the forecast up before you answer.",
    )
    try:
        for question in questions:
            result = await agent.run(task=question)
    finally:
        await client.close()
    return str(result.messages[-1].content)


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
