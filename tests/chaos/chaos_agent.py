"""An agent that repeats each call until it gets a response, and records the responses.

Its episodes therefore finish whichever process is killed, and the store must contain everything that the
agent's log file records.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI

from areal_agents import Episode, episode

LOG_VARIABLE = "CHAOS_AGENT_LOG"
TURNS = 3
TOKENS = 24
PAUSE_S = 0.3  # between turns, like a tool call
PATIENCE_S = 120.0


def tasks() -> list[dict[str, Any]]:
    """Return many small tasks."""
    return [{"id": f"t{number}", "number": number} for number in range(997)]


@episode
def talk(task: dict[str, Any], ep: Episode) -> float:
    """Hold a conversation of a few turns, which takes longer than training. The reward depends on every
    letter, so that the rewards in a group differ."""
    client = OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0, timeout=60)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {task['number']}?"}]
    said = ""
    for turn in range(TURNS):
        answer = _ask(client, messages)
        text = answer.choices[0].message.content or ""
        _note({"episode": ep.id, "completion": answer.id, "text": text})
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
        time.sleep(PAUSE_S)
    return zlib.crc32(said.encode()) % 1000 / 1000


def _ask(client: OpenAI, messages: list[dict[str, Any]]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)
        except (APIConnectionError, APIStatusError) as error:
            refused = isinstance(error, APIStatusError) and error.status_code < 429
            if refused or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _note(entry: dict[str, Any]) -> None:
    """Append a line in one write, since the processes of all episodes append to the same file."""
    descriptor = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(descriptor)
