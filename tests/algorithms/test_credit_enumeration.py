"""Credit on forests: the expected gradient by enumeration, and every advantage by its definition."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import numpy as np
import pytest
from algorithms_support import episode, group, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import build_training_data
from areal_agents.core.rollout import Reward, RolloutGroup
from areal_agents.core.trajectory import Turn
from benchmarks.credit.forests import (
    POSTINGS,
    ForestTask,
    Outcome,
    Play,
    Posting,
    branches,
    compaction,
    early_end,
    forests,
    linear,
    new_root,
    parallel_subagents,
)
from benchmarks.credit.run import (
    GROUP_SIZE,
    Advantages,
    Attempt,
    BuiltAdvantages,
    Return,
    algorithm,
    attempts,
    expected_gradients,
    linear_attempts,
    measure,
    return_gradients,
    reward_to_go,
    score_gradients,
    score_return,
    worst_ratio,
)

# --- The figures of `python -m benchmarks credit`.


# The tasks with the most outcomes take up to a minute each.
LONG_TASKS = ("linear", "branches_2", "branches_8", "compaction", "parallel_subagents")


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[pytest.mark.slow] if task.name in LONG_TASKS else [], id=task.name)
        for task in forests()
    ],
)
def test_every_expected_gradient_is_the_right_multiple_of_the_true_one(task: ForestTask) -> None:
    figures = measure([task])
    right = {"mean": 0.75, "loo": 1.0, "std": 1.0}
    expected = {
        f"{task.name}_{posting}{suffix}_{credit}_{baseline}": right[baseline]
        for posting in POSTINGS
        for credit, suffix, baselines in (
            ("episode", "", ("mean", "loo", "std")),
            ("reward_to_go", "", ("mean", "loo")),
            ("reward_to_go", "_discounted", ("mean", "loo")),
        )
        for baseline in baselines
    }
    assert figures.keys() == expected.keys()
    wrong = {key: value for key, value in figures.items() if not abs(value - expected[key]) < 1e-9}
    assert not wrong


@pytest.mark.parametrize("credit", ["episode", "reward_to_go"])
def test_dropping_equal_groups_does_not_change_the_expected_gradient(
    credit: Literal["episode", "reward_to_go"],
) -> None:
    config = AlgorithmConfig(preset="decoupled_ppo", credit=credit, advantage_std="none")  # type: ignore[call-arg]
    assert config.drop_equal_groups
    task = early_end()
    outcomes = task.outcomes()
    of = score_return if credit == "episode" else reward_to_go(Fraction(1))
    made = attempts(outcomes, "turn")
    found = expected_gradients(task, outcomes, made, BuiltAdvantages(config))
    assert found == {
        key: value * Fraction(3, 4) for key, value in return_gradients(task, outcomes, made, of).items()
    }


def test_the_command_prints_the_figures_as_its_last_line(tmp_path) -> None:
    """Run the command on the smallest task, to check its table and its JSON object."""
    code = (
        "from benchmarks.credit import forests, run\n"
        "run.forests = lambda: (forests.new_root(),)\n"
        "from areal_agents.cli import run_app\n"
        "from benchmarks.__main__ import app\n"
        "run_app(app)\n"
    )
    command = [sys.executable, "-c", code, "credit", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    figures = json.loads(printed.splitlines()[-1])
    assert figures == measure([new_root()])
    assert sum(line.count("new_root") for line in printed.splitlines()[:-1]) == len(POSTINGS)


# --- The oracle itself: it accepts the definition, and detects deliberate errors.


def by_definition(of: Return | None, discount: Fraction, *, leave_one_out: bool) -> Advantages:
    """The return less its baseline, in rational numbers. If `of` is None, the return is reward to go, whose
    baseline depends on the turn."""

    to_go = cache(_reward_to_go)

    def advantages(group: Sequence[Attempt]) -> list[list[Fraction]]:
        rows = []
        for attempt in group:
            row = []
            for step in attempt.steps:
                k = step.recorded_before
                every = [to_go(other, k, discount) if of is None else of(other, 0) for other in group]
                own = to_go(attempt, k, discount) if of is None else of(attempt, 0)
                baseline = sum(every, Fraction(0)) / len(every)
                if leave_one_out:
                    baseline = (sum(every, Fraction(0)) - own) / (len(every) - 1)
                row.append(own - baseline)
            rows.append(row)
        return rows

    return advantages


def _reward_to_go(attempt: Attempt, k: int, discount: Fraction) -> Fraction:
    """D(k) with depths computed by recursion, independently of the command."""

    def depth(place: int) -> int:
        return depth_after(attempt.steps[place].recorded_before)

    def depth_after(recorded: int) -> int:
        return 1 + max((depth(place) for place in range(min(recorded, len(attempt.steps)))), default=0)

    total = Fraction(0)
    for reward in attempt.rewards:
        if reward.step is None:
            total += reward.value
        elif reward.step >= k:
            total += reward.value * discount ** max(0, depth(reward.step) - depth_after(k))
    return total


def averaged_over_children(attempt: Attempt, place: int) -> Fraction:
    """The old return: a turn's reward plus the mean of its children's returns, plus the episode reward."""

    def below(step: int) -> Fraction:
        own = sum((Fraction(r.value) for r in attempt.rewards if r.step == step), Fraction(0))
        children = [below(n) for n, other in enumerate(attempt.steps) if other.parent == step]
        return own + (sum(children, Fraction(0)) / len(children) if children else 0)

    return below(place) + sum(r.value for r in attempt.rewards if r.step is None)


def averaging(*, leave_one_out: bool) -> Advantages:
    """The old rule: the return of `averaged_over_children` less the group's mean score."""

    def advantages(group: Sequence[Attempt]) -> list[list[Fraction]]:
        scores = [score_return(attempt, 0) for attempt in group]
        rows = []
        for attempt, score in zip(group, scores, strict=True):
            baseline = sum(scores, Fraction(0)) / len(scores)
            if leave_one_out:
                baseline = (sum(scores, Fraction(0)) - score) / (len(scores) - 1)
            places = range(len(attempt.steps))
            rows.append([averaged_over_children(attempt, place) - baseline for place in places])
        return rows

    return advantages


