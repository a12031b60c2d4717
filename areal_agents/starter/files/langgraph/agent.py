"""A LangGraph agent with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from areal_agents import Episode, episode

FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."


def search(query: str) -> str:
    """Search the encyclopedia."""
    return next((text for name, text in FACTS.items() if name in query), "No results.")


@episode
async def agent(task: dict, ep: Episode) -> float:
    model = ChatOpenAI(model="policy", base_url=ep.base_url, api_key=ep.api_key, max_completion_tokens=48)
    graph = create_agent(model, [search], system_prompt=INSTRUCTIONS)
    try:
        state = await graph.ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 8})
    except GraphRecursionError:  # the model only searched
        return 0.0
    return float(state["messages"][-1].text.strip() == task["answer"])  # the reward
