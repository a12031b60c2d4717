"""An agent that computes with Python: ask the model, run the programs that it wants, compare its answer.

`python agent.py "Ann has 347 pens and buys 58 boxes of 24. How many pens now?"` asks the model behind
OPENAI_BASE_URL and shows the turns; `areal-agents train config.yaml` trains that model.
"""

from __future__ import annotations

import asyncio
import json
import sys

from calculating import opening
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat.chat_completion_message_function_tool_call import Function
from python_tool import PYTHON_TOOL, PythonTool

from areal_agents import Episode, episode
from areal_agents.rewards import MathChecks

MAX_MODEL_CALLS = 4
HTTP = DefaultAsyncHttpxClient(timeout=600)  # one for all episodes: opening another takes 20 ms
CHECKS = MathChecks(processes=2, time_s=5.0)


@episode
async def calculating_agent(task: dict, ep: Episode) -> float:
    """1.0 if the answer in the box is right and worked out, else 0.0."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    reply = await converse(client, opening(task["question"]))
    if reply is None:
        return 0.0
    # For math-verify 347+58*24 is 1739 as well, so a model could be paid without computing anything.
    return await asyncio.to_thread(CHECKS.equal, reply, str(task["answer"]), worked_out=True)


async def converse(client: AsyncOpenAI, messages: list[dict]) -> str | None:
    """Extend `messages` until the model answers; None if it only called Python for MAX_MODEL_CALLS calls."""
    tool = PythonTool()
    try:
        for _ in range(MAX_MODEL_CALLS):
            response = await client.chat.completions.create(
                model="policy", messages=messages, tools=[PYTHON_TOOL]
            )
            reply = response.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return reply.content or ""
            for call in reply.tool_calls:
                result = await _result(tool, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None
    finally:
        await tool.end()


async def _result(tool: PythonTool, function: Function) -> str:
    """The result of a call; a call that cannot be run is told so, for the policy to do better."""
    if function.name != PYTHON_TOOL["function"]["name"]:
        return f"Error: there is no tool {function.name}; the tool is python."
    arguments = json.loads(function.arguments)
    return await tool.run(arguments.get("code") if isinstance(arguments, dict) else None)


if __name__ == "__main__":
    conversation = opening(" ".join(sys.argv[1:]))
    asyncio.run(converse(AsyncOpenAI(), conversation))
    print(*(json.dumps(message, ensure_ascii=False) for message in conversation), sep="\n")
