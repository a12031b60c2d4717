"""The weather agent of mode_agents.py with nothing but the standard library, as a program for any image."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
EPISODE = f"{BASE.split('/e/')[0]}/episodes/{os.environ['AREAL_AGENTS_EPISODE_ID']}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The forecast of a city.", "parameters": PARAMETERS}


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


task = json.load(sys.stdin)
messages: list[dict[str, Any]] = [
    {"role": "system", "content": "Look the forecast up before you answer."},
    {"role": "user", "content": task["question"]},
]
completions = []
tools = [{"type": "function", "function": WEATHER}]
while True:
    completion = post(f"{BASE}/chat/completions", {"model": "policy", "messages": messages, "tools": tools})
    completions.append(completion["id"])
    messages.append(message := completion["choices"][0]["message"])
    for call in message.get("tool_calls") or ():
        content = f"{json.loads(call['function']['arguments'])['city']}: rain"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    if messages[-1] is message:
        break
post(f"{EPISODE}/reward", {"reward": 0.25, "completion_id": completions[0], "name": "looked up"})
post(f"{EPISODE}/reward", {"reward": float(task["answer"] in messages[-1]["content"])})
