"""A program with one tool. `areal-agents train config.yaml` trains the model that it asks."""

import json
import os
import urllib.request
from pathlib import Path

URL = os.environ["OPENAI_BASE_URL"]
TASK = json.loads(os.environ["AREAL_AGENTS_TASK"])
FACTS = json.loads((Path(__file__).parent / "facts.json").read_text())
INSTRUCTIONS = "You are a search agent. Search for facts, then reply with the short answer only."
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"name": "search", "description": "Search the encyclopedia.", "parameters": QUERY}


def search(query: str) -> str:
    return next((text for name, text in FACTS.items() if name in query), "No results.")


def post(url: str, body: dict) -> dict:
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key)) as answer:
        return json.load(answer)


def solve(messages: list[dict]) -> str:
    asked = {"model": "policy", "tools": [{"type": "function", "function": TOOL}], "max_tokens": 48}
    for _ in range(4):
        reply = post(URL + "/chat/completions", {**asked, "messages": messages})["choices"][0]["message"]
        if not reply.get("tool_calls"):
            return reply["content"] or ""
        messages.append(reply)
        for call in reply["tool_calls"]:
            found = search(str(json.loads(call["function"]["arguments"]).get("query")))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return ""


solved = solve([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": TASK["question"]}])
reward = float(solved.strip() == TASK["answer"])
post(f"{URL.split('/e/')[0]}/episodes/{os.environ['AREAL_AGENTS_EPISODE_ID']}/reward", {"reward": reward})
