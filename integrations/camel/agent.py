"""A weather agent on CAMEL: a ChatAgent with one tool, which keeps the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


def weather(city: str, days: float) -> str:
    """The forecast of a city.

    Args:
        city: The city.
        days: The number of days.
    """
    return f"{city}, next {days:g} days: rain"


class Bytes(BaseTokenCounter):
    """Counts bytes as tokens. The default counter downloads the vocabulary of GPT-4o mini."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return len(self.encode(str(messages)))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def run(questions: Sequence[str]) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type="policy",
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        token_counter=Bytes(),
    )
    agent = ChatAgent(
        system_message="You are a weather assistant. Look the forecast up before you answer.",
        model=model,
        tools=[FunctionTool(weather)],
    )
    answer = ""
    for question in questions:
        answer = agent.step(question).msgs[0].content
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
