"""An agent that computes with Python: ask the model, run the programs that it wants, compare its answer.

`python agent.py "Ann has 347 pens and buys 58 boxes of 24. How many pens now?"` asks the model behind
OPENAI_BASE_URL and shows the turns; `areal-agents train config.yaml` trains that model.
"""

from __future__ import annotations

import asyncio
import json
import re
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
    answer = str(task["answer"])
    if reply is None or not is_worked_out(reply, answer):
        return 0.0
    return await asyncio.to_thread(CHECKS.equal, reply, answer)


def is_worked_out(reply: str, answer: str) -> bool:
    """False if the answer is a whole number and the reply has a calculation, such as 347+58*24, instead.

    For math-verify they are equal, so a model could be paid without computing anything.
    """
    if not answer.removeprefix("-").isdecimal():
        return True
    text = re.sub(r"\\(?:text|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?", "", reply)  # units such as cm^2
    text = re.sub(r"(?<=\d)(?:,|\{,\}|\\,|,?\\!)(?=\d{3})", "", text)  # 1,234 is one number
    places = text.split("\\boxed")[1:] or text.strip().splitlines()[-1:]
    return all(len(re.findall(r"\d+(?:\.\d+)?", _first_group(place))) <= 1 for place in places)


def _first_group(text: str) -> str:
    """The content of the braces at the beginning of a string; the whole string if it has none there."""
    if not text.lstrip().startswith("{"):
        return text
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "}" and depth == 0:
            return text[:end]
    return text


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
