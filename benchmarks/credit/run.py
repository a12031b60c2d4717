"""`python -m benchmarks credit`: the expected policy gradient of every forest, by enumeration.

For each task of `benchmarks.credit.forests` all groups of `GROUP_SIZE` episodes are enumerated, with their
probabilities. The advantages come from `build_training_data`, as a trainer calls it; their correct
expectation is computed here from the definition of the returns only, without other code of the package. For a
decision with the logit θ the two sides are

    found(θ)     = E[1/G · Σ_i Σ_{t of i} A_t · ∂ log π(a_t) / ∂θ]        over groups of G episodes
    reference(θ) = E[Σ_t return_t · ∂ log π(a_t) / ∂θ]                    over episodes

and a figure is the ratio found/reference of the decision for which it is furthest from the correct value: 1 −
1/G with the mean of the group, which contains the episode itself, and 1 with leave-one-out. All sums use
rational numbers; the float32 advantages are converted exactly.

The keys of the figures are `<forest>_<posting>_<credit>_<baseline>`. `mixed` posts the rewards of an
episode in turn to the episode, to their turns and to their branches; the suffix `discounted` of a posting
says that `turn_discount` is 0.5 (reward_to_go only). `std` is the group's mean and standard deviation
(credit: episode): the ratio is to the gradient of a linear episode with the same decisions and the same
score, and the correct value is 1.
"""

from __future__ import annotations

import json as jsonlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import build_training_data
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.trajectory import Turn
from benchmarks.credit.forests import POSTINGS, ForestTask, Outcome, PostedReward, Posting, Step, forests

GROUP_SIZE = 4
DISCOUNT = Fraction(1, 2)
ZERO = 1e-12  # upper bound of an expected gradient whose reference is 0

CreditName = Literal["episode", "reward_to_go"]
Baseline = Literal["mean", "loo", "std"]


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """An outcome with its rewards posted.

    Attributes:
        number: index of the outcome among those of its task.
        steps: the turns in recording order.
        rewards: the rewards of the episode, of turns and of branches.
    """

    number: int
    steps: tuple[Step, ...]
    rewards: tuple[PostedReward, ...]


# The advantages of a group: for each of its episodes, one number per turn, 0 if the turn is not trained.
Advantages = Callable[[Sequence[Attempt]], Sequence[Sequence[float | Fraction]]]
# The return of one turn of an episode, given by its index.
Return = Callable[[Attempt, int], Fraction]
Gradients = Mapping[str, Fraction]  # by decision


def score_return(attempt: Attempt, step: int) -> Fraction:
    """The return of `credit: episode`: the sum of all rewards of the episode."""
    return Fraction(sum(reward.value for reward in attempt.rewards))


def reward_to_go(discount: Fraction) -> Return:
    """The return of `credit: reward_to_go`, D(k) at the turn's own k.

        D(k) = episode reward + Σ_{u ≥ k} γ^max(0, depth(u) − depth(k)) · r_u

    over the turns in recording order without the first k; depth(k) is 1 + the greatest depth among the first
    k turns, and a turn's own depth is depth at its own k.
    """

    def at(attempt: Attempt, step: int) -> Fraction:
        return _to_go(attempt, attempt.steps[step].recorded_before, discount)

    return at


def _to_go(attempt: Attempt, recorded: int, discount: Fraction) -> Fraction:
    depths: list[int] = []
    for step in attempt.steps:
        depths.append(1 + max(depths[: step.recorded_before], default=0))
    here = 1 + max(depths[:recorded], default=0)
    total = Fraction(0)
    for reward in attempt.rewards:
        if reward.step is None:
            total += reward.value
        elif reward.step >= recorded:
            total += reward.value * discount ** max(0, depths[reward.step] - here)
    return total


def attempts(outcomes: Sequence[Outcome], posting: Posting) -> tuple[Attempt, ...]:
    """The outcomes of a task with their rewards posted in one way."""
    return tuple(Attempt(n, outcome.steps, outcome.posted(posting)) for n, outcome in enumerate(outcomes))


def linear_attempts(outcomes: Sequence[Outcome]) -> tuple[Attempt, ...]:
    """Linear episodes with the decisions and the scores of the outcomes, and one reward each at the end."""
    made = []
    for number, outcome in enumerate(outcomes):
        steps = tuple(
            Step(place - 1 if place else None, place, step.decision, step.action)
            for place, step in enumerate(outcome.steps)
        )
        made.append(Attempt(number, steps, (PostedReward("episode", None, outcome.score),)))
    return tuple(made)


