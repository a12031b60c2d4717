"""Agents whose first attempt at a task misbehaves as the task's id says; later attempts succeed.

Of the task "dropped" the first two attempts hang. As a module it has the functions; the command is
`python failing_agents.py`. Everything but the async function uses the standard library only, because each
process would pay for the import of a client.
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
from typing import Any

from areal_agents.episode import Episode

FLOOD = 300
LEFT_OPEN: list[Any] = []


def misbehaves(task: dict[str, Any]) -> bool:
    """Whether this attempt is the one that must misbehave; marks in the folder of the task count them."""
    for number in range(2 if task["id"] == "dropped" else 1):
        try:
            (Path(task["folder"]) / f"{task['id']}-{number}").touch(exist_ok=False)
            return True
        except FileExistsError:
            continue
    return False


def note(task: dict[str, Any], name: str, text: object = "") -> None:
    """Leave a file for the test, which it never finds half-written."""
    whole = Path(task["folder"]) / name
    part = whole.with_name(f".{name}")
    part.write_text(str(text))
    part.rename(whole)


def leave_a_child(task: dict[str, Any]) -> None:
    """Start a process in a session of its own that outlives the agent."""
    note(task, "child", subprocess.Popen(["sleep", "300"], start_new_session=True).pid)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


def post(url: str, key: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


def ask(ep: Episode, text: str = "Hi", **more: Any) -> Any:
    """Call the model, and return the open response."""
    return post(f"{ep.base_url}/chat/completions", ep.api_key, chat(text, **more))


def hang(task: dict[str, Any], ep: Episode) -> None:
    ask(ep).read()
    ep.reward(0.25, name="so far")
    note(task, f"waiting-{ep.id}")
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
    match task["id"] if misbehaves(task) else "":
        case "silent":
            return 1.0
        case "raises":
            raise RuntimeError("boom")
        case "exits":
            os._exit(3)
        case "hangs" | "dropped":
            hang(task, ep)
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

    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)  # which no attempt closes

    async def ask(text: str = "Hi") -> None:
        await client.chat.completions.create(**chat(text))

    match task["id"] if misbehaves(task) else "":
        case "silent":
            return 1.0
        case "raises":
            raise RuntimeError("boom")
        case "exits":
            sys.exit(3)
        case "hangs" | "dropped":
            await ask()
            ep.reward(0.25, name="so far")
            note(task, f"waiting-{ep.id}")
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


if __name__ == "__main__":
    found = Episode.from_environment()
    root = found.base_url.split("/e/")[0]

    def report(path: str, body: dict[str, Any]) -> None:
        post(f"{root}/episodes/{found.id}/{path}", found.api_key, body).read()

    own = Episode(found.id, found.base_url, found.api_key, report)
    own.reward(in_a_worker(json.load(sys.stdin), own))
    sys.stdout.flush()
    os._exit(0)  # with whatever is open
