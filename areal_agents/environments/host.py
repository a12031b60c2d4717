"""Runs an environment in an interpreter that has its package; the rollout process drives it
(`areal_agents/rollout/agents/environment_agent.py`).

    python -m areal_agents.environments.host tasks LINE SPLIT    writes the tasks, a JSON object per line
    python -m areal_agents.environments.host play LINE           plays what standard input asks for

While it plays, each line of standard input is `{"play": number, "task": …, "id": …, "base_url": …,
"api_key": …}` or `{"cancel": number}`, and each line of its answers `{"played": number, "reward": …}` or
`{"played": number, "error": …}`, after a first line `{"ready": true}`. It ends at the end of standard
input, or at SIGTERM. If the environment cannot be opened, the last line is `{"fault": …}`.
What the environment prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO, cast

from areal_agents.core.reward_values import checked_reward
from areal_agents.environments.environment import Environment, Split, open_environment
from areal_agents.environments.line import EnvironmentLine
from areal_agents.episode import Episode, running
from areal_agents.errors import ArealAgentsError
from areal_agents.user_functions import describe

LONGEST_LINE = 64 << 20  # bytes of one task


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 after an error, which is then the last line of the answers."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # what the environment prints is no answer
        try:
            environment = open_environment(EnvironmentLine.read(arguments[1]))
            if arguments[0] == "tasks":
                for task in environment.tasks(cast(Split, arguments[2])):
                    _write(out, task)
            else:
                asyncio.run(_serve(environment, out))
        except ArealAgentsError as error:
            _write(out, {"fault": str(error)})
            return 1
    return 0


async def _serve(environment: Environment, out: BinaryIO) -> None:
    """Play what is asked for, until the end of standard input."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)  # the environment is closed all the same
    episodes: dict[int, asyncio.Task[None]] = {}
    _write(out, {"ready": True})
    while line := await reader.readline():
        request = json.loads(line)
        if "cancel" in request:
            if (episode := episodes.get(request["cancel"])) is not None:
                episode.cancel()
            continue
        number = request["play"]
        episodes[number] = asyncio.create_task(_play(environment, request, out))
        episodes[number].add_done_callback(partial(_forget, episodes, number))
    remaining = tuple(episodes.values())
    for episode in remaining:
        episode.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)
    await environment.close()


def _forget(episodes: dict[int, asyncio.Task[None]], number: int, ended: asyncio.Task[None]) -> None:
    del episodes[number]


async def _play(environment: Environment, request: Mapping[str, Any], out: BinaryIO) -> None:
    ep = Episode(request["id"], request["base_url"], request["api_key"])
    answer: dict[str, Any] = {"played": request["play"]}
    try:
        with running(ep):
            reward = await environment.play(request["task"], ep)
        answer["reward"] = None if reward is None else checked_reward(reward)
    except asyncio.CancelledError:
        answer["error"] = "cancelled"
    except ArealAgentsError as error:
        answer["error"] = str(error)
    except SystemExit as error:  # it would end every other episode
        answer["error"] = f"the environment called sys.exit({error.code!r})"
    except Exception as error:
        answer["error"] = describe(error)
    _write(out, answer)


def _write(out: BinaryIO, value: Any) -> None:
    out.write(json.dumps(value, allow_nan=False).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
