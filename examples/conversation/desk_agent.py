"""The agent of a help desk in the plain OpenAI SDK, which talks with a simulated customer.

`areal-agents train config.yaml` trains it. Its tools and those of the customer change the same world, and the
reward is what the world is in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from customer import ScriptedCustomer
from customer_model import ModelCustomer
from desk import Desk, amounts
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scenarios import reference_world

from areal_agents import Episode, episode

HTTP = DefaultAsyncHttpxClient(timeout=600)  # one for all episodes: opening another takes 20 ms
MAX_MODEL_CALLS = 24
MAX_TOOL_CALLS = 6  # between two messages to the customer

Ask = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


class Customer(Protocol):
    """Somebody who calls the desk."""

    is_done: bool

    def opening(self) -> str: ...

    async def reply(self, said: str) -> str | None: ...


@episode
async def desk_agent(task: dict, ep: Episode) -> float:
    """Serve a customer that follows a script."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    desk = Desk(task["world"], task["services"])
    return await play(task, desk, ScriptedCustomer(task["customer"], desk), policy_of(client, desk))


@episode
async def desk_agent_with_model(task: dict, ep: Episode) -> float:
    """Serve a customer that the model `customer` of `proxy.models` plays, which is never trained."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    desk = Desk(task["world"], task["services"])
    return await play(task, desk, ModelCustomer(task["customer"], desk, client), policy_of(client, desk))


def policy_of(client: AsyncOpenAI, desk: Desk) -> Ask:
    """Return a function that asks the policy for the next message of the desk."""
    tools = [tool.schema for tool in desk.tools]

    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        response = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        return response.choices[0].message.model_dump(exclude_none=True)

    return ask


async def play(task: dict, desk: Desk, customer: Customer, ask: Ask) -> float:
    """Hold the conversation; return its reward."""
    messages = await converse(desk, customer, ask)
    return reward(task, desk, customer, messages)


async def converse(desk: Desk, customer: Customer, ask: Ask) -> list[dict[str, Any]]:
    """Let desk and customer talk until the customer hangs up or a limit is reached; return the messages."""
    messages = [
        {"role": "system", "content": desk.instructions},
        {"role": "user", "content": customer.opening()},
    ]
    tool_calls = 0
    for _ in range(MAX_MODEL_CALLS):
        reply = await ask(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        for call in calls:
            function = call["function"]
            result = desk.call(function["name"], function["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        tool_calls = tool_calls + len(calls) if calls else 0
        if tool_calls > MAX_TOOL_CALLS:
            break
        if calls:
            continue
        answer = await customer.reply(reply.get("content") or "")
        if answer is None:
            break
        messages.append({"role": "user", "content": answer})
    return messages


def reward(task: dict, desk: Desk, customer: Customer, messages: list[dict[str, Any]]) -> float:
    """1.0 if the conversation came to its end, the world is as the solution leaves it, and the customer, if
    it asked for a fee, was told this amount and no other one; else 0.0. No other words count."""
    # The customer does not read the text of a reply that calls a tool.
    said = [m.get("content") or "" for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]
    heard = set().union(*map(amounts, said))
    is_right = (
        customer.is_done
        and desk.world == reference_world(task)
        and (task["hears"] is None or heard == set(task["hears"]))
    )
    return float(is_right)
