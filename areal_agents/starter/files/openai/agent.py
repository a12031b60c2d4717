"""An agent with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
from pathlib import Path

from openai import AsyncOpenAI

from areal_agents import Episode, episode

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"name": "search", "description": "Search the encyclopedia.", "parameters": QUERY}


def search(query: str) -> str:
    return next((text for name, text in FACTS.items() if name in query), "No results.")


@episode
async def agent(task: dict, ep: Episode) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task["question"]}]
    for _ in range(4):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}], max_tokens=48
        )
        reply = answer.choices[0].message
        if not reply.tool_calls:
            return float((reply.content or "").strip() == task["answer"])  # the reward
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            found = search(str(json.loads(call.function.arguments).get("query")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0
