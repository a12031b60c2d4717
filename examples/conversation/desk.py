"""The bicycle hire: what the desk and the customer can change, and the rules of the desk.

A world is plain JSON: riders, rides, bikes and decisions, by their numbers. Each episode has a copy of its
own. Desk and customer act on the same world, each with tools of their own. What only the customer can do,
such as closing the lock of a bike, the desk can only ask for.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

World = dict[str, Any]

LONGEST_FREE = 3  # minutes; a ride of at most so many is refunded: the bike was probably not usable
PRICES = {"basic": 0, "plus": 900}  # cents a month


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of the desk or of the customer. Every argument is a string; `choices` limits some of them."""

    name: str
    description: str
    arguments: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of chat completions."""
        properties: dict[str, Any] = {name: {"type": "string"} for name in self.arguments}
        for name, values in self.choices.items():
            properties[name]["enum"] = [*values]
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Service:
    """Something that the desk does for riders: its rules, its tools, and the reasons to decline."""

    rules: str
    tools: tuple[Tool, ...]
    reasons: tuple[str, ...]


_END = Tool("end_ride", "End a running ride.", ("ride",))
_REFUND = Tool("refund", "Refund a ride.", ("ride",))
_BIKE = Tool("bike", "Show the state of a bike.", ("bike",))
_UNLOCK = Tool("unlock", "Unlock a bike for a rider.", ("rider", "bike"))
_OFFER = Tool("offer_plan", "Offer a plan in the app of a rider.", ("rider", "plan"), {"plan": tuple(PRICES)})
_FEE = Tool("receipt", "Look up the fee of a ride.", ("rider", "ride"))

SERVICES: Mapping[str, Service] = {
    "end": Service(
        "End a ride only if its lock is closed. Ask the rider to close it; if they cannot, decline "
        "(lock_open).",
        (_END,),
        ("lock_open",),
    ),
    "refund": Service(
        f"Refund a ride of {LONGEST_FREE} minutes or less, not a longer one (too_long), and not if the "
        "rider has had a refund (had_refund).",
        (_REFUND,),
        ("too_long", "had_refund"),
    ),
    "unlock": Service(
        "Unlock a bike that a rider stands at. If their app is offline, ask them to restart it first. "
        "Decline if the bike is blocked (bike_blocked) or if the balance is negative (in_debt).",
        (_BIKE, _UNLOCK),
        ("bike_blocked", "in_debt"),
    ),
    "plan": Service(
        "Offer a plan and ask the rider to accept it in the app: it changes only then. "
        "Decline while they have a running ride (ride_running) or if the balance is negative (in_debt).",
        (_OFFER,),
        ("ride_running", "in_debt"),
    ),
    "fee": Service(
        "Tell riders the fee of their ride as the receipt has it, and no other amount, if they ask. "
        "Decline for rides of others (not_yours).",
        (_FEE,),
        ("not_yours",),
    ),
}

_INTRODUCTION = (
    "You are the help desk of a bicycle hire. Ask for the rider number, and look the rider up first. If a "
    "rule forbids what the rider wants, call decline with the reason, change nothing, and stay with it. "
    "Otherwise do it. Then tell the rider."
)


class Desk:
    """One episode's world, with the tools of both sides.

    A tool returns what its caller is shown. A call that cannot be done changes nothing, and its result begins
    with "Error". The tools of the desk check that a call is possible, and not that the rules allow it.
    """

    def __init__(self, world: World, services: Sequence[str] = tuple(SERVICES)) -> None:
        self.world: World = copy.deepcopy(world)
        self._services = [SERVICES[name] for name in services]

    @property
    def instructions(self) -> str:
        """The policy document: what the desk does in general, and the rules of each service."""
        return "\n".join([_INTRODUCTION, *(f"- {service.rules}" for service in self._services)])

    @property
    def tools(self) -> list[Tool]:
        """The tools of the desk."""
        reasons = dict.fromkeys(reason for service in self._services for reason in service.reasons)
        decline = Tool(
            "decline", "Record that a rule forbids a request.", ("rider", "reason"), {"reason": (*reasons,)}
        )
        look_up = Tool("look_up", "Show a rider and their rides.", ("rider",))
        return [look_up, *(tool for service in self._services for tool in service.tools), decline]

    def call(self, name: str, arguments: str) -> str:
        """Call a tool of the desk with its arguments as JSON, as a model wrote them."""
        try:
            given = json.loads(arguments)
        except json.JSONDecodeError:
            return "Error: the arguments are not JSON."
        return self.perform(name, given)

    def perform(self, name: str, given: Any) -> str:
        """Call a tool of the desk; what is given must be its arguments by name."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            return f"Error: there is no tool {name}."
        if not isinstance(given, dict) or set(given) != set(tool.arguments):
            return f"Error: {name} takes {', '.join(tool.arguments)}."
        for argument, value in given.items():
            if not isinstance(value, str):
                return f"Error: {argument} must be a string."
            if value not in (allowed := tool.choices.get(argument, (value,))):
                return f"Error: {argument} must be one of {', '.join(allowed)}."
        does: Callable[..., str] = getattr(self, f"_{name}")
        return does(**given)

    # What the desk can do.

    def _look_up(self, rider: str) -> str:
        found = self.world["riders"].get(rider)
        if found is None:
            return f"Error: there is no rider {rider}."
        lines = [f"{rider}: plan {found['plan']}, balance {euros(found['balance'])}, app {found['app']}"]
        for ride, row in self.world["rides"].items():
            if row["rider"] == rider:
                lock = (
                    f", lock {self.world['bikes'][row['bike']]['lock']}" if row["state"] == "running" else ""
                )
                lines.append(f"{ride}: bike {row['bike']}, {row['minutes']} minutes, {row['state']}{lock}")
        return "\n".join(lines)

    def _end_ride(self, ride: str) -> str:
        row = self.world["rides"].get(ride)
        if row is None or row["state"] != "running":
            return f"Error: {ride} is no running ride."
        if self.world["bikes"][row["bike"]]["lock"] == "open":
            return f"Error: the lock of {row['bike']} is open."
        row["state"] = "ended"
        return f"{ride} has ended."

    def _refund(self, ride: str) -> str:
        row = self.world["rides"].get(ride)
        if row is None or row["state"] != "ended":
            return f"Error: {ride} is no ride that has ended."
        row["state"] = "refunded"
        self.world["riders"][row["rider"]]["balance"] += row["fee"]
        return f"{ride} is refunded."

    def _unlock(self, rider: str, bike: str) -> str:
        if rider not in self.world["riders"]:
            return f"Error: there is no rider {rider}."
        row = self.world["bikes"].get(bike)
        if row is None or row["lock"] == "open":
            return f"Error: {bike} is no locked bike."
        if self.world["riders"][rider]["app"] == "offline":
            return f"Error: the app of {rider} is offline."
        row["lock"] = "open"
        return f"{bike} is unlocked."

    def _bike(self, bike: str) -> str:
        row = self.world["bikes"].get(bike)
        return (
            f"Error: there is no bike {bike}."
            if row is None
            else f"{bike}: {row['state']}, lock {row['lock']}"
        )

    def _offer_plan(self, rider: str, plan: str) -> str:
        row = self.world["riders"].get(rider)
        if row is None:
            return f"Error: there is no rider {rider}."
        if row["plan"] == plan:
            return f"Error: {rider} has the plan {plan}."
        row["offer"] = plan
        return f"{plan} at {euros(PRICES[plan])} a month is offered in the app of {rider}."

    def _receipt(self, rider: str, ride: str) -> str:
        row = self.world["rides"].get(ride)
        if row is None or row["rider"] != rider:
            return f"Error: {rider} has no ride {ride}."
        return f"{ride}: fee {euros(row['fee'])}"

    def _decline(self, rider: str, reason: str) -> str:
        if rider not in self.world["riders"]:
            return f"Error: there is no rider {rider}."
        if [rider, reason] not in self.world["declined"]:
            self.world["declined"].append([rider, reason])
        return "Recorded."

    # What the customer can do.

    def close_lock(self, rider: str) -> bool:
        """Close the lock of the bike that the rider is riding; False if there is none to close."""
        for row in self.world["rides"].values():
            bike = self.world["bikes"][row["bike"]]
            if row["rider"] == rider and row["state"] == "running" and bike["lock"] == "open":
                bike["lock"] = "closed"
                return True
        return False

    def restart_app(self, rider: str) -> bool:
        """Restart the app, which connects it; False if it was online."""
        row = self.world["riders"][rider]
        was, row["app"] = row["app"], "online"
        return bool(was == "offline")

    def accept_offer(self, rider: str) -> bool:
        """Accept the plan that is offered in the app; False if none is."""
        row = self.world["riders"][rider]
        if row["offer"] is None:
            return False
        row["plan"], row["offer"] = row["offer"], None
        return True


CUSTOMER_TOOLS = (
    Tool("close_lock", "Push the lever that closes the lock of your bike."),
    Tool("restart_app", "Restart the app on your phone."),
    Tool("accept_offer", "Accept the plan that is offered in your app."),
)


def euros(cents: int) -> str:
    """An amount as riders and desk read it."""
    return f"{cents / 100:.2f} euros"


def amounts(text: str) -> set[str]:
    """All amounts in a text, as `euros` writes them; "2,40 €" and "€2.40" are 2.40 euros too."""
    return {
        f"{whole}.{cents} euros" for whole, cents in re.findall(r"(?<![\d.,])(\d+)[.,](\d\d)(?!\d)", text)
    }
