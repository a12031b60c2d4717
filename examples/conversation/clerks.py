"""Clerks, who know the solution of a scenario and take only steps for which the conversation gives reason.

The careful one solves every scenario, and one with other habits makes mistakes that must earn nothing. The
tests let them play, and the starting model of the small desk imitates them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from customer import NEXT
from desk import SERVICES

ASKS = {"rider": "What is your rider number?", "ride": "Which ride is it?", "bike": "Which bike is it?"}
PLEASE = {
    "close_lock": "Please close the lock.",
    "restart_app": "Please restart your app.",
    "accept_offer": "I have offered the plan. Please accept it in your app.",
}
DONE = {
    "end": "Your ride has ended.",
    "refund": "The ride is refunded.",
    "unlock": "The bike is unlocked.",
    "plan": "Your plan has changed.",
    "fee": "It cost {result}.",
}
DECLINED = "I am sorry, that is not possible ({reason})."
STAYS = "I am sorry, it stays with that."


@dataclass(frozen=True, slots=True)
class Step:
    """A message to the customer, or a call of a tool; with `fact`, only if the customer has not told it."""

    says: str = ""
    tool: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    fact: str = ""


@dataclass(frozen=True, slots=True)
class Habits:
    """How a clerk behaves; the numbers are probabilities, for each request."""

    forgets_lock: float = 0.0  # does not ask for the lock to be closed, and ends the ride in vain
    obeys: float = 0.0  # does what a rule forbids
    refuses: float = 0.0  # declines what is allowed
    wrong_reason: float = 0.0  # of what it declines
    gives_in: float = 0.0  # does it after all if the customer insists
    only_says: float = 0.0  # claims that it is done, and does nothing


CAREFUL = Habits()
# What the starting model imitates last, for the small desk.
CARELESS = Habits(forgets_lock=0.55, obeys=0.6, refuses=0.1, wrong_reason=0.4, gives_in=0.6, only_says=0.2)


def tool_message(name: str, arguments: Mapping[str, str], number: int) -> dict[str, Any]:
    """A call of a tool, as a message of chat completions."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Clerk:
    """The clerk of one conversation: called with the messages so far, it returns the next one of the desk."""

    def __init__(self, task: Mapping[str, Any], habits: Habits, rng: random.Random) -> None:
        self._task = task
        self._habits = habits
        self._rng = rng
        self._request = -1
        self._steps: list[Step] = []  # what is left to do for the present request
        self._refused = False

    async def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        last = messages[-1]["content"]
        if self._request < 0 or (messages[-1]["role"] == "user" and last.startswith(NEXT)):
            self._request += 1
            self._steps = self._plan()
        elif not self._steps:
            self._steps = self._after_insistence()
        while True:
            step = self._steps.pop(0)
            if step.fact and any(step.fact in m["content"] for m in messages if m["role"] == "user"):
                continue  # told already
            if step.tool:
                return tool_message(step.tool, step.arguments, len(messages))
            return {"role": "assistant", "content": step.says.format(result=last.rpartition("fee ")[2])}

    def _plan(self) -> list[Step]:
        """All steps for the present request, those of the first with the identification of the rider."""
        customer, habits = self._task["customer"], self._habits
        goal, actions = customer["goals"][self._request], self._task["actions"][self._request]
        rider = customer["rider"]
        steps = []
        if self._request == 0:
            steps = [Step(ASKS["rider"], fact=rider), Step(tool="look_up", arguments={"rider": rider})]
        steps += [Step(ASKS[n], fact=goal["facts"][n]) for n in ("ride", "bike") if n in goal["facts"]]
        if goal["service"] == "unlock":
            steps.append(Step(tool="bike", arguments={"bike": goal["of"]}))
        self._refused = goal["kind"] == "forbidden"
        if self._draws(habits.only_says):
            return [*steps, Step(DONE[goal["service"]])]
        if self._refused and self._draws(habits.obeys):
            return [*steps, *self._obedience(goal)]
        if not self._refused and self._draws(habits.refuses):
            self._refused = True
            return [*steps, *self._refusal(rider, self._rng.choice(self._reasons))]
        for who, tool, arguments in actions:
            if tool == "decline":
                if not goal["willing"] and not self._draws(habits.forgets_lock):
                    steps.append(Step(PLEASE["close_lock"]))
                wrong = [reason for reason in self._reasons if reason != arguments["reason"]]
                is_wrong = self._draws(habits.wrong_reason)
                steps += self._refusal(rider, self._rng.choice(wrong) if is_wrong else arguments["reason"])
            elif who == "desk":
                steps.append(Step(tool=tool, arguments=arguments))
            elif not (tool == "close_lock" and self._draws(habits.forgets_lock)):
                steps.append(Step(PLEASE[tool]))
        return steps if self._refused else [*steps, Step(DONE[goal["service"]])]

    def _after_insistence(self) -> list[Step]:
        goal = self._task["customer"]["goals"][self._request]
        if self._refused and self._draws(self._habits.gives_in):
            self._refused = False
            return self._obedience(goal)
        return [Step(STAYS)]

    def _obedience(self, goal: Mapping[str, Any]) -> list[Step]:
        """What the customer wants, whatever the rules say."""
        tool = {"end": "end_ride", "refund": "refund"}[goal["service"]]
        return [Step(tool=tool, arguments={"ride": goal["of"]}), Step(DONE[goal["service"]])]

    def _refusal(self, rider: str, reason: str) -> list[Step]:
        decline = Step(tool="decline", arguments={"rider": rider, "reason": reason})
        return [decline, Step(DECLINED.format(reason=reason))]

    @property
    def _reasons(self) -> list[str]:
        return [reason for service in self._task["services"] for reason in SERVICES[service].reasons]

    def _draws(self, probability: float) -> bool:
        return self._rng.random() < probability
