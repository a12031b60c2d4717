"""A weather agent on LlamaIndex: a FunctionAgent with one tool, and a context for the conversation.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    model = OpenAILike(
        model="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        timeout=600,
    )
    agent = FunctionAgent(
        tools=[weather],
        llm=model,
        system_prompt="You are a weather assistant. Look the forecast up before you answer.",
        streaming=stream,
    )
    context = Context(agent)
    answer = ""
    for question in questions:
        answer = str(await agent.run(question, ctx=context))
    return answer


def run(questions: Sequence[str], *, stream: bool = True) -> str:
    """`converse` on an event loop of its own. An agent streams by default."""
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
