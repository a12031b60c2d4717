"""A worker process that runs a synchronous agent, one episode at a time, and can be killed at any time.

It exchanges one JSON object per line over its standard streams. It first writes {"ready"} or {"error"}; then,
for each {task, id, base_url, api_key} that it reads, which in a fork also has {fork}, any number of
{"report": [path, body]}, and finally {"value"} or {"error"}. The agent's output goes to standard error. The
process exits when its standard input closes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from areal_agents.core.reward_values import checked_reward
from areal_agents.episode import Episode, ForkPoint, running
from areal_agents.errors import AgentError
from areal_agents.user_functions import describe, load_function


def main(spec: str) -> None:
    """Serve episodes of the function that `spec` names until standard input ends."""
    requests, answers = own_streams()
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with lock:  # threads of the agent may give rewards too
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        function = load_function(spec, AgentError)
    except AgentError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    for request in until_the_parent_ends(requests):
        send(_attempt(function, request, send))


def _attempt(
    function: Callable[..., Any], request: dict[str, Any], send: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    def report(path: str, body: dict[str, Any]) -> None:
        send({"report": [path, body]})

    fork = ForkPoint(**request["fork"]) if "fork" in request else None
    ep = Episode(request["id"], request["base_url"], request["api_key"], report, fork)
    try:
        with running(ep):
            value = function(request["task"], ep)
        return {"value": None if value is None else checked_reward(value)}
    except AgentError as error:
        return {"error": str(error)}
    except BaseException as error:  # also SystemExit: it ends the episode, not the worker
        return {"error": describe(error)}


def own_streams() -> tuple[TextIO, TextIO]:
    """Return the pipes to the parent; give the agent an empty input, and send its output to stderr."""
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, answers


def until_the_parent_ends(requests: TextIO) -> Any:
    """Yield the requests. The process exits when the pipe closes, even in the middle of an episode."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


if __name__ == "__main__":
    main(sys.argv[1])
