"""A weather agent whose tool comes from an MCP server (weather_server.py), on the OpenAI Agents SDK.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio

SERVER = Path(__file__).with_name("weather_server.py")


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask one question after the other in one conversation, while the server runs; the last answer."""
    async with MCPServerStdio(params={"command": sys.executable, "args": [str(SERVER)]}) as server:
        agent = Agent[None](
            name="Forecaster",
            instructions="You are a weather assistant. Look the forecast up before you answer.",
            model="policy",
            mcp_servers=[server],
        )
        history: list[Any] = []
        for question in questions:
            history.append({"role": "user", "content": question})
            if stream:
                result: Any = Runner.run_streamed(agent, history)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, history)
            history = result.to_input_list()
    return str(result.final_output)


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """`converse` on an event loop of its own."""
    set_tracing_disabled(True)
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