def expected_gradients(
    task: ForestTask, outcomes: Sequence[Outcome], made: Sequence[Attempt], advantages: Advantages
) -> Gradients:
    """E[1/G · Σ advantage · ∂ log π / ∂θ] over all groups of `GROUP_SIZE` episodes, by decision.

    Args:
        made: the outcomes with their rewards, in the order of `outcomes`.
    """
    probabilities = [task.probability(outcome) for outcome in outcomes]
    total = dict.fromkeys(task.probabilities, Fraction(0))
    for members in combinations_with_replacement(range(len(made)), GROUP_SIZE):
        weight = Fraction(math.factorial(GROUP_SIZE), GROUP_SIZE)
        for number, count in Counter(members).items():
            weight *= probabilities[number] ** count / math.factorial(count)
        of_group: dict[str, Fraction] = {}
        values = advantages([made[number] for number in members])
        for number, of_episode in zip(members, values, strict=True):
            for step, advantage in zip(made[number].steps, of_episode, strict=True):
                if step.decision and advantage:
                    term = Fraction(advantage) * task.log_gradient(step)
                    of_group[step.decision] = of_group.get(step.decision, Fraction(0)) + term
        for decision, value in of_group.items():
            total[decision] += weight * value
    return total


def return_gradients(
    task: ForestTask, outcomes: Sequence[Outcome], made: Sequence[Attempt], of: Return
) -> Gradients:
    """E[Σ return · ∂ log π / ∂θ] over episodes, by decision."""
    total = dict.fromkeys(task.probabilities, Fraction(0))
    for outcome, attempt in zip(outcomes, made, strict=True):
        probability = task.probability(outcome)
        for place, step in enumerate(attempt.steps):
            if step.decision:
                total[step.decision] += probability * of(attempt, place) * task.log_gradient(step)
    return total


def score_gradients(task: ForestTask, outcomes: Sequence[Outcome]) -> Gradients:
    """∂ E[score] / ∂θ by decision, without the log-derivative.

    An episode makes a decision at most once, so E[score] is linear in each probability p = σ(θ): its
    derivative in p is its value at p = 1 less that at p = 0, and ∂p/∂θ = p (1 − p).
    """

    def expected(decision: str, value: int) -> Fraction:
        changed = {**task.probabilities, decision: Fraction(value)}
        terms = (task.probability(outcome, changed) * outcome.score for outcome in outcomes)
        return sum(terms, Fraction(0))

    return {
        decision: (expected(decision, 1) - expected(decision, 0)) * p * (1 - p)
        for decision, p in task.probabilities.items()
    }


def worst_ratio(found: Gradients, reference: Gradients, right: Fraction) -> Fraction:
    """found/reference of the decision for which it is furthest from `right`.

    Raises:
        ValueError: an expected gradient is not 0 where the reference is 0, or the reference is 0 everywhere.
    """
    ratios = []
    for decision, expected in reference.items():
        if expected:
            ratios.append(found[decision] / expected)
        elif abs(found[decision]) >= ZERO:
            raise ValueError(
                f"the expected gradient of the decision {decision!r} is {float(found[decision]):.3e}, "
                "expected 0"
            )
    if not ratios:
        raise ValueError("no decision has an expected gradient other than 0")
    return max(ratios, key=lambda ratio: abs(ratio - right))


@dataclass(slots=True)
class BuiltAdvantages:
    """Computes the advantages of a group with `build_training_data`, as they are trained: summed over a
    turn's tokens.

    One object serves the attempts of one task and posting, and builds their episodes once.
    """

    config: AlgorithmConfig
    _episodes: dict[tuple[int, int], RecordedEpisode] = field(default_factory=dict)

    def __call__(self, group: Sequence[Attempt]) -> list[list[float]]:
        rollouts = []
        for index, attempt in enumerate(group):
            key = (attempt.number, index)
            if key not in self._episodes:
                self._episodes[key] = as_episode(attempt, id=f"outcome-{attempt.number}-member-{index}")
            rollouts.append(Rollout(_TASK, index, self._episodes[key], None))
        data = build_training_data([RolloutGroup("group", _TASK, tuple(rollouts))], self.config)
        values = {
            rollout.episode.id: [0.0] * len(attempt.steps)
            for rollout, attempt in zip(rollouts, group, strict=True)
        }
        for sample in data.samples:
            for place in np.flatnonzero(sample.loss_mask).tolist():
                values[sample.episode_id][int(sample.turn_index[place])] += float(sample.advantages[place])
        return list(values.values())


_TASK = Task("task", {})
_PROMPT = np.array([7, 8], np.int32)
_SAMPLING = SamplingParams(max_new_tokens=1)


