"""`python -m benchmarks async` in miniature, and its parts: the workload, the steady window, the table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from areal_agents.config import Config
from areal_agents.errors import ConfigError, TrainingError
from benchmarks.asynchrony import table
from benchmarks.asynchrony.agent import Workload, agent, read_workload, workload_file
from benchmarks.asynchrony.loop import Measured, run_config, steady
from benchmarks.asynchrony.pause import PauseFigures, copy_bandwidth, measure_pause
from benchmarks.asynchrony.run import Bench, Counts, Layout
from benchmarks.store import StoreFigures

LAYOUT = Layout(engine=1, trainer=1, concurrency=8)
# Two short turns, so that a run takes little longer than the start of its processes.
TINY_AGENT = """
from benchmarks.asynchrony.agent import SyntheticAgent, Workload

agent = SyntheticAgent(Workload.model_validate(
    {"seed": 0, "turns": 2, "tokens": {"mean": 4, "sigma": 1, "cap": 8}, "tool_s": {"mean": 0.01}}
))
"""


def test_the_workload_has_its_fixed_distribution() -> None:
    workload = read_workload(workload_file(), "workload")
    episodes = [workload.episode(task, index) for task in range(400) for index in range(4)]
    tokens = np.array([tokens for tokens, _, _ in episodes])
    tools = np.array([tools for _, tools, _ in episodes])
    assert tokens.shape == (1600, 4) and tools.shape == (1600, 3)
    assert tokens.min() >= 1 and tokens.max() == 256
    # A log-normal with mean 48 and σ 1 has the median 48 e^(−1/2) = 29.1; the cap lowers the mean.
    assert np.median(tokens) == pytest.approx(29.1, rel=0.05)
    assert tokens.mean() == pytest.approx(45.7, rel=0.05)
    assert tools.mean() == pytest.approx(0.5, rel=0.05)
    assert workload.episode(7, 3) == workload.episode(7, 3) != workload.episode(7, 2)
    config = run_config(Path("examples/search_agent/model"), Path("runs/x"), {"rollout.max_staleness": 0})
    assert (config.rollout.groups, config.rollout.group_size, config.rollout.max_staleness) == (8, 4, 0)


def test_a_missing_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the workload 'other'"):
        read_workload(workload_file(), "other")
    assert isinstance(agent._workload, Workload)


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "time": 2.0 * step, "step_s": 2.0, "wait_s": 0.5, "tokens": 10, "sampled_tokens": 12,
        "pause_s": 0.1, "rollout_idle": 0.25, "staleness_mean": 1.0, "staleness_max": 2, **changes,
    }  # fmt: skip


def test_warm_up_steps_are_not_counted() -> None:
    rows = [row(1, wait_s=2.0, rollout_idle=None), row(2), row(3), row(4, tokens=30, staleness_mean=3.0)]
    found = steady(rows, warm_up=1, failed=3)
    assert found == Measured(
        step_s=2.0, work_s=1.5, trainer_idle=0.25, rollout_idle=0.25, tokens=12.0, pause_s=pytest.approx(0.1),
        staleness=pytest.approx((10 + 10 + 90) / 50), staleness_max=2, failed=3,
    )  # fmt: skip
    with pytest.raises(TrainingError, match="4 steps were trained, but 3 \\+ 2 are needed"):
        steady(rows, warm_up=3, failed=0)


def test_a_pause_is_compared_with_the_time_to_copy_the_weights() -> None:
    figures = PauseFigures(
        megabytes=500, bandwidth_gb_s=10, floor_s=0.05, pause_s=0.07, pause_max_s=0.1, recompute_s=0.3,
        recomputed_tokens=100, lost=0, swaps=8, requests=9,
    )  # fmt: skip
    assert figures.over_floor == pytest.approx(1.0)
    assert copy_bandwidth(4 * 10**6) > 0


def test_a_paused_engine_loses_no_requests(tmp_path: Path) -> None:
    figures = measure_pause([small_model(tmp_path / name, seed) for seed, name in enumerate("ab")], swaps=2)
    assert figures.lost == 0 and figures.swaps == 2 and figures.requests >= 4
    assert 0 < figures.pause_s <= figures.pause_max_s
    assert figures.recomputed_tokens > 32  # the prompt and the tokens so far of each running stream


def small_model(folder: Path, seed: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "tiny_agent.py").write_text(TINY_AGENT)
    agent = f"{tmp_path / 'tiny_agent.py'}:agent"
    changes = {"rollout.groups": 2, "rollout.group_size": 2, "engine.slots": 16, "engine.max_context": 768}
    counts = Counts(
        tried=(2, 2), sync=2, asynchronous=3, batches=2, filling=1, sync_layouts=(LAYOUT,),
        async_layouts=(LAYOUT,), changes=changes, agent=agent, long_agent=agent,
    )  # fmt: skip
    return Bench(tmp_path / "scratch", counts)


def test_a_run_is_measured(bench: Bench) -> None:
    found = bench._loop(1, LAYOUT, 2)
    assert found.failed == 0 and found.step_s > 0 and found.staleness_max <= 1
    assert 4 * 2 <= found.tokens <= 4 * 2 * 8
    assert 0 <= found.trainer_idle <= 1 and 0 <= found.rollout_idle <= 1


@pytest.mark.slow
def test_the_rollout_side_is_measured_alone(bench: Bench) -> None:
    assert bench._rollout_s("in_place", LAYOUT, 2) > 0


def test_the_report_is_computed_from_the_measurements(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 6 s if synchronous and 2.5 s if not; the trainer alone and the rollouts alone take 2 s."""

    def loop(staleness: int, layout: Layout, steps: int) -> Measured:
        step_s = 2.5 if staleness else 6.0
        return Measured(step_s, 2.0, 0.1, 0.2, 100.0, 0.01, 3.5, 4, 0)

    def rollouts(config: Config, **_: Any) -> tuple[float, int]:
        in_place = 1.5 if config.agent == "long" else 1.0
        return {"retract": 2.0, "in_place": in_place, "drain": 3.0}[config.trainer.publish.pause], 1

    bench._counts = replace(bench._counts, long_agent="long")
    monkeypatch.setattr(bench, "_loop", loop)
    monkeypatch.setattr("benchmarks.asynchrony.run.measure_rollout", rollouts)
    monkeypatch.setattr(bench, "_pause", lambda: {"pause_over_floor": 0.5})
    figures = StoreFigures(2500.0, 1.0, 2.0, 1, 64, 500, "power")
    monkeypatch.setattr("benchmarks.asynchrony.run.measure_store", lambda **_: figures)
    measured = bench.measure()
    assert measured["speedup_over_sync"] == 2.4
    assert (measured["bound"], measured["bound_reached"]) == (3.0, 0.8)
    assert (measured["interrupt_gain"], measured["interrupt_gain_in_place"]) == (1.5, 2.0)
    assert (measured["interrupt_gain_workload"], measured["interrupt_gain_workload_in_place"]) == (1.5, 3.0)
    assert measured["lost"] == 9  # one per run of the rollout side: 3 with the workload, 6 with long answers
    assert (measured["trainer_idle"], measured["rollout_idle"]) == (0.1, 0.2)
    keys = {"speedup_over_sync", "interrupt_gain", "pause_over_floor", "trainer_idle", "rollout_idle"}
    assert {*keys, "store_turns_per_s", "lost"} <= measured.keys()


