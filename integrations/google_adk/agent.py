"""A weather agent on Google's ADK: an LlmAgent with one tool, with LiteLlm for models that are not Gemini.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its prices are not fetched at the import
from google.adk.agents import LlmAgent  # noqa: E402
from google.adk.agents.run_config import RunConfig, StreamingMode  # noqa: E402
from google.adk.models.lite_llm import LiteLlm  # noqa: E402
from google.adk.runners import InMemoryRunner  # noqa: E402
from google.genai.types import Content, Part  # noqa: E402


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


async def converse(questions: Sequence[str], stream: bool) -> str:
    """Ask one question after the other in one session; the last answer."""
    agent = LlmAgent(
        name="forecaster",
        model=LiteLlm("openai/policy"),
        instruction="You are a weather assistant. Look the forecast up before you answer.",
        tools=[weather],
    )
    runner = InMemoryRunner(agent, app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="traveller")
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
    answer = ""
    for question in questions:
        asked = Content(role="user", parts=[Part(text=question)])
        events = runner.run_async(
            user_id="traveller", session_id=session.id, new_message=asked, run_config=config
        )
        async for event in events:
            if event.is_final_response() and event.content and event.content.parts:
                answer = "".join(part.text for part in event.content.parts if part.text and not part.thought)
    await runner.close()
    return answer


def run(questions: Sequence[str], *, stream: bool = False) -> str:
    """`converse` on an event loop of its own."""
    return asyncio.run(converse(questions, stream))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
