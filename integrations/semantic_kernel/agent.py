"""A weather agent on Semantic Kernel: a ChatCompletionAgent with a plugin of one function, and a thread.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Forecasts:
    @kernel_function(description="The forecast of a city.")
    def weather(self, city: str, days: float) -> str:
        """The forecast of a city."""
        return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask one question after the other in one thread; the last answer."""
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="policy"),
        name="Forecaster",
        instructions="You are a weather assistant. Look the forecast up before you answer.",
        plugins=[Forecasts()],
    )
    thread: Any = None
    answer = ""
    for question in questions:
        if stream:
            answer = ""
            async for piece in agent.invoke_stream(messages=question, thread=thread):
                answer += str(piece.message)
                thread = piece.thread
        else:
            response = await agent.get_response(messages=question, thread=thread)
            answer, thread = str(response.message), response.thread
    return answer


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """`converse` on an event loop of its own."""
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
