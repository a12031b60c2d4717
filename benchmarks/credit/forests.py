"""Small environments whose episodes can all be enumerated, in the shapes that the episodes of agents have.

An environment is a function that plays one episode: it begins and records model calls as a proxy would, and
posts rewards. A call that makes a decision samples one of two actions with the decision's own probability.
All probabilities and rewards are rational numbers, so that expectations over the outcomes are exact. No
reward depends on a call that began after the rewarded turn was recorded, as `credit: reward_to_go` assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from areal_agents.core.rollout import RewardScope

Posting = Literal["episode", "turn", "branch", "mixed"]
POSTINGS: tuple[Posting, ...] = get_args(Posting)
_ROTATION: tuple[RewardScope, ...] = ("episode", "turn", "branch")


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded turn of an episode, which samples one token.

    Attributes:
        parent: index of the turn that it continues; None for a root.
        recorded_before: the number of turns that were recorded when its call began.
        decision: the state in which it chose between the actions 0 and 1; "" if there was no choice.
        action: the sampled token.
    """

    parent: int | None
    recorded_before: int
    decision: str
    action: int


@dataclass(frozen=True, slots=True)
class PostedReward:
    """A reward; `step` is the index of its turn, or of the leaf of its branch, and None for the episode."""

    scope: RewardScope
    step: int | None
    value: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One possible course of an episode.

    Attributes:
        steps: in recording order.
        payments: rewards earned, as (index of the step that earned the reward, value).
    """

    steps: tuple[Step, ...]
    payments: tuple[tuple[int, int], ...]

    @property
    def score(self) -> int:
        """The sum of all rewards."""
        return sum(value for _, value in self.payments)

    def posted(self, posting: Posting) -> tuple[PostedReward, ...]:
        """The payments as rewards.

        episode: one reward of the episode, their sum. turn: each to its own turn. branch: each to the first
        recorded leaf that its turn leads to. mixed: the first payment to the episode, the second to its
        turn, the third to its branch, and so on.
        """
        if posting == "episode":
            return (PostedReward("episode", None, self.score),)
        scopes = _ROTATION if posting == "mixed" else (posting,)
        rewards = []
        for number, (step, value) in enumerate(self.payments):
            scope = scopes[number % len(scopes)]
            target = {"episode": None, "turn": step, "branch": self._leaf(step)}[scope]
            rewards.append(PostedReward(scope, target, value))
        return tuple(rewards)

    def _leaf(self, step: int) -> int:
        parents = {s.parent for s in self.steps}
        for leaf in range(len(self.steps)):
            place: int | None = leaf
            while place is not None and place != step:
                place = self.steps[place].parent
            if place == step and leaf not in parents:
                return leaf
        raise AssertionError(f"turn {step} leads to no leaf")


@dataclass(slots=True)
class Call:
    """A model call that has begun; `index` is its index among the recorded turns, or None until it is
    recorded."""

    parent: Call | None
    recorded_before: int
    decision: str = ""
    action: int = 0
    index: int | None = None


@dataclass(slots=True)
class Play:
    """One episode while it is played. Decisions take their actions from `script`, and are 0 after its end."""

    script: Sequence[int]
    taken: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    payments: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, parent: Call | None = None) -> Call:
        """Begin a call that continues a recorded turn, or a new root."""
        if parent is not None and parent.index is None:
            raise ValueError("a call continues a turn that is not recorded yet")
        return Call(parent, len(self.steps))

    def decide(self, call: Call, decision: str) -> int:
        """Sample the call's action in the state `decision`, before the turn is recorded."""
        if any(step.decision == decision for step in self.steps):
            raise ValueError(f"an episode decides twice in the state {decision!r}")
        call.decision = decision
        call.action = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(call.action)
        return call.action

    def record(self, call: Call) -> Call:
        """Record the turn of a call."""
        parent = None if call.parent is None else call.parent.index
        call.index = len(self.steps)
        self.steps.append(Step(parent, call.recorded_before, call.decision, call.action))
        return call

    def turn(self, decision: str = "", parent: Call | None = None) -> Call:
        """Play a whole turn: a call that is recorded before anything else happens."""
        call = self.begin(parent)
        if decision:
            self.decide(call, decision)
        return self.record(call)

    def pay(self, call: Call, value: int) -> None:
        """Earn a reward for a recorded turn."""
        if call.index is None:
            raise ValueError("a call earned a reward before it was recorded")
        self.payments.append((call.index, value))