@pytest.mark.parametrize("leave_one_out", [False, True], ids=["mean", "loo"])
@pytest.mark.parametrize("task", [new_root(), early_end(), compaction()], ids=lambda task: task.name)
def test_advantages_by_the_definition_have_the_right_expectation(
    task: ForestTask, leave_one_out: bool
) -> None:
    outcomes = task.outcomes()
    right = Fraction(1) if leave_one_out else 1 - Fraction(1, GROUP_SIZE)
    for posting in POSTINGS:
        made = attempts(outcomes, posting)
        for discount in (Fraction(1), Fraction(1, 2)):
            for of in (score_return, None):
                rule = by_definition(of, discount, leave_one_out=leave_one_out)
                found = expected_gradients(task, outcomes, made, rule)
                reference = return_gradients(task, outcomes, made, of or reward_to_go(discount))
                assert found == {decision: right * value for decision, value in reference.items()}
                if discount == 1:
                    assert reference == score_gradients(task, outcomes)


@pytest.mark.parametrize(
    ("task", "mean", "loo"),
    [
        (branches(2, overlapping=False), Fraction(1, 2), 1),
        (branches(4, overlapping=True), 0, 1),
        (branches(8, overlapping=True), -1, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_oracle_finds_the_fault_of_averaging_over_branches(
    task: ForestTask, mean: Fraction | int, loo: int
) -> None:
    """The result is 1 − k/G times the gradient of the averaged reward, itself 1/k of the true gradient."""
    outcomes = task.outcomes()
    made = attempts(outcomes, "branch")
    count = len(outcomes[0].steps) - 1
    averaged = return_gradients(task, outcomes, made, averaged_over_children)
    true = score_gradients(task, outcomes)
    for leave_one_out, expected in ((False, mean), (True, loo)):
        found = expected_gradients(task, outcomes, made, averaging(leave_one_out=leave_one_out))
        assert found["root"] / averaged["root"] == expected
        assert found["root"] / true["root"] == Fraction(expected) / count
        right = Fraction(1) if leave_one_out else Fraction(3, 4)
        assert abs(worst_ratio(found, true, right) - right) >= abs(Fraction(expected) / count - right)


@pytest.mark.parametrize("posting", ["turn", "branch"])
def test_the_oracle_finds_the_fault_of_ignoring_later_roots(posting: Posting) -> None:
    task = new_root()
    outcomes = task.outcomes()
    made = attempts(outcomes, posting)
    true = score_gradients(task, outcomes)
    found = expected_gradients(task, outcomes, made, averaging(leave_one_out=False))
    assert worst_ratio(found, true, Fraction(3, 4)) == Fraction(-1, 4)
    found = expected_gradients(task, outcomes, made, averaging(leave_one_out=True))
    assert worst_ratio(found, true, Fraction(1)) == 0


def test_the_old_rule_is_right_on_linear_episodes_with_one_reward() -> None:
    task = linear()
    outcomes = task.outcomes()
    found = expected_gradients(task, outcomes, linear_attempts(outcomes), averaging(leave_one_out=False))
    assert worst_ratio(found, score_gradients(task, outcomes), Fraction(3, 4)) == Fraction(3, 4)


def test_a_nonzero_gradient_where_zero_is_expected_is_an_error() -> None:
    task = compaction()
    outcomes = task.outcomes()
    true = score_gradients(task, outcomes)
    assert true["last"] == 0
    made = attempts(outcomes, "turn")
    found = expected_gradients(
        task, outcomes, made, lambda group: [[step.action for step in a.steps] for a in group]
    )
    with pytest.raises(ValueError, match=r"decision 'last' is 1\.470e-01, expected 0"):
        worst_ratio(found, true, Fraction(3, 4))


def test_reward_to_go_does_not_cover_a_reward_given_in_hindsight() -> None:
    """The first turn's reward depends on a call that began after that turn was recorded."""

    def play(episode: Play) -> None:
        first = episode.turn("first")
        second = episode.turn("second", first)
        episode.pay(first, 3 * second.action)

    task = ForestTask("hindsight", play, {"first": Fraction(1, 2), "second": Fraction(1, 5)})
    outcomes = task.outcomes()
    made = attempts(outcomes, "turn")
    true = score_gradients(task, outcomes)
    assert true["second"] == 3 * Fraction(1, 5) * Fraction(4, 5)
    assert return_gradients(task, outcomes, made, score_return) == true
    assert return_gradients(task, outcomes, made, reward_to_go(Fraction(1)))["second"] == 0
    found = expected_gradients(task, outcomes, made, BuiltAdvantages(algorithm("episode", "mean")))
    assert worst_ratio(found, true, Fraction(3, 4)) == Fraction(3, 4)
    with pytest.raises(RuntimeError, match="hindsight_turn_reward_to_go_mean: the return's gradient"):
        measure([task])


def test_the_subagents_overlap_as_their_actions_decide() -> None:
    """The enumeration of sub-agents contains episodes with exactly these recording orders and values of k."""
    seen = {
        tuple((step.recorded_before, step.parent) for step in outcome.steps)
        for outcome in parallel_subagents().outcomes()
    }
    assert seen == {
        ((0, None), (1, None), (2, None), (3, 0)),  # one agent after the other
        ((0, None), (1, None), (2, 1), (1, None), (4, 0)),  # both turns of the first agent come first
        ((0, None), (1, None), (1, None), (3, 2), (4, 0)),  # the turn of the second agent comes first
    }


def test_each_outcome_is_enumerated_once() -> None:
    for task in forests():
        outcomes = task.outcomes()
        histories = {tuple((s.decision, s.action) for s in o.steps) for o in outcomes}
        assert len(histories) == len(outcomes) == {
            "linear": 6, "new_root": 4, "branches_2": 5, "branches_8": 5, "parallel_subagents": 7,
            "compaction": 6, "early_end": 4,
        }[task.name]  # fmt: skip
        assert sum((task.probability(o) for o in outcomes), Fraction(0)) == 1
        for posting in POSTINGS:
            assert all(sum(r.value for r in o.posted(posting)) == o.score for o in outcomes)
    two_leaves = Outcome(branches(2, overlapping=False).outcomes()[0].steps, ((0, 3), (2, 6)))
    assert [(r.scope, r.step) for r in two_leaves.posted("branch")] == [("branch", 1), ("branch", 2)]


# --- Every advantage is compared with its definition, on random forests.


@dataclass(frozen=True)
class Settings:
    """The settings of an algorithm that are generated at random."""

    credit: Literal["episode", "reward_to_go"]
    discount: float
    leave_one_out: bool
    std: Literal["none", "group"]

    def config(self) -> AlgorithmConfig:
        chosen: dict[str, object] = {"credit": self.credit, "leave_one_out": self.leave_one_out}
        if self.credit == "reward_to_go":
            chosen["turn_discount"] = self.discount
        return AlgorithmConfig(preset="dr_grpo", advantage_std=self.std, **chosen)  # type: ignore[arg-type]


@st.composite
def random_turns(draw: st.DrawFn, name: str) -> tuple[Turn, ...]:
    """Turns with a causal history: a call begins when k turns are recorded, including its parent."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 7))):
        k = draw(st.integers(0, number))
        parent = draw(st.one_of(st.none(), st.integers(0, k - 1))) if k else None
        turns.append(
            turn(
                f"{name}-{number}",
                None if parent is None else f"{name}-{parent}",
                sampled=range(draw(st.integers(1, 3))),
                constrained=(kind := draw(st.integers(0, 7))) == 0,
                discarded="disconnected" if kind == 1 else "",
                recorded_before=k,
            )
        )
    return tuple(turns)


@st.composite
def random_group(draw: st.DrawFn, name: str) -> RolloutGroup:
    """Two to four episodes with rewards of every scope, which are multiples of 1/4."""
    values = st.integers(-12, 12).map(lambda quarters: quarters / 4)
    episodes = []
    for number in range(draw(st.integers(2, 4))):
        turns = draw(random_turns(f"{name}-{number}"))
        leaves = sorted({t.id for t in turns} - {t.parent for t in turns if t.parent})
        by_turn = draw(st.dictionaries(st.sampled_from([t.id for t in turns]), values))
        by_branch = draw(st.dictionaries(st.sampled_from(leaves), values))
        whole = draw(st.one_of(st.none(), values))
        episodes.append(episode(turns, whole, id=f"{name}-{number}", by_turn=by_turn, by_branch=by_branch))
    return group(episodes, id=name)


def definition(known: RolloutGroup, chosen: Settings) -> dict[str, float]:
    """The advantage of every turn of a group by its id, in float64, from the definition of credit.

    A = (return − mean)/(std + 1e-5) with the std over the scores of the group, and 0 if they are all equal;
    without a std, A = return − mean.
    """
    scores = [sum(reward.value for reward in r.episode.rewards) for r in known.rollouts]
    scale = 1.0
    if chosen.std == "group":
        mean = sum(scores) / len(scores)
        variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
        scale = 0.0 if max(scores) == min(scores) else 1 / (variance**0.5 + 1e-5)
    out = {}
    for index, rollout in enumerate(known.rollouts):
        for own in rollout.episode.turns:
            returns = scores
            if chosen.credit == "reward_to_go":
                assert own.recorded_before is not None
                returns = [
                    _remaining(r.episode.turns, r.episode.rewards, own.recorded_before, chosen.discount)
                    for r in known.rollouts
                ]
            others = [value for place, value in enumerate(returns) if place != index]
            among = others if chosen.leave_one_out else returns
            out[own.id] = (returns[index] - sum(among) / len(among)) * scale
    return out


def _remaining(turns: Sequence[Turn], rewards: Sequence[Reward], k: int, discount: float) -> float:
    """D(k) of one episode."""

    def depth_at(recorded: int) -> int:
        before = [depth_at(t.recorded_before or 0) for t in turns[:recorded]]
        return 1 + max(before, default=0)

    total = 0.0
    for reward in rewards:
        if reward.scope == "episode":
            total += reward.value
            continue
        place = next(n for n, t in enumerate(turns) if t.id == reward.target)
        if place >= k:
            levels = depth_at(turns[place].recorded_before or 0) - depth_at(k)
            total += discount ** max(0, levels) * reward.value
    return total


every_setting = st.builds(
    Settings,
    credit=st.sampled_from(["episode", "reward_to_go"]),
    discount=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)),
    leave_one_out=st.booleans(),
    std=st.sampled_from(["none", "group"]),
)


@settings(max_examples=300, deadline=None)
@given(groups=st.tuples(random_group("a"), random_group("b")), chosen=every_setting)
def test_every_advantage_equals_its_definition(
    groups: tuple[RolloutGroup, RolloutGroup], chosen: Settings
) -> None:
    data = build_training_data(groups, chosen.config())
    expected = {key: value for known in groups for key, value in definition(known, chosen).items()}
    turns = {t.id: t for known in groups for r in known.rollouts for t in r.episode.turns}
    order = {r.episode.id: r.episode.turns for known in groups for r in known.rollouts}
    trained: dict[str, list[float]] = {}
    for sample in data.samples:
        for place in np.flatnonzero(sample.loss_mask).tolist():
            own = order[sample.episode_id][sample.turn_index[place]]
            trained.setdefault(own.id, []).append(float(sample.advantages[place]))
    assert trained.keys() == {key for key, own in turns.items() if not (own.constrained or own.discarded)}
    for key, values in trained.items():
        assert len(values) == len(turns[key].completion)
        np.testing.assert_allclose(values, expected[key], rtol=1e-5, atol=1e-5)
