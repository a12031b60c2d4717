"""A weather agent on Google's SDK: a chat over the Gemini API that calls its Python function by itself.

python agent.py "Do I need an umbrella in Zürich?"   (GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from google import genai
from google.genai import types

INSTRUCTIONS = "You are a weather assistant. Look the forecast up before you answer."


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(
    questions: Sequence[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    stream: bool = False,
) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    config = types.GenerateContentConfig(
        system_instruction=INSTRUCTIONS,
        tools=[weather],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    answer = ""
    with genai.Client(api_key=api_key, http_options=types.HttpOptions(base_url=base_url)) as client:
        chat = client.chats.create(model="policy", config=config)
        for question in questions:
            if not stream:
                answer = chat.send_message(question).text or ""
                continue
            answer = ""
            for piece in chat.send_message_stream(question):
                answer = "" if piece.function_calls else answer + (piece.text or "")
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
