"""A population of users: each asks a question, lets the model search, and rates the answer.

    python users.py --url http://127.0.0.1:8000 --conversations 2000

They know nothing of training. They call the served model with the plain OpenAI SDK, name their conversation
and themselves in two headers, and give a thumb by POST /rewards: most of them at once, some of them late, and
some never.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

sys.path.insert(0, str(Path(__file__).parents[1] / "search_agent"))

from conversation import MAX_MODEL_CALLS, MAX_TOKENS, SEARCH_TOOL, opening  # noqa: E402
from questions import heldout_tasks, train_tasks  # noqa: E402
from search import search  # noqa: E402

from areal_agents.rewards import exact_match  # noqa: E402

WINDOW = 100  # conversations of a printed mean


@dataclass
class Population:
    """The users of one server.

    Attributes:
        late: the share of the given thumbs that come late, on average `delay_s` seconds after the answer.
        silent: the share of users who give no thumb.
        thumbs: what was given, in the order of the answers.
    """

    url: str
    key: str
    late: float
    silent: float
    delay_s: float
    rng: random.Random
    thumbs: list[bool] = field(default_factory=list)
    _later: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, tasks: list[dict[str, str]], conversations: int, concurrency: int) -> None:
        """Hold so many conversations, `concurrency` at a time, and wait for the late thumbs."""
        numbers = iter(range(conversations))
        async with DefaultAsyncHttpxClient(timeout=300) as http:

            async def user() -> None:
                for number in numbers:
                    await self._converse(http, self.rng.choice(tasks), f"user-{number % 50}")

            await asyncio.gather(*(user() for _ in range(concurrency)))
            await asyncio.gather(*self._later)

    async def _converse(self, http: httpx.AsyncClient, task: dict[str, str], user: str) -> None:
        headers = {"session-id": uuid.uuid4().hex, "X-Episode-User": user}
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, http_client=http, default_headers=headers
        )
        completion_id, answer = await answered(client, opening(task["question"]))
        is_right = exact_match(answer, task["answer"]) == 1.0
        self.thumbs.append(is_right)
        if len(self.thumbs) % WINDOW == 0:
            recent = self.thumbs[-WINDOW:]
            print(
                f"{len(self.thumbs)} conversations; thumbs up in the last {WINDOW}: {sum(recent)}", flush=True
            )
        if self.rng.random() < self.silent:
            return
        delay_s = self.rng.expovariate(1 / self.delay_s) if self.rng.random() < self.late else 0.0
        task_of_thumb = asyncio.create_task(self._rate(http, completion_id, is_right, delay_s))
        self._later.add(task_of_thumb)
        task_of_thumb.add_done_callback(self._later.discard)

    async def _rate(
        self, http: httpx.AsyncClient, completion_id: str, is_right: bool, delay_s: float
    ) -> None:
        await asyncio.sleep(delay_s)
        given = {"completion_id": completion_id, "reward": float(is_right), "name": "thumb"}
        caller = {"Authorization": f"Bearer {self.key}"}
        answer = await http.post(f"{self.url}/rewards", json=given, headers=caller)
        if answer.status_code != 409:  # too late: the trainer has taken the conversation
            answer.raise_for_status()


async def answered(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Let the model search until it answers; return the id of its last completion, and the answer."""
    completion_id = ""
    for _ in range(MAX_MODEL_CALLS):
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=[SEARCH_TOOL], max_tokens=MAX_TOKENS
        )
        completion_id, reply = response.id, response.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return completion_id, reply.content
        for call in reply.tool_calls:
            query = json.loads(call.function.arguments).get("query")
            found = search(query) if isinstance(query, str) else "Error: search needs a query."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return completion_id, None


def main() -> None:
    """Read the options, and let the users converse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the base URL of the server")
    parser.add_argument("--key", default="users-of-the-example", help="the project key of the server")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24, help="users at the same time")
    parser.add_argument("--late", type=float, default=0.2, help="share of the given thumbs that come late")
    parser.add_argument("--silent", type=float, default=0.1, help="share of users who give no thumb")
    parser.add_argument("--delay-s", type=float, default=2.0, help="mean delay of a late thumb")
    parser.add_argument("--heldout", action="store_true", help="ask about entities that training never sees")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tasks = heldout_tasks() if options.heldout else train_tasks(options.seed, 4096)
    population = Population(
        options.url, options.key, options.late, options.silent, options.delay_s, random.Random(options.seed)
    )
    asyncio.run(population.run(tasks, options.conversations, options.concurrency))
    print(f"thumbs up: {sum(population.thumbs) / max(1, len(population.thumbs)):.3f}")


if __name__ == "__main__":
    main()
