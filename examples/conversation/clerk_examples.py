"""Conversations of clerks with the scripted customer, as examples for imitation."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from clerks import Clerk, Habits
from customer import ScriptedCustomer
from desk import Desk
from desk_agent import converse
from scenarios import SMALL, Task, scenario
from warmup.batches import endless_batches
from warmup.transcripts import Example, Transcriber, as_messages, call_text

POOL, BATCH = 96, 24  # examples that are sorted by length, and of one batch


class DeskTranscriber:
    """Turns conversations of the small desk into examples."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._desk = Desk({}, SMALL)
        tools = [tool.schema for tool in self._desk.tools]
        # A customer's message after a reply extends the conversation, as with `proxy.reasoning: keep`.
        self._transcriber = Transcriber(tokenizer, tools, keeps_history=True)

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: the policy document and the tools."""
        system = {"role": "system", "content": self._desk.instructions}
        openings = [as_messages([system, {"role": "user", "content": said}]) for said in "ab"]
        return self._transcriber.prefix(*openings)

    def transcribe(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """A conversation that ends with a reply; all its replies are trained."""
        opening, rest = messages[:2], messages[2:]
        replies = [reply_text(message) for message in rest if message["role"] == "assistant"]
        turns = [
            {"role": message["role"], "content": message["content"]}
            for message in rest
            if message["role"] != "assistant"
        ]
        return self._transcriber.transcribe(as_messages(opening), replies, as_messages(turns))


def reply_text(message: Mapping[str, Any]) -> str:
    """What a model writes for this message of the desk."""
    if not message.get("tool_calls"):
        return str(message["content"])
    [call] = message["tool_calls"]
    return call_text(call["function"]["name"], json.loads(call["function"]["arguments"]))


async def conversation(task: Task, habits: Habits, rng: random.Random) -> list[dict[str, Any]]:
    """The messages of a clerk with these habits and the customer of the task."""
    desk = Desk(task["world"], task["services"])
    customer = ScriptedCustomer(task["customer"], desk)
    messages = await converse(desk, customer, Clerk(task, habits, rng))
    assert messages[-1]["role"] == "assistant", (task["id"], messages)
    return messages


def conversations(
    habits: Habits, rng: random.Random, count: int, *, held_out: bool = False
) -> list[list[dict[str, Any]]]:
    """Conversations about new scenarios."""

    async def all_of_them() -> list[list[dict[str, Any]]]:
        names = [f"imitation/{rng.randrange(2**60)}" for _ in range(count)]
        return [await conversation(scenario(name, SMALL, held_out=held_out), habits, rng) for name in names]

    return asyncio.run(all_of_them())


def batches(
    transcriber: DeskTranscriber, habits: Habits, rng: random.Random, *, held_out: bool = False
) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, each of a new scenario."""

    def sample_pool() -> list[Example]:
        return [*map(transcriber.transcribe, conversations(habits, rng, POOL, held_out=held_out))]

    return endless_batches(sample_pool, rng, size=BATCH)
