"""GDPO, compared with an oracle in plain Python that follows the paper."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from algorithms_support import TASK, group, turn
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.config import load_config
from areal_agents.core.rollout import RecordedEpisode, Reward
from areal_agents.errors import ConfigError, TrainingError

EPSILON = 1e-5
NAMES = ("correct", "format", "brief")

ByName = dict[str, float]


def config(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "gdpo", **given})


def member(id: str, rewards: ByName, *, tokens: int = 2) -> RecordedEpisode:
    """An episode with episode rewards, except for "format", which is spread over turns and a branch."""
    turns = [turn(f"{id}-a", sampled=range(3, 3 + tokens)), turn(f"{id}-b", f"{id}-a")]
    given = []
    for name, value in rewards.items():
        if name == "format":
            given.append(Reward("turn", f"{id}-a", name, value / 4))
            given.append(Reward("turn", f"{id}-b", name, value / 4))
            given.append(Reward("branch", f"{id}-b", name, value / 2))
        else:
            given.append(Reward("episode", "", name, value))
    return RecordedEpisode(id, TASK, tuple(turns), "finished", tuple(given))


def trained(batch: list[list[ByName]], **given: Any) -> TrainingData:
    groups = [
        group([member(f"{g}-{e}", rewards) for e, rewards in enumerate(members)], id=f"g{g}")
        for g, members in enumerate(batch)
    ]
    return build_training_data(groups, config(**given))


def advantages(data: TrainingData) -> list[float]:
    """For each episode, the advantage that all its trained tokens share."""
    found = []
    for sample in data.samples:
        (value,) = set(sample.advantages[sample.loss_mask].tolist())
        found.append(value)
    return found


def oracle(
    batch: list[list[ByName]], weights: ByName, *, normalize: bool, population: bool = False
) -> list[float]:
    deviation = statistics.pstdev if population else statistics.stdev
    sums = []
    for members in batch:
        totals = [0.0] * len(members)
        for name in NAMES:
            values = [rewards.get(name, 0.0) for rewards in members]
            if len(set(values)) == 1:
                continue
            mean, std = statistics.fmean(values), deviation(values)
            for place, value in enumerate(values):
                totals[place] += weights.get(name, 1.0) * (value - mean) / (std + EPSILON)
        sums += totals
    if not normalize:
        return sums
    mean, std = statistics.fmean(sums), deviation(sums)
    return [(total - mean) / (std + EPSILON) for total in sums]


def random_batch(seed: int) -> list[list[ByName]]:
    """Groups of different sizes, in which some episodes lack a reward and some rewards are equal."""
    rng = random.Random(seed)
    return [
        [
            {name: float(rng.randint(0, 2)) for name in NAMES if rng.random() < 0.8}
            for _ in range(rng.randint(2, 5))
        ]
        for _ in range(4)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_equal_those_of_the_paper(seed: int, normalize: bool) -> None:
    batch = random_batch(seed)
    weights = {"correct": 2.0, "format": 0.5, "brief": 0.0} if seed % 2 else {}
    found = trained(batch, reward_weights=weights, normalize_batch=normalize)
    assert advantages(found) == pytest.approx(oracle(batch, weights, normalize=normalize), abs=1e-6)


def test_the_population_deviation_can_be_requested() -> None:
    batch = random_batch(7)
    found = trained(batch, std_estimator="population")
    assert advantages(found) == pytest.approx(oracle(batch, {}, normalize=True, population=True), abs=1e-6)


def test_different_combinations_of_rewards_have_different_advantages() -> None:
    # The paper's example: (0, 1) and (0, 2) have equal advantages under GRPO, and different ones under GDPO.
    near, far = (
        trained(batch, normalize_batch=False)
        for batch in ([[{"correct": 0}, {"correct": 1}]], [[{}, {"correct": 1, "format": 1}]])
    )
    assert advantages(near) == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert advantages(far) == pytest.approx([-1.4142, 1.4142], abs=1e-4)


def test_a_group_is_equal_if_all_its_sums_are_zero() -> None:
    solved = [{"correct": 0.1, "format": 0.7}] * 7
    apart = [{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}]  # equal scores
    assert trained([solved, random_batch(1)[0]], drop_equal_groups=True).report.equal_groups == ("g0",)
    made = trained([apart], reward_weights={"correct": 2.0, "format": 1.0}, drop_equal_groups=True)
    assert made.report.equal_groups == () and len(made.samples) == 2
    assert trained([apart], drop_equal_groups=True).report.equal_groups == ("g0",)


def test_an_equal_group_counts_in_the_batch_and_keeps_zero_advantages() -> None:
    batch = [[{"correct": 0.1}] * 7, [{"correct": 0.0}, {"correct": 1.0}, {"correct": 1.0}]]
    found = advantages(trained(batch))
    assert found[:7] == [0.0] * 7
    assert found == pytest.approx(oracle(batch, {}, normalize=True), abs=1e-6)


def test_the_length_penalty_is_a_reward_with_its_own_name() -> None:
    members = [member("short", {"correct": 1.0}), member("long", {"correct": 1.0}, tokens=6)]
    penalty = {"length_penalty": "linear", "overlong_limit": 8, "overlong_buffer": 4}  # −0 at 4, −1 at 8
    data = build_training_data([group(members)], config(normalize_batch=False, **penalty))
    assert data.rewards["long"].by_name == {"correct": 1.0, "length_penalty": -1.0}
    std = statistics.stdev([0.0, -1.0]) + EPSILON
    assert advantages(data) == pytest.approx([0.5 / std, -0.5 / std])
    weights = {"correct": 1.0, "length_penalty": 0.5}
    data = build_training_data(
        [group(members)], config(normalize_batch=False, reward_weights=weights, **penalty)
    )
    assert advantages(data) == pytest.approx([0.25 / std, -0.25 / std])


def test_a_reward_without_a_weight_is_refused_if_others_have_one_and_the_group_named() -> None:
    weights = {"correct": 1.0, "brief": 2.0}
    with pytest.raises(TrainingError) as caught:
        trained([[{"correct": 1.0, "format": 1.0}, {"corect": 1.0}]], reward_weights=weights)
    assert "group g0 has the reward 'corect', which has no weight; did you mean 'correct'?" in str(
        caught.value
    )
    assert "group g0 has the reward 'format', which has no weight. " in str(caught.value)
    assert "algorithm.reward_weights has brief, correct" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reward_scale": 2.0}, "reward_scale: 2.0 has no meaning for estimator: gdpo"),
        ({"reward_bias": 1.0}, "reward_bias: 1.0 has no meaning for estimator: gdpo"),
        ({"reward_clip": 1.0}, "reward_clip: 1.0 has no meaning for estimator: gdpo"),
        ({"kl_in": "reward", "kl_coefficient": 0.1}, "estimator: gdpo cannot be combined with kl_in: reward"),
        ({"reward_weights": {"a": 0.0}}, "must contain a weight other than 0"),
        ({"reward_weights": {"a": float("nan")}}, "finite"),
        ({"preset": "grpo", "reward_weights": {"a": 1.0}}, "needs estimator: gdpo"),
        (
            {
                "reward_weights": {"a": 1.0}, "length_penalty": "linear",
                "overlong_limit": 9, "overlong_buffer": 5,
            },
            "reward_weights has no weight for length_penalty",
        ),
    ],
)  # fmt: skip
def test_settings_that_gdpo_cannot_use_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert reason in str(caught.value)


def test_weights_can_be_set_in_a_config_file_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "agent.py").write_text("def agent(task, ep): ...\n")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{model: model, agent: 'agent.py:agent', data: {path: tasks.jsonl},"
        " algorithm: {preset: gdpo, reward_weights: {correct: 2.0, format: 0.5}}}"
    )
    weights = load_config(file).algorithm.estimator.reward_weights  # type: ignore[union-attr]
    assert weights == {"correct": 2.0, "format": 0.5}
    changed = load_config(file, ["algorithm.reward_weights={correct: 3}"]).algorithm.estimator
    assert changed.reward_weights["correct"] == 3.0  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="algorithm.estimator: gdpo nothing is ever trained; use at least 2"
    ):
        load_config(file, ["rollout.group_size=1"])
