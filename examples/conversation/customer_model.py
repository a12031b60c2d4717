"""The simulated customer that a second model plays.

Its calls go to the model `customer`, which `proxy.models` of the configuration names. They are passed
through, and none of their tokens is recorded or trained on. What it can do is what the scripted customer can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from desk import CUSTOMER_TOOLS, Desk, Tool
from openai import AsyncOpenAI

MAX_TURNS = 12
MAX_CALLS = 4  # of the model, for one turn
_HANG_UP = Tool("hang_up", "End the conversation.")

_ROLE = """You play a customer who talks with the help desk of a bicycle hire. Your messages are what the \
customer says: short, in your own words, never the desk's part. You want, one after the other:
{wants}
You know only this: {facts}. Tell what you are asked for and nothing before that; never invent numbers.
{ability}
If the desk refuses a request, insist {insists} times, then let it be and go on with your next request.
Call hang_up when each of your requests was either granted or refused for good."""
_WANTS = {
    "end": "- that your running ride is ended",
    "refund": "- a refund of ride {of}",
    "unlock": "- that bike {of}, which you stand at, is unlocked",
    "plan": "- the plan {of} instead of yours",
    "fee": "- to know the fee of ride {of}",
}


class ModelCustomer:
    """A customer of one conversation, played by a model with tools of its own."""

    def __init__(self, customer: Mapping[str, Any], desk: Desk, client: AsyncOpenAI) -> None:
        self.is_done = False
        self._rider: str = customer["rider"]
        self._desk = desk
        self._client = client
        self._turns = 0
        goals = customer["goals"]
        self._opening: str = " ".join(
            [
                _SAYS[goals[0]["service"]],
                *(f"My {n} is {goals[0]['facts'][n]}." for n in goals[0]["opens_with"]),
            ]
        )
        facts = {name: value for goal in goals for name, value in goal["facts"].items()}
        willing = all(goal["willing"] for goal in goals)
        system = _ROLE.format(
            wants="\n".join(_WANTS[goal["service"]].format(of=goal["of"]) for goal in goals),
            facts=", ".join(f"{name} {value}" for name, value in facts.items()),
            ability="If the desk asks you to do something with the lock or the app, do it with your tools."
            if willing
            else "You have left the bike, so you cannot close its lock, whatever the desk says.",
            insists=max(goal["insists"] for goal in goals),
        )
        # To this model the desk is the user, and the customer the assistant.
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": "Help desk, how can I help you?"},
            {"role": "assistant", "content": self._opening},
        ]
        tools = [tool for tool in CUSTOMER_TOOLS if willing or tool.name != "close_lock"]
        self._tools = [tool.schema for tool in (*tools, _HANG_UP)]

    def opening(self) -> str:
        """The first message, which is not left to the model."""
        return self._opening

    async def reply(self, said: str) -> str | None:
        """What the customer says next, after it has used its tools; None if it hangs up or talks too long."""
        self._turns += 1
        self._messages.append({"role": "user", "content": said})
        if self._turns > MAX_TURNS:
            return None
        for _ in range(MAX_CALLS):
            response = await self._client.chat.completions.create(
                model="customer", messages=self._messages, tools=self._tools, max_tokens=512
            )
            reply = response.choices[0].message
            self._messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return reply.content or None
            for call in reply.tool_calls:
                if call.function.name == "hang_up":
                    self.is_done = True
                    return None
                result = self._use(call.function.name)
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None

    def _use(self, tool: str) -> str:
        if tool not in [schema["function"]["name"] for schema in self._tools]:
            return f"Error: there is no tool {tool}."
        return "Done." if getattr(self._desk, tool)(self._rider) else "Nothing changed."


_SAYS = {
    "end": "My ride does not end.",
    "refund": "I want a refund for a ride.",
    "unlock": "My bike does not unlock.",
    "plan": "I want another plan.",
    "fee": "What did a ride cost?",
}
