"""One line of metrics per batch, to metrics.jsonl and TensorBoard.

A line is written whole and flushed; a resumed run first removes the lines of steps that it will
take again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from areal_agents.algorithms.samples import BatchReport
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.training.batches import Batch
from areal_agents.training.step import StepResult


class MetricsWriter:
    """Appends to `<run>/metrics.jsonl` and `<run>/tb`."""

    def __init__(self, run_dir: Path, *, after_step: int) -> None:
        path = run_dir / "metrics.jsonl"
        _keep_until(path, after_step)
        self._file = path.open("a")
        self._board = SummaryWriter(str(run_dir / "tb"), purge_step=after_step + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one step. `values["step"]` is its number; a value that is not finite becomes null."""
        clean = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        for name, value in clean.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, values["step"])
        self._board.flush()

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()


def data_metrics(report: BatchReport, staleness: StalenessReport) -> dict[str, Any]:
    """The data part: rewards, groups, staleness of trained tokens, shapes of episodes."""
    ages = staleness.staleness if staleness.staleness.size else np.zeros(1, np.int32)
    episodes = len(report.rewards)
    counts = np.bincount(np.maximum(ages, 0))
    return {
        "reward_mean": float(np.mean(report.rewards)),
        "reward_std": float(np.std(report.rewards)),
        "episodes": episodes,
        "groups_solved_all": report.solved_all,
        "groups_solved_some": report.solved_some,
        "groups_solved_none": report.solved_none,
        "groups_equal_dropped": report.dropped_groups,
        "sampled_tokens": report.sampled_tokens,
        "untrained_tokens": report.untrained_tokens,
        "turns_mean": report.turns / episodes,
        "branches_mean": report.branches / episodes,
        "truncated": report.truncated,
        "forks": report.forks,
        "versions_per_rollout": report.versions_per_rollout,
        "staleness_mean": float(ages.mean()),
        "staleness_p50": float(np.percentile(ages, 50)),
        "staleness_p90": float(np.percentile(ages, 90)),
        "staleness_max": int(ages.max()),
        "staleness_histogram": {str(age): int(n) for age, n in enumerate(counts) if n},
        "stale_tokens_masked": staleness.masked_tokens,
        "stale_samples_dropped": staleness.dropped_samples,
    }


def queue_metrics(batch: Batch) -> dict[str, Any]:
    """What stood between rollout and training, and how long the trainer waited for it."""
    return {
        "wait_s": batch.wait_s,
        "stale_groups_dropped": batch.stale_groups,
        "queue_groups": batch.queue.groups_complete,
        "queue_pending_groups": batch.queue.groups_pending,
        "queue_age_mean_s": batch.queue.age_mean_s,
        "queue_age_max_s": batch.queue.age_max_s,
        "failed_episodes": batch.queue.failed_episodes,
    }


def policy_metrics(result: StepResult) -> dict[str, Any]:
    """The policy part; a batch that trained no token has 0 for every mean, and null where 0 would lie."""
    values = result.statistics.as_dict()
    tokens = values["tokens"]
    mean = {name: value / tokens if tokens else 0.0 for name, value in values.items()}
    own = values["on_policy_tokens"]
    weight_squared = values["weight_squared"]
    return {
        "tokens": int(tokens),
        "loss": mean["loss"],
        "grad_norm": result.grad_norm,
        "skipped_steps": result.skipped_steps,
        "clip_fraction": mean["clipped_low"] + mean["clipped_high"],
        "clip_fraction_low": mean["clipped_low"],
        "clip_fraction_high": mean["clipped_high"],
        "kl_behavior": mean["kl_k3"],
        "kl_behavior_k1": mean["kl_k1"],
        "kl_behavior_k3": mean["kl_k3"],
        "logprob_diff_mean": mean["abs_diff"],
        "logprob_diff_max": values["abs_diff_max"],
        "on_policy_tokens": int(own),
        "logprob_diff_on_policy_mean": values["on_policy_abs_diff"] / own if own else None,
        "logprob_diff_on_policy_max": values["on_policy_abs_diff_max"] if own else None,
        "weight_mean": mean["weight"],
        "weight_capped": mean["weight_capped"],
        "ess": values["weight"] ** 2 / weight_squared / tokens if weight_squared else None,
        "entropy": mean["entropy"],
        "microbatches": result.microbatches,
        "model_tokens": result.model_tokens,
        "shared_tokens": result.sample_tokens - result.model_tokens,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)
