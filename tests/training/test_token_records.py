"""A step records the terms of the loss of each token, or why the token was not trained."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from presets_support import WHOLE, groups, preset, train_once
from training_support import build_model, record_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.kl import KlInLoss
from areal_agents.algorithms.presets import PRESETS
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.core.rollout import RolloutGroup
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training import run as trainer
from areal_agents.training.batches.leasing import keep_samples
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.version_folder import write_policy, write_policy_adapter
from areal_agents.training.records.files import (
    StepRows,
    read_records,
    recorded_steps,
    step_folder,
    write_rows,
)
from areal_agents.training.records.recompute import recompute
from areal_agents.training.records.rescoring import rescored
from areal_agents.training.records.writer import RecordWriter

VERSION, MAX_STALENESS = 3, 2


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from the policy, so that a KL is not 0."""
    return build_model(tmp_path_factory.mktemp("reference"), seed=1)


def aged_groups() -> list[RolloutGroup]:
    """Groups in which some tokens, and all of one turn, exceed the bound; one turn is constrained, one is
    discarded."""
    aged = []
    for group in groups():
        rollouts = []
        for rollout in group.rollouts:
            turns = [*rollout.episode.turns]
            for place, turn in enumerate(turns):
                versions = np.full(len(turn.completion), VERSION - 1, np.int32)
                if rollout.index == 0 and place == 1:
                    versions[:1] = 0
                if rollout.index == 1 and place == 2:
                    versions[:] = 0
                turns[place] = replace(turn, completion=replace(turn.completion, versions=versions))
            if rollout.index == 2:
                turns[1] = replace(turns[1], constrained=True)
                turns[2] = replace(turns[2], discarded="its client disconnected")
            rollouts.append(replace(rollout, episode=replace(rollout.episode, turns=tuple(turns))))
        aged.append(replace(group, rollouts=tuple(rollouts)))
    return aged


def batch_of(groups: list[RolloutGroup], algorithm: AlgorithmConfig) -> TrainingData:
    data = build_training_data(groups, algorithm)
    kept, _ = mask_stale(data.samples, version=VERSION, max_staleness=MAX_STALENESS)
    return keep_samples(data, kept)


@pytest.mark.parametrize("name", PRESETS)
def test_records_agree_with_the_store_and_add_up_to_the_loss(
    name: str, model_folder: Path, reference_folder: Path, group: Ranks, tmp_path: Path
) -> None:
    algorithm, recorded = preset(name), aged_groups()
    data = batch_of(recorded, algorithm)
    options = replace(WHOLE, microbatch_tokens=180, records_tokens=True)
    result, _ = train_once(
        algorithm, model_folder, reference_folder, group, data=data, options=options, version=VERSION
    )
    assert result.tokens is not None
    write_rows(
        step_folder(tmp_path, 7) / "rank-0.parquet", result.tokens.rows(step=7, version=VERSION, data=data)
    )
    records = read_records(tmp_path)
    turns = {turn.id: turn for group in recorded for r in group.rollouts for turn in r.episode.turns}
    assert {record.turn_id for record in records} == turns.keys() and len(records) == len(turns)
    assert {(record.step, record.version, record.use) for record in records} == {(7, VERSION, 0)}

    # The advantages follow from the store, and from recorded values and logprobs where they depend on them.
    credit = recompute(recorded, records, algorithm, uses={}, version=VERSION, max_staleness=MAX_STALENESS)
    trained = [record for record in records if record.untrained is None]
    assert credit.advantages.keys() == {record.turn_id for record in trained} and trained
    for record in trained:
        np.testing.assert_allclose(
            record.values["advantage"], credit.advantages[record.turn_id], rtol=1e-5, atol=1e-6
        )

    # The record of a token that was not trained says why.
    own = {record.turn_id[1:] for record in trained}
    reasons = {record.turn_id[1:]: record.untrained for record in records}
    for record in trained:
        age = VERSION - turns[record.turn_id].completion.versions
        stale = [state == "stale" for state in record.states]
        assert stale == (age > MAX_STALENESS).tolist()
    if name not in ("sft", "dpo", "self_distillation"):  # these learn from some of the episodes only
        assert own >= {"-0-1", "-1-1"} and reasons["-1-2"] == "stale"
        assert (reasons["-2-1"], reasons["-2-2"]) == ("constrained", "discarded")

    # The terms are those of the loss.
    statistics = result.statistics.as_dict()
    states = [state for record in trained for state in record.states]
    assert states.count("rejected") == statistics["rejected_tokens"]
    assert states.count("trained") + states.count("rejected") == statistics["tokens"]
    bounds = [bound for record in trained for bound in record.clipped if bound is not None]
    assert bounds.count("low") >= statistics["clipped_low"]
    values = {
        key: np.concatenate([record.values[key][np.array(record.states) == "trained"] for record in trained])
        for key in trained[0].values
    }
    if not isinstance(algorithm.kl_in, KlInLoss) and name not in ("dppo", "kl_cov"):
        unweighted = values["loss"].astype(float) / values["loss_weight"]  # these losses have no other term
        assert unweighted.sum() == pytest.approx(statistics["loss"], rel=1e-4, abs=1e-4)
    has_ratio = algorithm.policy_loss.uses_advantages
    assert np.isnan(values["ratio"]).all() == (not has_ratio)
    assert np.isnan(values["value"]).all() == (not algorithm.needs_critic)
    assert np.isnan(values["reference"]).all() == (not algorithm.needs_reference)
    if has_ratio:
        assert values["weight"].sum() == pytest.approx(statistics["weight"], rel=1e-4)
        own_ratio = np.exp(values["current"] - values["proximal"])
        assert own_ratio.sum() == pytest.approx(statistics["ratio"], rel=1e-4)
        if algorithm.policy_loss.ratio_level == "token":
            assert values["ratio"] == pytest.approx(own_ratio, rel=1e-4)


