"""A Pydantic AI agent with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
from pathlib import Path

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from areal_agents import Episode, episode

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."


def search(query: str) -> str:
    """Search the encyclopedia."""
    return next((text for name, text in FACTS.items() if name in query), "No results.")


@episode
async def agent(task: dict, ep: Episode) -> float:
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=ep.base_url, api_key=ep.api_key))
    searcher = Agent(model, instructions=INSTRUCTIONS, tools=[search], model_settings={"max_tokens": 48})
    try:
        result = await searcher.run(task["question"], usage_limits=UsageLimits(request_limit=4))
    except (UsageLimitExceeded, UnexpectedModelBehavior):  # the model only searched, or wrote no valid call
        return 0.0
    return float(result.output.strip() == task["answer"])  # the reward
