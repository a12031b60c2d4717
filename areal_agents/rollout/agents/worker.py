"""A worker process: runs a synchronous agent one episode at a time. It can be killed at any moment.

Speaks one JSON object per line over its standard streams: {"ready"} or {"error"} first; then for each
{task, id, base_url, api_key} any number of {"report": [path, body]}, and at last {"value"} or {"error"}.
What the agent prints goes to standard error. The process ends when its standard input does.
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
from areal_agents.episode import Episode, running
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.loading import describe, load_function


def main(spec: str) -> None:
    """Serve episodes of the function that `spec` names until standard input ends."""
    requests, answers = _own_streams()
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with lock:  # an agent's threads may reward too
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        function = load_function(spec, AgentError)
    except AgentError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    for request in _until_the_parent_is_gone(requests):
        send(_attempt(function, request, send))


def _attempt(
    function: Callable[..., Any], request: dict[str, Any], send: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    def report(path: str, body: dict[str, Any]) -> None:
        send({"report": [path, body]})

    ep = Episode(request["id"], request["base_url"], request["api_key"], report)
    try:
        with running(ep):
            value = function(request["task"], ep)
        return {"value": None if value is None else checked_reward(value)}
    except AgentError as error:
        return {"error": str(error)}
    except BaseException as error:  # also sys.exit: the episode is over, the worker is not
        return {"error": describe(error)}


def _own_streams() -> tuple[TextIO, TextIO]:
    """The pipes to the parent; the agent gets an empty input, and standard error to print to."""
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, answers


def _until_the_parent_is_gone(requests: TextIO) -> Any:
    """The requests. The process exits when the pipe closes, even in the middle of an episode."""
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