def train(store: Store, engine_url: str, model: Path, run_dir: Path, *, steps: int, **settings: Any) -> None:
    trainer.run(
        TrainerConfig(
            steps=steps, lr=1e-2, threads=1, trackers=(), publish=PublishConfig(verify="off"),
            batch_timeout_s=30, **settings,
        ),
        AlgorithmConfig(minibatches=2),
        store=store,
        engines=[SGLangEngine(engine_url, control_timeout_s=30)],
        model_path=model,
        run_dir=run_dir,
        groups=1,
        max_staleness=8,
        stop=threading.Event(),
    )  # fmt: skip


def test_decoupled_ppo_by_hand(store: Store, engine_url: str, model_folder: Path, run_dir: Path) -> None:
    """The loss follows from the logprobs of the engine by the formulas of docs/algorithms.md alone."""
    record_groups(store, engine_url, ["a", "b"])
    train(store, engine_url, model_folder, run_dir, steps=2)
    records = read_records(run_dir)
    assert [(record.step, record.version) for record in records] == [(1, 0)] * 8 + [(2, 1)] * 8
    assert {record.minibatch for record in records} == {0, 1}
    for record in records:
        turn = next(t for t in store.load_episode(record.episode_id).turns if t.id == record.turn_id)
        values, behavior = record.values, turn.completion.logprobs
        if record.step == 1:  # the trainer has the weights that sampled
            np.testing.assert_allclose(values["proximal"], behavior, atol=1e-3)
        ratio = np.exp(values["current"] - values["proximal"])
        weight = np.minimum(np.exp(values["proximal"] - behavior), 5)
        advantage = values["advantage"]
        unclipped, clipped = ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage
        loss = -values["loss_weight"] * weight * np.minimum(unclipped, clipped)
        np.testing.assert_allclose(values["ratio"], ratio, rtol=1e-4)
        np.testing.assert_allclose(values["weight"], weight, rtol=1e-4)
        np.testing.assert_allclose(values["loss"], loss, rtol=1e-3, atol=1e-8)
        bound = np.where(clipped < unclipped, np.where(advantage < 0, "low", "high"), "no")
        assert list(record.clipped) == bound.tolist() and record.states == ("trained",) * 8
    assert any((record.values["ratio"] != 1).any() for record in records)
    for step, minibatch in ((1, 0), (1, 1), (2, 0), (2, 1)):
        part = [r for r in records if (r.step, r.minibatch) == (step, minibatch)]
        assert sum(r.values["loss_weight"].sum() for r in part) == pytest.approx(1)
    (one,) = read_records(run_dir, turn_ids=["b-2-1"])
    assert one.as_dict() == next(r for r in records if r.turn_id == "b-2-1").as_dict()
    assert one.as_dict()["value"] == [None] * 8


@pytest.mark.parametrize(("keep", "kept"), [(1, [2, 3]), ("none", []), ("all", [1, 2, 3])])
def test_the_configured_number_of_steps_is_kept(
    keep: Any, kept: list[int], store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c"])
    train(store, engine_url, model_folder, run_dir, steps=3, record_tokens=keep)
    assert recorded_steps(run_dir) == kept  # the newest, and the one before it


def test_a_record_that_cannot_be_written_ends_the_run_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "trained").write_text("a file where the folder should be")
    writer = RecordWriter(tmp_path, rank=0, keep="all", prunes=True)
    nothing = StepRows([], np.empty(0, np.int64), np.empty(0, np.int8), np.empty(0, np.int8), {})
    writer.write(1, lambda: nothing)
    with pytest.raises(TrainingError, match=r"step 1 cannot be written: .*trainer.record_tokens"):
        writer.wait()
    writer.close()


def test_logprobs_under_an_adapter_are_those_of_the_merged_weights(
    model_folder: Path, group: Ranks, tmp_path: Path
) -> None:
    policy = load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(rank=4)))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # initially 0
                parameter.normal_(std=0.1)
    write_policy_adapter(policy, tmp_path / "adapter", base=model_folder, writes=True)
    write_policy(policy, tmp_path / "merged", like=model_folder, writes=True)
    episode = groups()[0].rollouts[0].episode
    turn = episode.turns[1]
    merged = rescored(tmp_path / "merged", episode, turn.id)
    assert rescored(model_folder, episode, turn.id, adapter=tmp_path / "adapter") == pytest.approx(
        merged, abs=1e-4
    )
    assert rescored(model_folder, episode, turn.id) != pytest.approx(merged, abs=1e-2)