@dataclass(frozen=True, slots=True)
class ForestTask:
    """A task whose episodes have the same shape.

    Attributes:
        name: name of the shape.
        play: plays one episode.
        probabilities: by decision, the probability σ(θ) of action 1, where θ is the decision's logit.
    """

    name: str
    play: Callable[[Play], None]
    probabilities: Mapping[str, Fraction]

    def outcomes(self) -> tuple[Outcome, ...]:
        """Every possible episode, each once."""
        found: list[Outcome] = []
        pending: list[tuple[int, ...]] = [()]
        while pending:
            script = pending.pop()
            play = Play(script)
            self.play(play)
            found.append(Outcome(tuple(play.steps), tuple(play.payments)))
            for place in range(len(script), len(play.taken)):
                pending.append((*play.taken[:place], 1))
        return tuple(found)

    def probability(self, outcome: Outcome, probabilities: Mapping[str, Fraction] | None = None) -> Fraction:
        """Return the probability of an outcome, under the task's own probabilities or under others."""
        known = self.probabilities if probabilities is None else probabilities
        product = Fraction(1)
        for step in outcome.steps:
            if step.decision:
                product *= known[step.decision] if step.action else 1 - known[step.decision]
        return product

    def log_gradient(self, step: Step) -> Fraction:
        """∂ log π(action) / ∂θ of the step's decision, a − σ(θ); 0 for a turn without a choice."""
        return step.action - self.probabilities[step.decision] if step.decision else Fraction(0)


def linear() -> ForestTask:
    """Three turns, each with a reward and continuing the one before."""

    def play(episode: Play) -> None:
        first = episode.turn("first")
        second = episode.turn(f"second after {first.action}", first)
        third = episode.turn("third" if first.action == second.action else "", second)
        episode.pay(first, 3 * first.action)
        episode.pay(second, 6 * (first.action == second.action))
        episode.pay(third, 9 * third.action * (1 + second.action) - 3 * first.action)

    return ForestTask(
        "linear",
        play,
        {
            "first": Fraction(3, 10),
            "second after 0": Fraction(4, 5),
            "second after 1": Fraction(2, 5),
            "third": Fraction(7, 10),
        },
    )


def new_root() -> ForestTask:
    """The second turn is a new root, and the only reward is posted on it."""

    def play(episode: Play) -> None:
        first = episode.turn("first")
        second = episode.turn(f"second after {first.action}")
        episode.pay(second, 3 * first.action + 6 * (first.action == second.action))

    return ForestTask(
        "new_root",
        play,
        {
            "first": Fraction(3, 10),
            "second after 0": Fraction(3, 5),
            "second after 1": Fraction(7, 10),
        },
    )


def branches(count: int, *, overlapping: bool) -> ForestTask:
    """A turn that `count` rewarded turns continue, concurrently or one after another; two of them make a
    decision if the root's action was 1.

    If they overlap, each of the two has a reward that depends on both actions.
    """

    def play(episode: Play) -> None:
        root = episode.turn("root")
        began: list[Call] = []
        for number in range(count):
            began.append(episode.begin(root))
            if not overlapping:
                _decide(episode, began, number)
                episode.record(began[number])
        if overlapping:
            for number in range(count):
                _decide(episode, began, number)
            for number in reversed(range(count)):
                episode.record(began[number])
        one, two = began[0].action, began[1].action
        episode.pay(began[0], 3 * root.action + 6 * (one == root.action) - (3 * two if overlapping else 0))
        episode.pay(began[1], 9 * root.action + 6 * two - 3 * one)
        for number in range(2, count):
            episode.pay(began[number], 3 * number * root.action)

    def _decide(episode: Play, began: Sequence[Call], number: int) -> None:
        parent = began[number].parent
        if parent is None or not parent.action:
            return
        if number == 0:
            episode.decide(began[0], "one")
        elif number == 1:
            episode.decide(began[1], "two" if overlapping else f"two after {began[0].action}")

    second = (
        {"two": Fraction(2, 5)}
        if overlapping
        else {"two after 0": Fraction(1, 5), "two after 1": Fraction(3, 5)}
    )
    return ForestTask(f"branches_{count}", play, {"root": Fraction(3, 10), "one": Fraction(7, 10), **second})


