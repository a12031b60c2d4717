"""metrics.jsonl: whole lines, and one line per step after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from areal_agents.algorithms.losses import MAXIMA, SUMS, LossStatistics
from areal_agents.algorithms.samples import BatchReport
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.training.metrics import MetricsWriter, data_metrics, policy_metrics
from areal_agents.training.step import StepResult

REPORT = BatchReport((1.0, 0.0, 1.0, 1.0), 0, 2, 0, 0, 40, 4, 10, 5, 1, {"edited": 2}, 1.5)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_the_lines_it_will_write_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, after_step=0)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": float(step), "grad_norm": math.nan})
    assert lines(tmp_path)[2] == {"step": 3, "loss": 3.0, "grad_norm": None}  # flushed while open
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a crash
    resumed = MetricsWriter(tmp_path, after_step=2)
    resumed.write({"step": 3, "loss": 30.0})
    resumed.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_data_metrics_by_hand() -> None:
    staleness = StalenessReport(np.array([0, 0, 0, 1, 1, 3], np.int32), masked_tokens=7, dropped_samples=1)
    values = data_metrics(REPORT, staleness)
    assert values["reward_mean"] == 0.75 and values["turns_mean"] == 2.5 and values["branches_mean"] == 1.25
    assert (values["staleness_p50"], values["staleness_max"]) == (0.5, 3)
    assert values["staleness_histogram"] == {"0": 3, "1": 2, "3": 1}
    assert values["staleness_mean"] == 5 / 6 and values["stale_tokens_masked"] == 7


def test_policy_metrics_by_hand() -> None:
    sums = dict.fromkeys(SUMS, 0.0) | {
        "tokens": 4, "clipped_low": 1, "clipped_high": 2, "kl_k1": 0.4, "kl_k3": 0.2, "weight": 6.0,
        "weight_squared": 12.0, "weight_capped": 1, "abs_diff": 2.0, "on_policy_tokens": 2,
        "on_policy_abs_diff": 0.5, "entropy": 8.0, "loss": -2.0,
    }  # fmt: skip
    statistics = LossStatistics(
        torch.tensor([float(sums[name]) for name in SUMS], dtype=torch.float64),
        torch.tensor([0.9, 0.3][: len(MAXIMA)], dtype=torch.float64),
    )
    values = policy_metrics(StepResult(statistics, 0.5, 1, 3, 100, 160))
    assert values["clip_fraction"] == 0.75 and values["weight_mean"] == 1.5 and values["loss"] == -0.5
    assert values["ess"] == 36 / 12 / 4
    assert values["logprob_diff_mean"] == 0.5 and values["logprob_diff_on_policy_mean"] == 0.25
    assert (values["logprob_diff_max"], values["logprob_diff_on_policy_max"]) == (0.9, 0.3)
    assert (values["entropy"], values["shared_tokens"], values["skipped_steps"]) == (2.0, 60, 1)


def test_a_batch_without_tokens_has_the_same_keys(tmp_path: Path) -> None:
    nothing = policy_metrics(StepResult.nothing())
    writer = MetricsWriter(tmp_path, after_step=0)
    writer.write({"step": 1, **nothing})
    writer.close()
    (line,) = lines(tmp_path)
    assert line["tokens"] == line["clip_fraction"] == 0 and line["grad_norm"] is line["ess"] is None
    assert line.keys() == {"step", *nothing}
