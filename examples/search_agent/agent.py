"""A search agent in the plain OpenAI SDK: ask the model, run the searches it wants, return its answer.

`python agent.py "What is the currency of the country where Lyon is?"` asks the model behind
OPENAI_BASE_URL and shows the turns; `areal-agents train config.yaml` trains that model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

from conversation import MAX_MODEL_CALLS, MAX_TOKENS, SEARCH_TOOL, opening
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from search import NO_RESULTS, search

from areal_agents import Episode, episode
from areal_agents.rewards import exact_match

HTTP = DefaultAsyncHttpxClient(timeout=300)  # one for all episodes: opening another takes 20 ms


@episode
async def search_agent(task: dict, ep: Episode) -> float:
    """Answer the question; the reward is 1.0 for exactly the expected answer, else 0.0."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    return exact_match(await converse(client, opening(task["question"]), search), task["answer"])


@episode
async def blind_agent(task: dict, ep: Episode) -> float:
    """The same agent, whose searches find nothing: what does the model know without looking?"""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    return exact_match(
        await converse(client, opening(task["question"]), lambda _: NO_RESULTS), task["answer"]
    )


async def converse(client: AsyncOpenAI, messages: list[dict], search: Callable[[str], str]) -> str | None:
    """Extend `messages` until the model answers; None if it only searched for MAX_MODEL_CALLS calls."""
    for _ in range(MAX_MODEL_CALLS):
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=[SEARCH_TOOL], max_tokens=MAX_TOKENS
        )
        reply = response.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return reply.content
        for call in reply.tool_calls:
            query = json.loads(call.function.arguments).get("query")
            found = search(query) if isinstance(query, str) else "Error: search needs a query."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return None


if __name__ == "__main__":
    conversation = opening(" ".join(sys.argv[1:]))
    asyncio.run(converse(AsyncOpenAI(), conversation, search))
    print(*(json.dumps(message, ensure_ascii=False) for message in conversation), sep="\n")
