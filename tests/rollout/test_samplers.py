"""The order in which tasks are chosen for training: shares of sources, pools by difficulty, restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from areal_agents.core.rollout import Task
from areal_agents.errors import DataError
from areal_agents.rollout.config import DataConfig, DifficultyConfig, EvalConfig
from areal_agents.rollout.data import TaskMixture, TaskSource, load_tasks
from areal_agents.rollout.samplers import DifficultySampler, Sampler, UniformSampler, sampler_of


def source(name: str, count: int, **settings: Any) -> TaskSource:
    return TaskSource(tuple(Task(f"{name}{n}", {}) for n in range(count)), seed=3, **settings)


def taken(sampler: Sampler, count: int) -> list[tuple[str, int]]:
    found = [sampler.next() for _ in range(count)]
    return [(one[0].id, one[1]) for one in found if one is not None]


def no_scores(groups: Sequence[str]) -> Mapping[str, Sequence[float]]:
    return {}


def test_the_uniform_sampler_takes_every_task_once_per_epoch_even_after_a_restart() -> None:
    tasks = source("t", 5, epochs=2)
    whole = taken(sampler_of(tasks, [], no_scores), 11)
    assert Counter(whole) == Counter((f"t{n}", epoch) for n in range(5) for epoch in range(2))
    for done in range(11):
        assert taken(sampler_of(tasks, whole[:done], no_scores), 11) == whole[done:]


def test_sources_have_their_shares_in_every_prefix_and_after_a_restart() -> None:
    mixture = TaskMixture((source("a", 90, weight=3), source("b", 4, weight=1), source("c", 50, weight=2)))
    whole = taken(sampler_of(mixture, [], no_scores), 60)
    for count in range(1, 61):
        shares = Counter(task_id[0] for task_id, _ in whole[:count])
        for name, weight in (("a", 3), ("b", 1), ("c", 2)):
            assert abs(shares[name] - count * weight / 6) < 1.5
    assert len(set(whole)) == 60  # b starts again with its next epoch
    for done in (1, 17, 40):
        assert taken(sampler_of(mixture, whole[:done], no_scores), 60 - done) == whole[done:]


def test_a_source_that_is_added_at_a_restart_gets_its_share_and_does_not_catch_up() -> None:
    begun = taken(sampler_of(TaskMixture((source("a", 900), source("b", 900))), [], no_scores), 1000)
    for changed, shares in (
        ((source("a", 900), source("c", 900)), {"a": 1, "c": 1}),
        ((source("a", 900), source("b", 900), source("c", 900)), {"a": 1, "b": 1, "c": 1}),
        ((source("a", 900), source("b", 900, weight=3)), {"a": 1, "b": 3}),
    ):
        found = taken(sampler_of(TaskMixture(changed), begun, no_scores), 200)
        counts = Counter(task_id[0] for task_id, _ in found)
        for name, weight in shares.items():
            assert counts[name] == pytest.approx(200 * weight / sum(shares.values()), abs=10)


def test_a_source_that_has_ended_leaves_its_share_to_the_others() -> None:
    mixture = TaskMixture((source("a", 3, epochs=1), source("b", 5, epochs=2)))
    sampler = sampler_of(mixture, [], no_scores)
    assert Counter(task_id[0] for task_id, _ in taken(sampler, 20)) == {"a": 3, "b": 10}
    assert sampler.next() is None


def test_an_evaluation_takes_tasks_of_every_source_by_its_weight() -> None:
    mixture = TaskMixture((source("a", 3), source("b", 30, weight=2)))
    order = [task.id[0] for task in mixture.epoch(0)]
    assert Counter(order[:9]) == {"a": 3, "b": 6} and Counter(order) == {"a": 3, "b": 30}


class Policy:
    """Solves the share `rates[task]` of each group's four episodes; the last `late` groups still run."""

    def __init__(self, rates: Mapping[str, float], late: int = 0) -> None:
        self.rates, self.late = rates, late
        self.asked: list[str] = []

    def __call__(self, groups: Sequence[str]) -> Mapping[str, Sequence[float]]:
        ended = groups[: len(groups) - self.late] if self.late else groups
        self.asked += ended
        scores = {group: self.rates[group.partition("@")[0]] for group in ended}
        return {
            group: () if rate < 0 else tuple(float(n < 4 * rate) for n in range(4))
            for group, rate in reversed(scores.items())  # a store returns them in any order
        }


NO_NEW = {"new": 0, "learnable": 1, "unsolved": 1, "solved": 1}
RATES = {f"t{n}": (0.0, 0.25, 0.5, 1.0)[n % 4] for n in range(40)}


def test_new_tasks_come_first_then_the_pools_by_their_weights() -> None:
    tasks = source("t", 40, difficulty=DifficultyConfig(new=1, learnable=0.6, unsolved=0.25, solved=0.15))
    sampler = sampler_of(tasks, [], Policy(RATES, late=3))
    assert isinstance(sampler, DifficultySampler)
    taken(sampler, 400)  # every task has a group by now
    assert sampler.counts() == {"new": 0, "learnable": 20, "unsolved": 10, "solved": 10}
    shares = Counter(RATES[task_id] for task_id, _ in taken(sampler, 2000))
    assert abs((shares[0.25] + shares[0.5]) / 2000 - 0.6) < 0.04
    assert abs(shares[0.0] / 2000 - 0.25) < 0.04 and abs(shares[1.0] / 2000 - 0.15) < 0.04
    assert shares[0.5] > 1.5 * shares[0.25]  # the target is 0.5


