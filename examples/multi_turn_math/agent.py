"""An agent that gets a second chance: ask the model, check its answer, and let it try again if that is wrong.

`python agent.py "Ann has 34 pens, buys 17, then loses 8. How many pens are left?" 43` asks the model behind
OPENAI_BASE_URL and shows the conversation; `areal-agents train config.yaml` trains that model.
"""

from __future__ import annotations

import asyncio
import json
import sys

from chances import SECOND_CHANCE, opening
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from areal_agents import Episode, episode
from areal_agents.rewards import MathChecks

DISCOUNT = 0.9  # what a right answer at the second chance is worth
HTTP = DefaultAsyncHttpxClient(timeout=300)  # one for all episodes: opening another takes 20 ms
CHECKS = MathChecks(processes=2, time_s=5.0)


@episode
async def two_chances(task: dict, ep: Episode) -> dict[str, float]:
    """1.0 for the right answer, DISCOUNT for the right answer at the second chance, else 0.0.

    The rewards have names, so that the metrics show the two chances apart; their sum is the score.
    """
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    chances = await converse(client, opening(task["question"]), str(task["answer"]))
    worth = {"first_chance": 1.0, "second_chance": DISCOUNT}
    return {name: right * value for (name, value), right in zip(worth.items(), chances, strict=False)}


async def converse(client: AsyncOpenAI, messages: list[dict], answer: str) -> list[bool]:
    """Extend `messages` by the replies; whether the first was right and, if it was not, the second."""
    chances: list[bool] = []
    while len(chances) < 2 and not any(chances):
        if chances:
            messages.append({"role": "user", "content": SECOND_CHANCE})
        response = await client.chat.completions.create(model="policy", messages=messages)
        reply = response.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        # A comparison waits for a process of its own, so it is done beside the event loop. For math-verify
        # 34+17-8 is 43 as well, so a model could be paid without computing anything.
        chances.append(await asyncio.to_thread(CHECKS.equal, reply, answer, worked_out=True))
    return chances


if __name__ == "__main__":
    conversation = opening(sys.argv[1])
    asyncio.run(converse(AsyncOpenAI(), conversation, sys.argv[2]))
    print(*(json.dumps(message, ensure_ascii=False) for message in conversation), sep="\n")
