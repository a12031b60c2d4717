"""An Agents SDK agent with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
from pathlib import Path

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from areal_agents import Episode, episode

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."
set_tracing_disabled(True)


@function_tool
def search(query: str) -> str:
    """Search the encyclopedia."""
    return next((text for name, text in FACTS.items() if name in query), "No results.")


@episode
async def agent(task: dict, ep: Episode) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    searcher = Agent("Searcher", instructions=INSTRUCTIONS, model=model, tools=[search])
    limited = RunConfig(model_settings=ModelSettings(max_tokens=48))
    try:
        result = await Runner.run(searcher, task["question"], max_turns=4, run_config=limited)
    except MaxTurnsExceeded:  # the model only searched
        return 0.0
    return float(str(result.final_output).strip() == task["answer"])  # the reward
