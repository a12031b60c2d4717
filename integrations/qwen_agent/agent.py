"""A weather agent on Qwen-Agent: an Assistant with one registered tool, which streams.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import json5
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("weather")
class Weather(BaseTool):
    description = "The forecast of a city."
    parameters = [
        {"name": "city", "type": "string", "description": "The city.", "required": True},
        {"name": "days", "type": "number", "description": "The number of days.", "required": True},
    ]

    def call(self, params: str, **_: Any) -> str:
        told = json5.loads(params)
        return f"{told['city']}, next {told['days']:g} days: rain"


def run(questions: Sequence[str]) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    agent = Assistant(
        llm={
            "model": "policy",
            "model_type": "oai",
            "model_server": os.environ["OPENAI_BASE_URL"],
            "api_key": os.environ["OPENAI_API_KEY"],
            "generate_cfg": {"use_raw_api": True},
        },
        system_message="You are a weather assistant. Look the forecast up before you answer.",
        function_list=["weather"],
    )
    messages: list[Any] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        *_, response = agent.run(messages=messages)  # each item is the whole response so far
        messages.extend(response)
    return str(messages[-1]["content"])


if __name__ == "__main__":
    print(run(sys.argv[1:]))
