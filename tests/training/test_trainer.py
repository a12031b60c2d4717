"""The training loop with a real store and a real engine."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from safetensors.torch import load_file
from stored_support import break_reward, drop_reasons
from training_support import record_groups
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import EngineUnavailable, TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.telemetry.spans import Spans
from areal_agents.training.config import TrainerConfig
from areal_agents.training.run import RunResult, run


def train(
    store: Store,
    engine_url: str,
    model_folder: Path,
    run_dir: Path,
    *,
    steps: int,
    groups: int = 2,
    max_staleness: int = 8,
    stop: threading.Event | None = None,
    algorithm: AlgorithmConfig | None = None,
    spans: Spans | None = None,
    **config: object,
) -> RunResult:
    options = {"lr": 1e-2, "batch_timeout_s": 5, **config}
    return run(
        TrainerConfig(steps=steps, **options),
        algorithm or AlgorithmConfig(),
        store=store,
        engines=[SGLangEngine(engine_url, control_timeout_s=20)],
        model_path=model_folder,
        run_dir=run_dir,
        groups=groups,
        max_staleness=max_staleness,
        stop=stop or threading.Event(),
        spans=spans,
    )


def served_version(engine_url: str) -> int:
    async def ask() -> int:
        async with SGLangEngine(engine_url) as engine:
            return (await engine.model_info()).version

    return asyncio.run(ask())


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_loop_trains_publishes_and_marks_groups_as_trained(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d", "e"])
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, at_once=True)
    result = train(store, engine_url, model_folder, run_dir, steps=2, spans=spans)
    assert result == RunResult(step=2, version=2, finished=True)
    assert store.group_counts() == {"pending": 0, "complete": 1, "leased": 0, "trained": 4, "dropped": 0}
    latest = store.latest_version()
    assert latest is not None and (latest.version, latest.step) == (2, 2)
    assert served_version(engine_url) == 2
    assert sorted(p.name for p in (run_dir / "weights").iterdir()) == ["v1", "v2"]
    first, second = metrics_of(run_dir)
    assert (first["step"], first["version"], first["staleness_max"]) == (1, 1, 0)
    assert (second["step"], second["version"], second["staleness_max"]) == (2, 2, 1)
    assert first["tokens"] == first["sampled_tokens"] == 2 * 4 * 2 * 8
    assert first["logprob_diff_mean"] <= 1e-4  # engine and trainer have the same weights
    assert first["weight_mean"] == pytest.approx(1, abs=1e-4) and first["kl_behavior_k3"] < 1e-6
    assert first["clip_fraction"] == 0 and first["grad_norm"] > 0
    assert second["logprob_diff_mean"] > 1e-3  # the tokens are of version 0, the trainer is at 1
    assert (first["queue_groups"], second["queue_groups"], first["failed_episodes"]) == (3, 1, 0)
    assert 0 < first["queue_age_mean_s"] <= first["queue_age_max_s"] < 600
    published = load_file(run_dir / "weights" / "v2" / "model.safetensors")
    final = AutoModelForCausalLM.from_pretrained(run_dir / "final").state_dict()
    assert all((final[name] == tensor).all() for name, tensor in published.items())
    assert list((run_dir / "tb").iterdir())
    step, publication, *later = exporter.get_finished_spans()
    assert [span.name for span in (step, publication, *later)] == ["train_step", "publish_weights"] * 2
    assert publication.parent is not None and publication.parent.span_id == step.context.span_id
    assert step.start_time <= publication.start_time < publication.end_time <= step.end_time
    assert step.attributes["areal_agents.policy_version"] == 1
    assert step.attributes["areal_agents.loss"] == first["loss"]
    assert publication.attributes["areal_agents.pause_s"] == first["pause_s"]
    assert later[0].context.trace_id != step.context.trace_id


def test_a_finished_run_that_is_started_again_publishes_its_weights_again(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"])
    train(store, engine_url, model_folder, run_dir, steps=1)
    before = load_file(run_dir / "weights" / "v1" / "model.safetensors")
    assert train(store, engine_url, model_folder, run_dir, steps=1) == RunResult(1, 2, finished=True)
    after = load_file(run_dir / "weights" / "v2" / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)
    assert served_version(engine_url) == 2


def test_lr_zero_leaves_logprobs_unchanged_over_publishes(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    record_groups(store, engine_url, names)
    all_groups = AlgorithmConfig(drop_equal_groups=False)
    train(store, engine_url, model_folder, run_dir, steps=1, groups=6, lr=0, algorithm=all_groups)
    original = load_file(model_folder / "model.safetensors")
    published = load_file(run_dir / "weights" / "v1" / "model.safetensors")
    assert all((original[name] == published[name]).all() for name in original)
    record_groups(store, engine_url, [f"{name}2" for name in names])
    train(store, engine_url, model_folder, run_dir, steps=7, groups=1, lr=0, algorithm=all_groups)
    for line in metrics_of(run_dir):
        assert line["logprob_diff_max"] <= 1e-4
        assert line["kl_behavior_k3"] < 1e-6


def test_wholly_stale_groups_are_dropped_and_others_taken(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d", "e", "f", "g"])
    stop = threading.Event()
    with pytest.raises(TrainingError, match="did not get 2 complete groups"):
        train(
            store, engine_url, model_folder, run_dir, steps=3, max_staleness=0, stop=stop, batch_timeout_s=0.5
        )
    # step 1 trained two groups of version 0; at version 1 the other five are beyond the bound
    assert store.group_counts() == {"pending": 0, "complete": 1, "leased": 0, "trained": 2, "dropped": 4}
    assert all(line["staleness_max"] == 0 for line in metrics_of(run_dir))
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-1"]  # the trained step is kept


def test_stop_ends_with_a_checkpoint_and_a_resume_continues(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"])
    stop = threading.Event()
    results: list[RunResult] = []
    thread = threading.Thread(
        target=lambda: results.append(
            train(store, engine_url, model_folder, run_dir, steps=2, stop=stop, batch_timeout_s=60)
        )
    )
    thread.start()
    cursor = store.cursor()
    while thread.is_alive() and store.max_version() < 1:
        cursor = store.wait(cursor, 10)
    stop.set()  # the trainer waits for groups that do not exist
    thread.join(120)
    assert results == [RunResult(1, 1, finished=False)]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-1"]
    record_groups(store, engine_url, ["c", "d"])
    assert train(store, engine_url, model_folder, run_dir, steps=2) == RunResult(2, 3, finished=True)
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2]


def test_too_few_groups_in_time_is_an_error_with_the_number_of_groups(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    with pytest.raises(TrainingError, match=r"step 1 did not get 2 complete groups.*'complete': 0"):
        train(store, engine_url, model_folder, run_dir, steps=1, batch_timeout_s=0.2)


def test_an_unreachable_engine_is_an_error_and_the_run_can_be_resumed(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"])
    with pytest.raises(EngineUnavailable):
        train(store, "http://127.0.0.1:9", model_folder, run_dir, steps=1, publish={"engine_wait_s": 0})
    assert store.group_counts()["complete"] == 2
    result = train(store, engine_url, model_folder, run_dir, steps=1)
    assert result == RunResult(step=1, version=2, finished=True)


def test_logprobs_agree_with_the_engine_at_another_temperature(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"], temperature=0.6)
    train(store, engine_url, model_folder, run_dir, steps=1)
    (line,) = metrics_of(run_dir)
    assert line["tokens"] > 0 and line["logprob_diff_on_policy_mean"] <= 1e-4


def test_several_minibatches_train_every_token_once(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"])
    train(store, engine_url, model_folder, run_dir, steps=1, algorithm=AlgorithmConfig(minibatches=2))
    (line,) = metrics_of(run_dir)
    assert line["tokens"] == line["sampled_tokens"] == 128 and line["microbatches"] == 2
    assert line["logprob_diff_mean"] <= 1e-4  # proximal logprobs precede the first step


def test_ppo_trains_its_critic_and_a_resume_continues_with_it(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d"])
    ppo = AlgorithmConfig.model_validate({"preset": "ppo", "minibatches": 2})
    options = {"algorithm": ppo, "critic_lr": 1e-2, "checkpoint_every": 1}
    assert train(store, engine_url, model_folder, run_dir, steps=1, **options).step == 1
    facts = json.loads((run_dir / "checkpoints" / "step-1" / "trainer.json").read_text())
    assert set(facts["models"]) == {"policy", "critic"}
    assert train(store, engine_url, model_folder, run_dir, steps=2, **options).step == 2
    first, second = metrics_of(run_dir)
    assert first["value_loss"] > 0 and second["value_loss"] > 0
    with pytest.raises(TrainingError, match="a checkpoint of another algorithm"):
        train(store, engine_url, model_folder, run_dir, steps=3)


def test_an_adapter_is_published_merged_and_saved_beside_the_model(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d"])
    train(store, engine_url, model_folder, run_dir, steps=2, lora={"rank": 2}, publish={"transport": "disk"})
    original = load_file(model_folder / "model.safetensors")
    published = load_file(run_dir / "weights" / "v2" / "model.safetensors")
    changed = {name for name in original if (original[name] != published[name]).any()}
    assert published.keys() == original.keys()
    assert changed and all("_proj" in name for name in changed)
    assert served_version(engine_url) == 2
    assert (run_dir / "final-adapter" / "adapter_model.safetensors").is_file()


def test_a_bad_group_is_dropped_and_replaced(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c"])
    break_reward(store, "a-1")
    assert train(store, engine_url, model_folder, run_dir, steps=1) == RunResult(1, 1, finished=True)
    (line,) = metrics_of(run_dir)
    assert (line["groups_bad"], line["tokens"]) == (1, 2 * 4 * 2 * 8)
    assert store.group_counts() == {"pending": 0, "complete": 0, "leased": 0, "trained": 2, "dropped": 1}
    assert "a reward must be a finite number" in drop_reasons(store)["a"]


def test_the_best_checkpoint_is_kept_by_any_metric(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d", "e", "f", "g", "h"])
    options = {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": 1, "best_metric": "reward_mean"}
    train(store, engine_url, model_folder, run_dir, steps=4, async_checkpoints=False, **options)
    rewards = {line["step"]: line["reward_mean"] for line in metrics_of(run_dir)}
    kept = {int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir()}
    best = {step for step, reward in rewards.items() if reward == max(rewards.values())}
    assert 4 in kept and len(kept) == (1 if kept <= best else 2)  # steps can share the best reward
    assert kept - {4} <= best and kept & best


def test_a_metric_that_does_not_exist_is_refused_after_the_first_step(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b"])
    with pytest.raises(TrainingError, match=r"no metric 'reward'; choose heldout or one of .*reward_mean"):
        train(store, engine_url, model_folder, run_dir, steps=1, keep_best=1, best_metric="reward")