def parallel_subagents() -> ForestTask:
    """A main agent that runs two sub-agents in one environment, one after another or concurrently.

    The main agent's action decides whether the calls overlap. If they do, the action of the first sub-agent
    decides how long its own call lasts, and thereby the order of recording and whether its next turn begins
    before the other sub-agent's turn is recorded.
    """

    def play(episode: Play) -> None:
        main = episode.turn("dispatch")
        if not main.action:
            first = episode.turn("first alone")
            second = episode.turn("second alone" if first.action else "")
            final = episode.turn(parent=main)
            episode.pay(first, 3 * first.action)
            episode.pay(second, 6 * (first.action == second.action))
            episode.pay(final, 9 * second.action - 3 * first.action)
            return
        first, second = episode.begin(), episode.begin()
        is_quick = episode.decide(first, "first beside second")
        if is_quick:
            episode.record(first)
            later = episode.turn("later beside second", first)
            episode.record(second)
        else:
            episode.decide(second, "second beside first")
            episode.record(second)
            episode.record(first)
            later = episode.turn(parent=first)
        final = episode.turn(parent=main)
        episode.pay(first, 6 * second.action - 3 * first.action)
        # The second sub-agent observes what the first one has done so far: the first one's later turn only if
        # it began before the second one's turn was recorded.
        episode.pay(second, 9 * first.action + (12 * later.action if is_quick else 3))
        episode.pay(later, 3 + 6 * later.action)
        episode.pay(final, 12 * second.action + 6 * later.action)

    return ForestTask(
        "parallel_subagents",
        play,
        {
            "dispatch": Fraction(2, 5),
            "first alone": Fraction(7, 10),
            "second alone": Fraction(3, 5),
            "first beside second": Fraction(3, 10),
            "second beside first": Fraction(4, 5),
            "later beside second": Fraction(1, 5),
        },
    )


def compaction() -> ForestTask:
    """Two turns, after which the conversation is compacted into a new root and a turn that continues it.

    The last decision changes nothing, so its gradient is 0.
    """

    def play(episode: Play) -> None:
        first = episode.turn("first")
        second = episode.turn(parent=first)
        compacted = episode.turn(f"compacted after {first.action}")
        last = episode.turn("" if first.action else "last", compacted)
        episode.pay(second, 3 + 6 * first.action)
        episode.pay(compacted, 3 * compacted.action)
        episode.pay(last, 9 * (first.action == compacted.action))

    return ForestTask(
        "compaction",
        play,
        {
            "first": Fraction(3, 10),
            "compacted after 0": Fraction(3, 5),
            "compacted after 1": Fraction(1, 5),
            "last": Fraction(7, 10),
        },
    )


def early_end() -> ForestTask:
    """An action ends the episode after one or two turns; other episodes of the group continue to a third."""

    def play(episode: Play) -> None:
        first = episode.turn("first")
        episode.pay(first, 3)
        if first.action:
            return
        second = episode.turn("second", first)
        episode.pay(second, 6 * second.action)
        if second.action:
            return
        third = episode.turn("third", second)
        episode.pay(third, 18 * third.action)
        episode.pay(third, -3)

    return ForestTask(
        "early_end", play, {"first": Fraction(3, 10), "second": Fraction(2, 5), "third": Fraction(3, 5)}
    )


def forests() -> tuple[ForestTask, ...]:
    """The tasks of `python -m benchmarks credit`."""
    return (
        linear(),
        new_root(),
        branches(2, overlapping=False),
        branches(8, overlapping=True),
        parallel_subagents(),
        compaction(),
        early_end(),
    )
