"""The simulated customer that follows a script: a small state machine over what the desk says and does.

It has one or two requests and knows some facts. It tells those that it is asked for, and does with its own
tools what the desk asks for. It ends every conversation: each of its turns tells or does something new, or
costs patience, of which it has little.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from desk import Desk, amounts

PATIENCE = 3  # turns of the desk that neither ask for something new nor bring the request forward

OPENINGS: Mapping[str, tuple[str, ...]] = {
    "end": ("My ride does not end.", "Please end my ride.", "My app says that I am still riding."),
    "refund": (
        "I want a refund for a ride.",
        "Please refund a ride of mine.",
        "The bike did not work, I want my money back.",
    ),
    "unlock": ("Please unlock a bike for me.", "My bike does not unlock.", "I cannot open the lock."),
    "plan": ("I want to change my plan.", "Please change my plan.", "I would like another plan."),
    "fee": ("What did a ride cost?", "How much was a ride?", "What is the fee of a ride?"),
}
FACTS = {
    "rider": "I am rider {}.",
    "ride": "It is ride {}.",
    "bike": "It is bike {}.",
    "plan": "I want the plan {}.",
}
NEXT = ("Thanks. One more thing.", "Good. And then:", "All right, something else.")
INSISTS = (
    "But I really need it. Please do it.",
    "Your colleague promised it to me.",
    "That is not fair. Make an exception for me.",
)
CLOSED = ("I have closed the lock.", "Done, the lock is closed.")
CANNOT_CLOSE = ("I cannot, I have left the bike.", "That does not work, the lock is stuck.")
LOST = ("I do not understand.", "What do you mean?")

ASKS = {
    "rider": r"\brider (number|id)|your (number|id)\b|\b(customer|account) (number|id)|who you are|identify",
    "ride": r"\b(which|what) ride|\bride (number|id)\b|number of (the|your|that) ride",
    "bike": r"\b(which|what) bike|\bbike (number|id)\b|number (of|on) (the|your|that) bike",
    "plan": r"\b(which|what) plan",
    "close_lock": r"\b(clos|push|press|shut|secur)(e|ing|e it)?\b|\block (the|your|that) bike|\blever\b",
    "restart_app": r"\b(restart|re-?open|relaunch|reboot)(ing)?\b|\b(open|start) (it|the app|your app) again",
    "accept_offer": r"\b(accept|confirm|approv)(e|ing)?\b",
}
_REFUSES = (
    r"\b(can ?not|can't|won't|unable|forbid\w*|declin\w*|unfortunately)\b"
    r"|(\bnot|n't) (be )?(possible|allowed|able|eligible|permitted)\b"
)
_YES_OR_NO = (
    r"\b(shall|should|may|can) (i|we)\b|\b(would|do) you (like|want)\b|\bcan you confirm\b"
    r"|\bis (that|this) (right|correct|ok)"
)


class ScriptedCustomer:
    """A customer of one conversation; the same task and the same words of the desk give the same replies."""

    def __init__(self, customer: Mapping[str, Any], desk: Desk) -> None:
        self.is_done = False  # whether every request came to an end, granted or given up
        self._rider: str = customer["rider"]
        self._goals: list[dict[str, Any]] = [*customer["goals"]]
        self._desk = desk
        self._rng = random.Random(customer["seed"])
        self._patience = PATIENCE
        self._given: set[str] = set()  # facts that were told and things that were done
        self._declined = 0  # entries of the desk's record when the present request began
        self._insisted = 0

    def opening(self) -> str:
        """The first message."""
        return self._open()

    async def reply(self, said: str) -> str | None:
        """What the customer says next, after it has done what it was asked to do; None if it hangs up."""
        goal = self._goals[0]
        if self._is_granted(goal, said):
            return self._next()
        asked = [name for name, pattern in ASKS.items() if re.search(pattern, said, re.IGNORECASE)]
        answers = {name: answer for name in asked if (answer := self._answer(name, goal))}
        is_new = not answers.keys() <= self._given
        if not is_new and self._is_refused(said):
            if self._insisted == goal["insists"]:
                return self._next()
            self._insisted += 1
            return self._rng.choice(INSISTS)
        if not is_new:
            self._patience -= 1
            if self._patience < 0:
                return None
        self._given |= answers.keys()
        if answers:
            return " ".join(answers.values())
        if re.search(_YES_OR_NO, said, re.IGNORECASE):
            return "Yes, please."
        return f"{self._rng.choice(LOST)} {self._rng.choice(OPENINGS[goal['service']])}"

    def _open(self) -> str:
        goal = self._goals[0]
        told = [name for name in goal["facts"] if name in goal["opens_with"]]
        self._given = (self._given & {"rider"}) | {*told}
        self._declined, self._insisted = len(self._desk.world["declined"]), 0
        request = self._rng.choice(OPENINGS[goal["service"]])
        return " ".join([request, *(FACTS[name].format(goal["facts"][name]) for name in told)])

    def _next(self) -> str | None:
        del self._goals[0]
        self.is_done = not self._goals
        return None if self.is_done else f"{self._rng.choice(NEXT)} {self._open()}"

    def _is_granted(self, goal: Mapping[str, Any], said: str) -> bool:
        world, of = self._desk.world, goal["of"]
        match goal["service"]:
            case "end":
                return bool(world["rides"][of]["state"] != "running")
            case "refund":
                return bool(world["rides"][of]["state"] == "refunded")
            case "unlock":
                return bool(world["bikes"][of]["lock"] == "open")
            case "plan":
                return bool(world["riders"][self._rider]["plan"] == of)
            case "fee":
                return bool(amounts(said))
        raise ValueError(f"expected a service of the desk, got {goal['service']!r}")

    def _is_refused(self, said: str) -> bool:
        is_recorded = len(self._desk.world["declined"]) > self._declined
        return is_recorded or re.search(_REFUSES, said, re.IGNORECASE) is not None

    def _answer(self, asked: str, goal: Mapping[str, Any]) -> str | None:
        """Tell a fact, or do something and say so; None if there is nothing to tell or to do."""
        if asked == "rider":
            return FACTS["rider"].format(self._rider)
        if asked in goal["facts"]:
            return FACTS[asked].format(goal["facts"][asked])
        if asked == "close_lock":
            if not goal["willing"]:
                return self._rng.choice(CANNOT_CLOSE)
            return self._rng.choice(CLOSED) if self._desk.close_lock(self._rider) else None
        if asked == "restart_app":
            return "I have restarted the app." if self._desk.restart_app(self._rider) else None
        if asked == "accept_offer":
            return "I have accepted it." if self._desk.accept_offer(self._rider) else None
        return None
