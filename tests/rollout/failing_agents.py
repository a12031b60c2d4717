"""Agents whose attempts misbehave as the test decides for each of them.

The test writes its decision about an attempt into a folder that an agent in a sandbox can read, too. The
module provides the functions; the command is `python failing_agents.py`. Everything but the async function
uses only the standard library: the import of a client would slow every process down, and an image need not
have one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_agents.episode import Episode

DECIDED_S = 60.0
FLOOD = 300
LEFT_OPEN: list[Any] = []


def decision(task: dict[str, Any], ep: Episode) -> str | None:
    """Return how this attempt misbehaves; "" if it does not, None if the test has not decided yet."""
    path = Path(task["decisions"], ep.id)
    return path.read_text() if path.exists() else None


def misbehavior(task: dict[str, Any], ep: Episode) -> str:
    """Wait for the decision of the test."""
    deadline = time.monotonic() + DECIDED_S
    while (decided := decision(task, ep)) is None:
        assert time.monotonic() < deadline, "the test has decided nothing"
        time.sleep(0.02)
    return decided


def leave_a_child(task: dict[str, Any]) -> None:
    """Start a process in a session of its own that outlives the agent."""
    subprocess.Popen(["sleep", task["nap"]], start_new_session=True)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


def post(url: str, key: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


def ask(ep: Episode, text: str = "Hi", **more: Any) -> Any:
    """Call the model, and return the open response."""
    return post(f"{ep.base_url}/chat/completions", ep.api_key, chat(text, **more))


def hang(ep: Episode) -> None:
    """Call the model once, from which the test sees that this attempt hangs, and hang."""
    ep.reward(0.25, name="so far")
    ask(ep).read()
    while True:
        time.sleep(1)


def flood(ep: Episode) -> None:
    threads = [threading.Thread(target=lambda n=n: ask(ep, f"Call {n}").read()) for n in range(FLOOD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leave_sockets(ep: Episode) -> None:
    """Leave a stream that is not read to its end, and a connection without a request."""
    stream = ask(ep, "slowly", stream=True)
    stream.readline()
    host, port = ep.base_url.split("/")[2].split(":")
    LEFT_OPEN.extend((stream, socket.create_connection((host, int(port)))))


def in_a_worker(task: dict, ep: Episode) -> float:
    match misbehavior(task, ep):
        case "silent":
            return 1.0
        case "raises":
            raise RuntimeError("boom")
        case "exits":
            os._exit(3)
        case "hangs" | "dropped":
            hang(ep)
        case "floods":
            flood(ep)
        case "forks":
            leave_a_child(task)
        case "sockets":
            leave_sockets(ep)
    ask(ep).read()
    return 1.0


async def as_coroutine(task: dict, ep: Episode) -> float:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)  # no attempt closes it

    async def ask(text: str = "Hi") -> None:
        await client.chat.completions.create(**chat(text))

    async with asyncio.timeout(DECIDED_S):
        while (decided := decision(task, ep)) is None:
            await asyncio.sleep(0.02)
    match decided:
        case "silent":
            return 1.0
        case "raises":
            raise RuntimeError("boom")
        case "exits":
            sys.exit(3)
        case "hangs" | "dropped":
            ep.reward(0.25, name="so far")
            await ask()
            await asyncio.sleep(3600)
        case "floods":
            await asyncio.gather(*(ask(f"Call {n}") for n in range(FLOOD)))
        case "forks":
            leave_a_child(task)
        case "sockets":
            stream = await client.chat.completions.create(**chat("slowly", stream=True))
            await anext(aiter(stream))
    await ask()
    return 1.0


class Program:
    """The episode of a command, read from its variables; it has the interface of areal_agents.Episode."""

    def __init__(self) -> None:
        self.base_url, self.api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
        self.id = os.environ["AREAL_AGENTS_EPISODE_ID"]

    def reward(self, reward: float, **more: str) -> None:
        root = self.base_url.split("/e/")[0]
        post(f"{root}/episodes/{self.id}/reward", self.api_key, {"reward": reward, **more}).read()


if __name__ == "__main__":
    own: Any = Program()
    own.reward(in_a_worker(json.load(sys.stdin), own))
    sys.stdout.flush()
    os._exit(0)  # without closing what is open