def test_new_tasks_are_taken_in_the_order_of_an_epoch() -> None:
    tasks = source("t", 40, difficulty=DifficultyConfig(new=1, learnable=0, unsolved=0, solved=0))
    order = [task.id for task in tasks.epoch(0)]
    assert [task_id for task_id, _ in taken(sampler_of(tasks, [], Policy(RATES)), 40)] == order


def test_groups_have_different_ids_and_a_recent_task_is_not_begun_again() -> None:
    tasks = source("t", 40, difficulty=DifficultyConfig())
    groups = taken(sampler_of(tasks, [], Policy(RATES, late=8)), 500)
    assert len(set(groups)) == 500
    for place in range(500 - 10):
        ids = [task_id for task_id, _ in groups[place : place + 10]]
        assert len(set(ids)) == 10  # a quarter of the tasks, the latest ones, wait


def test_a_single_task_is_chosen_repeatedly() -> None:
    tasks = source("t", 1, difficulty=DifficultyConfig())
    assert taken(sampler_of(tasks, [], Policy({"t0": 1.0})), 3) == [("t0", 0), ("t0", 1), ("t0", 2)]


def test_a_restarted_sampler_knows_what_was_solved_and_what_is_in_progress() -> None:
    tasks = source("t", 40, difficulty=DifficultyConfig())
    first = sampler_of(tasks, [], Policy(RATES))
    begun = taken(first, 200)
    again = sampler_of(tasks, begun, Policy(RATES))
    assert taken(again, 50) == taken(first, 50)
    assert isinstance(first, DifficultySampler) and isinstance(again, DifficultySampler)
    assert first.counts() == again.counts()


def test_a_task_moves_with_its_latest_group_and_a_dropped_group_changes_nothing() -> None:
    tasks = source("t", 2, difficulty=DifficultyConfig(new=1, learnable=1, unsolved=1, solved=1))
    policy = Policy({"t0": -1.0, "t1": 0.0})
    sampler = sampler_of(tasks, [], policy)
    assert isinstance(sampler, DifficultySampler)
    taken(sampler, 6)
    assert sampler.counts()["unsolved"] + sampler.counts()["new"] >= 1
    policy.rates = {"t0": 1.0, "t1": 1.0}
    taken(sampler, 6)
    assert sampler.counts() == {"new": 0, "learnable": 0, "unsolved": 0, "solved": 2}
    assert len(policy.asked) == len(set(policy.asked))  # the scores of a group are read once


def test_tasks_of_several_sources_have_unique_ids_and_the_names_of_their_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "question": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "1", "data_source": "b"}\n{"id": "2"}\n')
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    tasks = load_tasks(DataConfig.model_validate({"sources": sources})).tasks
    assert [(task.id, dict(task.input)) for task in tasks] == [
        ("a/1", {"id": "1", "question": "x", "data_source": "a"}),
        ("b/1", {"id": "1", "data_source": "b"}),
        ("b/2", {"id": "2", "data_source": "b"}),
    ]
    (tmp_path / "a.jsonl").write_text('{"data_source": "gsm8k"}\n')
    with pytest.raises(DataError, match="task '0' of the source 'a' has data_source: 'gsm8k'; give the"):
        load_tasks(DataConfig.model_validate({"sources": sources}))


def test_one_source_may_be_sampled_by_difficulty(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1"}\n')
    config = DataConfig(path=str(tmp_path / "a.jsonl"), sampler="difficulty")
    tasks = load_tasks(config)
    assert isinstance(tasks, TaskSource) and tasks.difficulty == DifficultyConfig()
    mixture = load_tasks(
        DataConfig.model_validate({"sources": [{"name": "a", "path": config.path, "sampler": "difficulty"}]})
    )
    sampler = sampler_of(mixture, [], no_scores)
    assert taken(sampler, 2) == [("a/1", 0), ("a/1", 1)]
    assert isinstance(sampler_of(load_tasks(DataConfig(path=config.path)), [], no_scores), UniformSampler)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"sampler": "mixture", "path": "a.jsonl"}, "sampler: mixture needs sources"),
        ({"sources": [{"name": "a", "path": "x"}], "sampler": "difficulty"}, "is a setting of each source"),
        ({"sources": [{"name": "a", "path": "x"}] * 2}, "the names of sources must differ, got a, a"),
        ({"sources": [{"name": "a"}]}, "the source a needs a path or an environment"),
        ({"sources": [{"name": "a", "path": "x", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"name": "a", "path": "x", "weight": 1e308}]}, "less than or equal to 1000000000"),
        ({"path": "x", "sampler": "difficulty", "difficulty": {"solved": 1e308}}, "equal to 1000000000"),
        ({"sources": [{"name": "a/b", "path": "x"}]}, "name"),
        ({"sources": [{"name": "..", "path": "x"}]}, "name"),
        ({"sources": [{"name": "a", "path": "x"}], "epochs": 2}, "epochs is a setting of each source"),
        ({"path": "x", "difficulty": {"target": 0.4}}, "no effect without sampler: difficulty"),
        ({"path": "x", "sampler": "difficulty", "epochs": 2}, "so it has no epochs"),
        ({"episodes": "x", "sampler": "difficulty"}, "leave sampler and sources out"),
        ({"path": "x", "sampler": "difficulty", "difficulty": NO_NEW}, "new must be above 0"),
    ],
)  # fmt: skip
def test_invalid_sampler_settings_are_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        DataConfig.model_validate(given)


def test_an_evaluation_is_not_sampled_by_difficulty() -> None:
    one = {"path": "x", "sampler": "difficulty"}
    for data in (one, {"sources": [{"name": "a", **one}]}):
        with pytest.raises(ValidationError, match="difficulty has no effect in eval.data"):
            EvalConfig.model_validate({"data": data})
