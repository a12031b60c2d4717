"""The process of `GraderProcess`, which calls the run's reward function on the episodes that it reads."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import sys

from areal_agents.core.reward_values import RewardValue
from areal_agents.errors import RewardError
from areal_agents.rollout.agents.worker import own_streams
from areal_agents.rollout.config import RewardConfig
from areal_agents.rollout.rewarding import RewardFunction


def main(config: str) -> None:
    """Answer for episodes until standard input ends."""
    requests, answers = own_streams()

    def say(answer: dict[str, RewardValue | str]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function = RewardFunction(RewardConfig.model_validate_json(config))
    except RewardError as error:
        say({"error": str(error)})
        return
    say({"value": 0.0})
    with asyncio.Runner() as runner:
        for line in requests:
            try:
                say({"value": runner.run(function.of_episode(pickle.loads(base64.b64decode(line))))})
            except RewardError as error:
                say({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