class TestTable:
    SETTINGS = [table.Setting(0, "naive", 0), table.Setting(16, "decoupled", 0)]

    @pytest.fixture
    def trained(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The configurations that were trained. Each run has a held-out reward of 0.5 + 0.1 × minibatches."""
        configs: list[Any] = []

        def train(config: Any, *, console: Console) -> Any:
            configs.append(config)
            rewards = [0.1, 0.2] + [0.7] * 10
            rows = [{"step": step, "time": 0.0, "reward_mean": reward} for step, reward in enumerate(rewards)]
            folder = Path(config.run_dir)
            folder.mkdir(parents=True)
            shutil.copytree(config.model, folder / "final")
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return FakeSummary(config.algorithm.minibatches)

        def evaluate(config: Any, policy: Any, *, console: Console) -> Any:
            assert config.eval.temperature == 1 and str(policy.folder) == config.model
            return SimpleNamespace(tasks=[SimpleNamespace(scores=[1.0]), SimpleNamespace(scores=[0.5])])

        monkeypatch.setattr(table, "train", train)
        monkeypatch.setattr(table, "evaluate", evaluate)
        return configs

    def test_runs_with_results_are_not_repeated(self, tmp_path: Path, trained: list[Any]) -> None:
        out = tmp_path / "deep" / "table.jsonl"
        table.run(out, json=False, settings=self.SETTINGS[:1])
        image = tmp_path / "plot.png"
        printed = table.run(out, json=True, image=image, settings=self.SETTINGS)
        assert image.read_bytes().startswith(b"\x89PNG")
        assert [(c.rollout.lag, c.rollout.max_staleness, c.algorithm.proximal) for c in trained] == [
            (0, 0, "behavior"), (16, 16, "batch"),
        ]  # fmt: skip
        assert all(c.algorithm.minibatches == 4 and c.eval.every is None for c in trained)
        assert len({c.run_dir for c in trained}) == 2
        assert "| 0 | 0.900 (0.900) | – | 0.750 (0.750) | – | 0.608 | – | 6 | – |" in printed
        assert "| 16 | – | 0.900 (0.900) | – | 0.750 (0.750) | – | 0.608 | – | 6 |" in printed
        assert len(out.read_text().splitlines()) == 2

    def test_a_file_that_holds_no_results_is_refused(self, tmp_path: Path, trained: list[Any]) -> None:
        out = tmp_path / "table.jsonl"
        out.write_text(json.dumps({"something": "else"}) + "\n")
        with pytest.raises(ConfigError, match="is not a file of results"):
            table.run(out, json=False, settings=self.SETTINGS)
        assert not trained

    def test_steps_to_half_are_counted_by_the_mean_of_five_steps(self) -> None:
        assert table.steps_to_half([1.0, 1.0, 0.5, 0.0, 0.0, 0.0]) == 5
        assert table.steps_to_half([0.0] * 4 + [1.0, 1.0, 0.4, 0.1, 0.0]) == 8
        assert table.steps_to_half([0.0] * 4 + [1.0, 1.0, 0.4]) is table.steps_to_half([1.0]) is None

    def test_the_table_has_every_combination_of_settings(self) -> None:
        settings = table.all_settings()
        assert len(settings) == len({s.name for s in settings}) == 6 * 2 * 3


class FakeSummary:
    heldout_before, steps, steps_s, staleness_mean, staleness_max = 0.4, 10, 20.0, 1.5, 3

    def __init__(self, minibatches: int) -> None:
        self.heldout_after = 0.5 + 0.1 * minibatches
