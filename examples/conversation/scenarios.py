"""Scenarios: a world, a customer with one or two requests, and what the right end of the conversation is.

The same seed always gives the same scenarios. A fifth of the rider numbers occurs in held-out scenarios only.
The rules forbid a request for one reason at most, so that its right end is unique.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from desk import LONGEST_FREE, SERVICES, Desk, World, euros

Task = dict[str, Any]
Goal = dict[str, Any]

TRAIN, HELDOUT = 1000, 256
SMALL = ("end", "refund")  # the services of the small desk
FOLLOWED = 0.5  # how often a request is followed by a second one, if it is allowed and one can follow
TOLD_AT_ONCE = 0.5  # how often the customer opens with a fact that the desk needs
STRETCHES = {"short": (1, LONGEST_FREE), "long": (LONGEST_FREE + 1, 60)}  # minutes


def train_tasks(seed: int = 0) -> list[Task]:
    """The scenarios of training, of the whole desk."""
    return [scenario(f"train/{seed}/{n}", tuple(SERVICES), held_out=False) for n in range(TRAIN)]


def heldout_tasks() -> list[Task]:
    """Held-out scenarios of the whole desk."""
    return [scenario(f"heldout/{n}", tuple(SERVICES), held_out=True) for n in range(HELDOUT)]


def small_train_tasks(seed: int = 0) -> list[Task]:
    """The scenarios of training, of a desk with the services of SMALL."""
    return [scenario(f"small-train/{seed}/{n}", SMALL, held_out=False) for n in range(TRAIN)]


def small_heldout_tasks() -> list[Task]:
    """Held-out scenarios of the small desk."""
    return [scenario(f"small-heldout/{n}", SMALL, held_out=True) for n in range(HELDOUT)]


def scenario(name: str, services: Sequence[str], *, held_out: bool) -> Task:
    """The scenario of this name.

    `actions` is a solution, for each request: who calls which tool with what, in order. `hears` are the
    amounts that the customer must be told, and no others; None if it asks for no fee.
    """
    rng = random.Random(name)
    draft = _Draft(rng, held_out=held_out)
    service = rng.choice(services)
    _REQUESTS[service](draft)
    first = draft.goals[0]
    followers = [follower for follower in _FOLLOWERS.get(service, ()) if follower in services]
    if first["kind"] == "allowed" and followers and rng.random() < FOLLOWED:
        _REQUESTS[rng.choice(followers)](draft, after=first)
    draft.add_others()
    goals = draft.goals
    return {
        "id": name,
        "kind": "two requests" if len(goals) == 2 else goals[0]["kind"],
        "service": " and ".join(goal["service"] for goal in goals),
        "services": [*services],
        "world": draft.world,
        "customer": {"rider": draft.rider, "goals": goals, "seed": rng.randrange(2**31)},
        "actions": draft.actions,
        "hears": [*draft.hears] if any(goal["service"] == "fee" for goal in goals) else None,
    }


def reference_world(task: Task) -> World:
    """The world after the solution of a task."""
    desk = Desk(task["world"], task["services"])
    for who, tool, arguments in chain.from_iterable(task["actions"]):
        if who == "desk":
            result = desk.perform(tool, arguments)
            assert not result.startswith("Error"), (task["id"], result)
        else:
            assert getattr(desk, tool)(task["customer"]["rider"]), (task["id"], tool)
    return desk.world


class _Draft:
    """A scenario in the making: each request adds what it needs to the world, and its solution."""

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self.world: World = {"riders": {}, "rides": {}, "bikes": {}, "declined": []}
        self.goals: list[Goal] = []
        self.actions: list[list[list[Any]]] = []  # for each request
        self.hears: list[str] = []
        self.rider = self.new_rider()

    def new_rider(self) -> str:
        """Add a rider with a plan, a balance and an app that is online; return the number."""
        # By the sum of the digits, so that each digit occurs at each place in training too.
        numbers = [n for n in range(100, 1000) if (sum(map(int, str(n))) % 5 == 0) == self.held_out]
        name = self._new("riders", "R", numbers)
        balance = self.rng.randrange(1000, 3000, 10)  # cents
        self.world["riders"][name] = {"plan": "basic", "balance": balance, "app": "online", "offer": None}
        return name

    def new_bike(self, lock: str, state: str = "usable") -> str:
        """Add a bike; return its number."""
        name = self._new("bikes", "B", range(10, 100))
        self.world["bikes"][name] = {"lock": lock, "state": state}
        return name

    def new_ride(self, rider: str, stretch: str, state: str, *, lock: str = "closed") -> str:
        """Add a ride on a bike of its own; return its number. No two rides have the same fee."""
        rides = self.world["rides"]
        name = self._new("rides", "T", range(100, 1000))
        fees = {row["fee"] for row in rides.values()}
        rides[name] = {
            "rider": rider,
            "bike": self.new_bike(lock),
            "minutes": self.rng.randint(*STRETCHES[stretch]),
            "state": state,
            "fee": self.rng.choice([cents for cents in range(110, 890, 10) if cents not in fees]),
        }
        return name

    def _new(self, kind: str, letter: str, numbers: Sequence[int]) -> str:
        """Return a number that is not taken yet."""
        while (name := f"{letter}{self.rng.choice(numbers)}") in self.world[kind]:
            pass
        return name

    def request(
        self, service: str, of: str, facts: dict[str, str], *, reason: str = "", willing: bool = True
    ) -> None:
        """Add a request of the customer.

        Args:
            of: the number of what it is about, or a plan.
            facts: what the customer knows; some of it opens the conversation.
            reason: the rule that forbids it.
            willing: whether the customer does what the desk asks for.
        """
        if not self.goals:
            facts = {"rider": self.rider, **facts}
        goal = {
            "service": service,
            "kind": "forbidden" if reason else "allowed",
            "of": of,
            "facts": facts,
            "opens_with": [name for name in facts if name == "plan" or self.rng.random() < TOLD_AT_ONCE],
            "willing": willing,
            "insists": self.rng.randint(0, 2),  # times, after a refusal
        }
        self.goals.append(goal)
        self.actions.append([])
        if reason:
            self.desk_does("decline", rider=self.rider, reason=reason)

    def desk_does(self, tool: str, **arguments: str) -> None:
        """Add a call of the desk to the solution of the latest request."""
        self.actions[-1].append(["desk", tool, arguments])

    def customer_does(self, tool: str) -> None:
        """Add something that only the customer can do."""
        self.actions[-1].append(["customer", tool, {}])

    def add_others(self) -> None:
        """Fill the world with rides that nobody asks about, of this rider and of another one."""
        self.new_ride(self.rider, "long", "ended")
        self.new_ride(self.new_rider(), "long", "ended")
        for name in ("rides", "bikes"):
            rows = [*self.world[name].items()]
            self.rng.shuffle(rows)
            self.world[name] = dict(rows)


def _end(draft: _Draft, after: Goal | None = None) -> None:
    lock, willing = draft.rng.choice([("closed", True), ("open", True), ("open", True), ("open", False)])
    ride = draft.new_ride(draft.rider, draft.rng.choice([*STRETCHES]), "running", lock=lock)
    draft.request("end", ride, {}, reason="" if willing else "lock_open", willing=willing)
    if willing:
        if lock == "open":
            draft.customer_does("close_lock")
        draft.desk_does("end_ride", ride=ride)


def _refund(draft: _Draft, after: Goal | None = None) -> None:
    if after is not None:
        ride = after["of"]
        reason = "too_long" if draft.world["rides"][ride]["minutes"] > LONGEST_FREE else ""
    else:
        reason = draft.rng.choice(["", "", "too_long", "had_refund"])
        ride = draft.new_ride(draft.rider, "long" if reason == "too_long" else "short", "ended")
        if reason == "had_refund":
            draft.new_ride(draft.rider, draft.rng.choice([*STRETCHES]), "refunded")
    draft.request("refund", ride, {"ride": ride}, reason=reason)
    if not reason:
        draft.desk_does("refund", ride=ride)


def _unlock(draft: _Draft, after: Goal | None = None) -> None:
    reason = draft.rng.choice(["", "", "bike_blocked", "in_debt"])
    bike = draft.new_bike("closed", "blocked" if reason == "bike_blocked" else "usable")
    rider = draft.world["riders"][draft.rider]
    if reason == "in_debt":
        rider["balance"] = -rider["balance"]
    draft.request("unlock", bike, {"bike": bike}, reason=reason)
    if not reason:
        if draft.rng.random() < 0.6:
            rider["app"] = "offline"
            draft.customer_does("restart_app")
        draft.desk_does("unlock", rider=draft.rider, bike=bike)


def _plan(draft: _Draft, after: Goal | None = None) -> None:
    reason = "" if after else draft.rng.choice(["", "", "ride_running", "in_debt"])
    rider = draft.world["riders"][draft.rider]
    if reason == "in_debt":
        rider["balance"] = -rider["balance"]
    if reason == "ride_running":
        draft.new_ride(draft.rider, "long", "running", lock=draft.rng.choice(["open", "closed"]))
    if draft.rng.random() < 0.5:
        rider["plan"] = "plus"
    wanted = "plus" if rider["plan"] == "basic" else "basic"
    draft.request("plan", wanted, {"plan": wanted}, reason=reason)
    if not reason:
        draft.desk_does("offer_plan", rider=draft.rider, plan=wanted)
        draft.customer_does("accept_offer")


def _fee(draft: _Draft, after: Goal | None = None) -> None:
    reason = "" if after else draft.rng.choice(["", "", "not_yours"])
    ride = (
        after["of"]
        if after
        else draft.new_ride(draft.new_rider() if reason else draft.rider, "long", "ended")
    )
    draft.request("fee", ride, {"ride": ride}, reason=reason)
    if not reason:
        draft.desk_does("receipt", rider=draft.rider, ride=ride)
        draft.hears.append(euros(draft.world["rides"][ride]["fee"]))


_REQUESTS: dict[str, Callable[..., None]] = {
    "end": _end, "refund": _refund, "unlock": _unlock, "plan": _plan, "fee": _fee,
}  # fmt: skip
# What may follow a request that is allowed: something about the same ride, or what it has made possible.
_FOLLOWERS = {"end": ("refund", "fee", "plan"), "fee": ("refund",), "refund": ("fee",)}