def as_episode(attempt: Attempt, *, id: str) -> RecordedEpisode:
    """The episode as it would be recorded: one sampled token per turn, whose id is the action."""
    turns = tuple(
        Turn(
            id=_turn_id(id, place),
            parent=None if step.parent is None else _turn_id(id, step.parent),
            new_messages=(Message("user", f"{place}"),),
            new_prompt_ids=_PROMPT,
            completion=Completion([step.action], [-0.5], [0], "stop"),  # type: ignore[arg-type]
            reply=Message("assistant", f"{step.action}"),
            sampling=_SAMPLING,
            recorded_before=step.recorded_before,
        )
        for place, step in enumerate(attempt.steps)
    )
    rewards = tuple(
        Reward(
            reward.scope,
            "" if reward.step is None else _turn_id(id, reward.step),
            f"reward {number}",
            float(reward.value),
        )
        for number, reward in enumerate(attempt.rewards)
    )
    return RecordedEpisode(id, _TASK, turns, "finished", rewards)


def _turn_id(episode: str, place: int) -> str:
    return f"{episode}-turn-{place}"


def algorithm(credit: CreditName, baseline: Baseline, discount: Fraction = Fraction(1)) -> AlgorithmConfig:
    """Dr. GRPO with one kind of credit and one baseline; every group is trained on."""
    settings: dict[str, Any] = {"credit": credit, "leave_one_out": baseline == "loo"}
    settings["advantage_std"] = "group" if baseline == "std" else "none"
    if discount != 1:
        settings["turn_discount"] = float(discount)
    return AlgorithmConfig(preset="dr_grpo", **settings)


def right_value(baseline: Baseline) -> Fraction:
    """The correct value of a figure with this baseline."""
    return 1 - Fraction(1, GROUP_SIZE) if baseline == "mean" else Fraction(1)


def measure(tasks: Sequence[ForestTask] | None = None) -> dict[str, float]:
    """Compute all figures by their keys; see the module's docstring.

    Raises:
        ValueError: an expected gradient that should be 0 is not.
        RuntimeError: for some task, the return's gradient differs from that of the expected score although
            nothing is discounted.
    """
    return dict(_figures(forests() if tasks is None else tasks))


def _figures(tasks: Sequence[ForestTask]) -> Iterator[tuple[str, float]]:
    for task in tasks:
        outcomes = task.outcomes()
        total = sum((task.probability(outcome) for outcome in outcomes), Fraction(0))
        assert total == 1, f"{task.name}: the probabilities of the outcomes sum to {total}"
        straight = linear_attempts(outcomes)
        as_linear = expected_gradients(task, outcomes, straight, BuiltAdvantages(algorithm("episode", "std")))
        for posting in POSTINGS:
            made = attempts(outcomes, posting)
            for credit, discount, baseline in _SETTINGS:
                suffix = "" if discount == 1 else "_discounted"
                key = f"{task.name}_{posting}{suffix}_{credit}_{baseline}"
                if baseline == "std":
                    reference = as_linear
                else:
                    of = score_return if credit == "episode" else reward_to_go(discount)
                    reference = return_gradients(task, outcomes, made, of)
                    if discount == 1 and reference != score_gradients(task, outcomes):
                        raise RuntimeError(
                            f"{key}: the return's gradient differs from that of the expected score"
                        )
                built = BuiltAdvantages(algorithm(credit, baseline, discount))
                found = expected_gradients(task, outcomes, made, built)
                try:
                    yield key, float(worst_ratio(found, reference, right_value(baseline)))
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None


_SETTINGS: tuple[tuple[CreditName, Fraction, Baseline], ...] = (
    ("episode", Fraction(1), "mean"),
    ("episode", Fraction(1), "loo"),
    ("episode", Fraction(1), "std"),
    ("reward_to_go", Fraction(1), "mean"),
    ("reward_to_go", Fraction(1), "loo"),
    ("reward_to_go", DISCOUNT, "mean"),
    ("reward_to_go", DISCOUNT, "loo"),
)


_TABLE_WIDTH = 120


def run(*, json: bool) -> dict[str, float]:
    """Measure and print a table and then, with `json`, one JSON object with all figures."""
    figures = measure()
    table = Table("forest", "rewards", title=f"Expected gradient over the true one, G = {GROUP_SIZE}")
    for credit, discount, baseline in _SETTINGS:
        of = credit if discount == 1 else f"γ = {float(discount):g}"
        heading = f"{of}\n{baseline}\n({float(right_value(baseline)):g})"
        table.add_column(heading, justify="right", no_wrap=True)
    for task in forests():
        for posting in POSTINGS:
            row = []
            for credit, discount, baseline in _SETTINGS:
                suffix = "" if discount == 1 else "_discounted"
                row.append(f"{figures[f'{task.name}_{posting}{suffix}_{credit}_{baseline}']:.9g}")
            table.add_row(task.name, posting, *row)
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    if json:
        print(jsonlib.dumps(figures))
    return figures
