"""Plays a held-out task of each game with the replies of a demonstration, and prints the records as JSON.

    PYTHON-WITH-THE-PACKAGES tests/examples/shown_games.py FOLDER

The store of the proxy is written to FOLDER.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
sys.path[:0] = map(str, (EXAMPLES / "games", EXAMPLES, TESTS, TESTS.parent))

from game_players import CAREFUL, countdown_reply, guessing_game, sum_reply  # noqa: E402
from game_tasks import Countdown, Guessing, Sum, countdown_tasks, line_of, sums, system_message  # noqa: E402
from integration_support import Stack, running_stack  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from warmup.transcripts import Transcriber, as_messages  # noqa: E402

from areal_agents.environments.environment import Environment, open_environment  # noqa: E402
from areal_agents.episode import Episode  # noqa: E402
from areal_agents.proxy import ProxyConfig  # noqa: E402

MODEL = EXAMPLES / "games" / "model"
EPISODE_S = 60


def main(folder: Path) -> dict[str, Any]:
    environments = {
        line.name: open_environment(line)
        for line in map(line_of, ("countdown", "chain_sum", "GuessTheNumber"))
    }
    held_out = {name: environment.tasks("eval") for name, environment in environments.items()}
    replies, demonstrated = {}, {}
    for name, (task, *_) in held_out.items():
        replies[name], demonstrated[name] = demonstration(name, task)
    with running_stack(MODEL, folder / "store.db", ProxyConfig(reasoning="keep")) as stack:
        played = asyncio.run(play_all(stack, environments, held_out, replies))
    contents = {
        "countdown": [task.content for task in countdown_tasks(3000)],
        "chain_sum": [task.question for task in sums(3000)],
    }
    seen = {
        "countdown": [Countdown.read(row["question"]).content for row in held_out["countdown"]],
        "chain_sum": [row["question"] for row in held_out["chain_sum"]],
    }
    return {
        "played": played,
        "demonstrated": demonstrated,
        "overlap": {name: sorted(set(seen[name]) & set(contents[name])) for name in seen},
        "held_out": {name: len(rows) for name, rows in held_out.items()},
    }


def demonstration(name: str, task: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The replies of a careful player, and the token ids of the whole demonstration."""
    rng = random.Random(0)
    transcriber = Transcriber(Tokenizer.from_file(str(MODEL / "tokenizer.json")), [], keeps_history=True)
    if "seed" in task:
        game = Guessing(task["seed"])
        opening, read = [{"role": "user", "content": game.news}], []
        replies, read = guessing_game(game, CAREFUL, rng)
    else:
        question = task["question"]
        opening = [
            {"role": "system", "content": system_message(name)},
            {"role": "user", "content": question},
        ]
        reply = (
            countdown_reply(Countdown.read(question), CAREFUL, rng)
            if name == "countdown"
            else sum_reply(Sum.read(question), CAREFUL, rng)
        )
        replies, read = [reply], []
    turns = as_messages([{"role": "user", "content": text} for text in read])
    return replies, list(transcriber.transcribe(as_messages(opening), replies, turns).ids)


async def play_all(
    stack: Stack,
    environments: dict[str, Environment],
    held_out: dict[str, list[dict[str, Any]]],
    replies: dict[str, list[str]],
) -> dict[str, Any]:
    """Play an episode of each environment; return its reward, number of roots, and last turn's token ids."""
    played = {}
    for name, environment in environments.items():
        opened = stack.open_episode(replies[name])
        try:
            async with asyncio.timeout(EPISODE_S):
                reward = await environment.play(
                    held_out[name][0], Episode(opened["id"], opened["base_url"], opened["key"])
                )
        finally:
            await environment.close()
        turns = stack.turns(opened)
        ids = [*turns[-1]["prompt_ids"], *turns[-1]["token_ids"]]
        roots = sum(turn["parent"] is None for turn in turns)
        played[name] = {"reward": reward, "roots": roots, "ids": ids}
    return played


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
