"""The trainer's benchmark in miniature: every figure is measured and plausible."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trainer.data import Recorder, training_data
from benchmarks.trainer.memory import peak_bytes
from benchmarks.trainer.run import Counts, merged_tokens, run

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
TINY = Counts(
    packed_groups=8,
    groups=1,
    median=16,
    longest=48,
    prefix_groups=1,
    prompt=64,
    memory_tokens=256,
    rounds=1,
)
KEYS = {
    "packing_fill",
    "rank_imbalance",
    "vs_padded",
    "vs_trl",
    "prefix_share_of_bound",
    "logprob_peak_ratio",
    "tokens_per_s",
    "mfu",
    "cores",
    "versions",
}


@pytest.mark.slow
def test_every_figure_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    figures = run(json=True, threads=1, counts=TINY)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert set(figures) >= KEYS
    measured = {name: figures[name] for name in KEYS - {"mfu", "versions", "rank_imbalance"}}
    assert all(value > 0 and math.isfinite(value) for value in measured.values()), measured
    assert figures["packing_fill"] <= 1 and figures["logprob_peak_ratio"] < 1
    assert set(figures["versions"]) == {"torch", "transformers", "trl"}


def test_the_memory_of_a_step_with_whole_logits_is_measured() -> None:
    assert peak_bytes(MODEL, way="whole", tokens=256, device="cpu") > 2**20


def test_the_bound_counts_every_common_prefix_once() -> None:
    recorder = Recorder(1000, seed=0)
    data = training_data([recorder.answers(g, prompt=20, lengths=[5, 7]) for g in range(2)])
    assert merged_tokens(data.samples) == 2 * (20 + 5 + 7)


def test_each_turn_of_a_branching_episode_is_trained_once() -> None:
    recorder = Recorder(1000, seed=0)
    data = training_data([recorder.branching(0, episodes=2, turns=20, system=30, added=4, sampled=6)])
    assert sum(int(sample.loss_mask.sum()) for sample in data.samples) == 2 * 20 * 6
    assert merged_tokens(data.samples) == 30 + 2 * (20 * 6 + 19 * 4)
    assert len(data.samples) > 2


def test_lengths_are_log_normal_with_a_deviation_of_one() -> None:
    lengths = Recorder(1000, seed=0).log_normal(20_000, median=10_000, longest=10**9)
    logs = np.log(lengths / 10_000)
    assert logs.mean() == pytest.approx(0, abs=0.03) and logs.std() == pytest.approx(1, abs=0.03)
