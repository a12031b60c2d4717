"""An Anthropic SDK agent with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
from pathlib import Path

from anthropic import AsyncAnthropic

from areal_agents import Episode, episode

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"name": "search", "description": "Search the encyclopedia.", "input_schema": QUERY}


def search(query: str) -> str:
    return next((text for name, text in FACTS.items() if name in query), "No results.")


@episode
async def agent(task: dict, ep: Episode) -> float:
    client = AsyncAnthropic(base_url=ep.base_url.removesuffix("/v1"), api_key=ep.api_key)
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = await client.messages.create(
            model="policy", system=INSTRUCTIONS, messages=messages, tools=[TOOL], max_tokens=48
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            text = "".join(block.text for block in reply.content if block.type == "text")
            return float(text.strip() == task["answer"])  # the reward
        found = [(call.id, search(str(call.input.get("query")))) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in found]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return 0.0
