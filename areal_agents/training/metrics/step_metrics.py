"""Writes one line of metrics per batch to metrics.jsonl and to the trackers; docs/metrics.md names them.

A line is written completely and flushed; a resumed run first removes the lines of steps that it will repeat.
A metric without a value is null, never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.algorithms.losses.statistics import POSITIONS
from areal_agents.algorithms.samples import BatchReport
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.errors import TrainingError
from areal_agents.training.batches.leasing import Batch
from areal_agents.training.metrics.mfu import mfu
from areal_agents.training.metrics.trackers import Trackers
from areal_agents.training.publish.publisher import Published
from areal_agents.training.step.results import CriticResult, DpoResult, ObservationResult, StepResult
from areal_agents.whole_files import write_whole

# The metrics of docs/metrics.md, in its order, by the section under which trackers show them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "policy": (
        "loss", "grad_norm", "lr", "skipped_steps", "tokens", "sequences", "entropy",
        "clip_fraction", "clip_fraction_low", "clip_fraction_high", "dual_clip_fraction",
        "ratio_mean", "log_ratio_max", "dropped_tokens",
        "kl_behavior_k1", "kl_behavior_k3", "kl_reference",
        "logprob_diff_mean", "logprob_diff_max",
        "on_policy_tokens", "logprob_diff_on_policy_mean", "logprob_diff_on_policy_max",
        "logprob_diff_on_policy_by_position", "logprob_diff_on_policy_by_routing",
        "routing_diff_on_policy",
        "weight_mean", "weight_raw_mean", "weight_raw_max", "weight_capped", "ess",
        "rejected_tokens", "rejected_sequences", "vetoed_sequences",
        "value_loss", "value_clipped", "explained_variance", "critic_grad_norm", "critic_skipped_steps",
        "dpo_loss", "dpo_accuracy", "dpo_margin", "observation_loss", "observation_tokens",
    ),
    "data": (
        "reward_mean", "reward_std", "rewards_by_name", "rewards_by_source",
        "groups_solved_all", "groups_solved_some", "groups_solved_none", "groups_equal_dropped",
        "groups_refilled", "groups_replayed", "groups_bad", "stale_groups_dropped",
        "staleness_mean", "staleness_p50", "staleness_p90", "staleness_max", "staleness_histogram",
        "stale_tokens_masked", "stale_samples_dropped", "stale_share_by_length", "versions_per_rollout",
        "episodes", "failed_episodes", "truncated", "truncated_share", "overlong",
        "sampled_tokens", "untrained_tokens", "routed_tokens", "tokens_per_episode", "tokens_per_episode_max",
        "turns_mean", "branches_mean", "forks",
        "tool_calls_mean", "tool_calls_by_name", "rewarded_without_tools",
        "queue_groups", "queue_pending_groups", "queue_age_mean_s", "queue_age_max_s",
    ),
    "system": (
        "step_s", "wait_s", "train_s", "train_cpu_s", "train_parts_s", "publish_s", "assemble_s", "pause_s",
        "pause_total_s", "publish_bytes", "publish_sent_bytes", "density", "checksum_agreement",
        "engines_left_out", "engines_repaired", "trainer_idle", "rollout_idle", "engine_busy_s",
        "tokens_per_s", "sampled_tokens_per_s", "flops", "mfu",
        "microbatches", "model_tokens", "shared_tokens", "packing_fill", "rank_imbalance",
        "device_memory_peak",
    ),
}  # fmt: skip
_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names}


class MetricsWriter:
    """Appends to `<run>/metrics.jsonl`, and sends every number to the trackers.

    Args:
        after_step: the step after which the run resumes, 0 for a new one.
        trackers: names of trackers, see `trackers.py`.
        config: settings of the run, for trackers that show them. No keys or addresses.

    Raises:
        ConfigError: a tracker is not installed or does not start.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int,
        trackers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        last = _keep_until(self._path, after_step)
        self._last: dict[str, Any] = {"pause_total_s": last.get("pause_total_s", 0.0)}
        self._trackers = Trackers(trackers, run_dir, after_step=after_step, config=config)

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one step, including the metrics that depend on the previous step.

        Args:
            values: every metric except `pause_total_s` and `rollout_idle`, and `step`, `version` and `time`.
                Values that are not finite become null.

        Raises:
            TrainingError: the file cannot be written.
        """
        clean = {name: _finite(value) for name, value in values.items()}
        clean["pause_total_s"] = self._last["pause_total_s"] + clean["pause_s"]
        clean["rollout_idle"] = _idle(self._last, clean)
        self._last = clean
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise TrainingError(f"cannot write {self._path}: {error}") from error
        self._trackers.log(_numbers(clean), step=clean["step"])

    def close(self) -> None:
        """Wait until the trackers have received everything."""
        self._trackers.close()


def data_metrics(report: BatchReport, staleness: StalenessReport) -> dict[str, Any]:
    """Return the data metrics: rewards, groups, staleness of trained tokens, shapes of episodes."""
    ages = staleness.staleness if staleness.staleness.size else np.zeros(1, np.int32)
    episodes = len(report.rewards)
    counts = np.bincount(np.maximum(ages, 0))
    return {
        "reward_mean": float(np.mean(report.rewards)),
        "reward_std": float(np.std(report.rewards)),
        "rewards_by_name": report.rewards_by_name,
        "rewards_by_source": report.rewards_by_source,
        "episodes": episodes,
        "groups_solved_all": report.solved_all,
        "groups_solved_some": report.solved_some,
        "groups_solved_none": report.solved_none,
        "groups_equal_dropped": report.dropped_groups,
        "sampled_tokens": report.sampled_tokens,
        "untrained_tokens": report.untrained_tokens,
        "routed_tokens": report.routed_tokens,
        "tokens_per_episode": report.sampled_tokens / episodes,
        "tokens_per_episode_max": max(report.episode_tokens),
        "overlong": report.overlong,
        "turns_mean": report.turns / episodes,
        "branches_mean": report.branches / episodes,
        "truncated": report.truncated,
        "truncated_share": report.truncated / episodes,
        "forks": report.forks,
        "tool_calls_mean": None if report.tool_calls is None else report.tool_calls / report.with_tools,
        "tool_calls_by_name": dict(report.tool_calls_by_name),
        "rewarded_without_tools": report.rewarded_without_tools,
        "versions_per_rollout": report.versions_per_rollout,
        "staleness_mean": float(ages.mean()),
        "staleness_p50": float(np.percentile(ages, 50)),
        "staleness_p90": float(np.percentile(ages, 90)),
        "staleness_max": int(ages.max()),
        "staleness_histogram": {str(age): int(n) for age, n in enumerate(counts) if n},
        "stale_tokens_masked": staleness.masked_tokens,
        "stale_samples_dropped": staleness.dropped_samples,
        "stale_share_by_length": dict(staleness.share_by_length),
    }


def queue_metrics(batch: Batch) -> dict[str, Any]:
    """Return the metrics of the queue between rollout and training."""
    return {
        "wait_s": batch.wait_s,
        "stale_groups_dropped": batch.stale_groups,
        "groups_refilled": batch.equal_groups,
        "groups_replayed": len(batch.replayed),
        "groups_bad": len(batch.bad_groups),
        "queue_groups": batch.queue.groups_complete,
        "queue_pending_groups": batch.queue.groups_pending,
        "queue_age_mean_s": batch.queue.age_mean_s,
        "queue_age_max_s": batch.queue.age_max_s,
        "failed_episodes": batch.queue.failed_episodes,
    }


def policy_metrics(result: StepResult) -> dict[str, Any]:
    """Return the policy metrics. Without trained tokens, means are 0, or null where 0 would be misleading."""
    values = result.statistics.as_dict()
    tokens, sequences, own = values["tokens"], values["sequences"], values["on_policy_tokens"]
    mean = {name: value / tokens if tokens else 0.0 for name, value in values.items()}
    squared = values["weight_squared"]
    return {
        "tokens": int(tokens),
        "sequences": int(sequences),
        "dropped_tokens": int(values["dropped_tokens"]),
        "loss": mean["loss"],
        "grad_norm": result.grad_norm,
        "skipped_steps": result.skipped_steps,
        "clip_fraction": mean["clipped_low"] + mean["clipped_high"],
        "clip_fraction_low": mean["clipped_low"],
        "clip_fraction_high": mean["clipped_high"],
        "dual_clip_fraction": mean["dual_clipped"],
        "ratio_mean": mean["ratio"] if tokens else None,
        "log_ratio_max": values["abs_log_ratio_max"],
        "kl_behavior_k1": mean["kl_k1"],
        "kl_behavior_k3": mean["kl_k3"],
        "kl_reference": mean["kl_reference"],
        "logprob_diff_mean": mean["abs_diff"],
        "logprob_diff_max": values["abs_diff_max"],
        "on_policy_tokens": int(own),
        "logprob_diff_on_policy_mean": values["on_policy_abs_diff"] / own if own else None,
        "logprob_diff_on_policy_max": values["on_policy_abs_diff_max"] if own else None,
        "logprob_diff_on_policy_by_position": {
            name: values[f"abs_diff_at_{name}"] / values[f"tokens_at_{name}"]
            for name in POSITIONS
            if values[f"tokens_at_{name}"]
        },
        "logprob_diff_on_policy_by_routing": _by_routing(values),
        "routing_diff_on_policy": {
            kind: values[f"rerouted_{kind}"] / values["replayed_tokens"]
            for kind in ("tokens", "layers")
            if values["replayed_tokens"]
        },
        "weight_mean": mean["weight"],
        "weight_raw_mean": mean["weight_raw"],
        "weight_raw_max": values["weight_raw_max"],
        "weight_capped": mean["weight_capped"],
        "ess": values["weight"] ** 2 / squared / tokens if squared else None,
        "rejected_tokens": mean["rejected_tokens"],
        "rejected_sequences": values["rejected_sequences"] / sequences if sequences else 0.0,
        "vetoed_sequences": values["vetoed_sequences"] / sequences if sequences else 0.0,
        "entropy": mean["entropy"],
        **_critic_metrics(result.critic),
        **_dpo_metrics(result.dpo),
        **_observation_metrics(result.observation),
    }


def _by_routing(values: Mapping[str, float]) -> dict[str, float]:
    """Mean difference of the tokens whose experts are those of the engine, and of those that the trainer
    routed; empty if no routing was recorded."""
    replayed = values["replayed_tokens"]
    routed = values["on_policy_tokens"] - replayed
    if not replayed:
        return {}
    means = {"replayed": values["replayed_abs_diff"] / replayed}
    if routed:
        means["routed"] = (values["on_policy_abs_diff"] - values["replayed_abs_diff"]) / routed
    return means


def _critic_metrics(critic: CriticResult | None) -> dict[str, Any]:
    """Return the critic metrics; all are null if the algorithm has no critic."""
    return {
        "value_loss": critic.loss if critic else None,
        "value_clipped": critic.clipped if critic else None,
        "explained_variance": critic.explained_variance if critic else None,
        "critic_grad_norm": critic.grad_norm if critic else None,
        "critic_skipped_steps": critic.skipped_steps if critic else None,
    }


def _dpo_metrics(dpo: DpoResult | None) -> dict[str, Any]:
    """Return the DPO metrics; all are null for other algorithms."""
    return {
        "dpo_loss": dpo.loss if dpo else None,
        "dpo_accuracy": dpo.accuracy if dpo else None,
        "dpo_margin": dpo.margin if dpo else None,
    }


def _observation_metrics(observation: ObservationResult | None) -> dict[str, Any]:
    """Return the observation metrics; all are null if observations are not trained on."""
    return {
        "observation_loss": observation.loss if observation else None,
        "observation_tokens": observation.tokens if observation else None,
    }


def system_metrics(
    result: StepResult,
    *,
    sampled_tokens: int,
    step_s: float,
    wait_s: float,
    train_s: float,
    train_cpu_s: float,
    published: Published | None,
    devices: int,
    peak: float | None,
) -> dict[str, Any]:
    """Return the system metrics: durations and the utilisation of the devices.

    Args:
        sampled_tokens: the number of sampled tokens in the batch.
        step_s: seconds from the request for the batch to its line; wait_s, train_s: parts of it.
        train_cpu_s: processor time of train_s on the first rank.
        published: the published version; None if nothing is published.
        devices: ranks of the trainer; peak: FLOP/s of one, `mfu.peak_flops`.
    """
    return {
        "step_s": step_s,
        "train_s": train_s,
        "train_cpu_s": train_cpu_s,
        "publish_s": published.publish_s if published else 0.0,
        "assemble_s": published.assemble_s if published else 0.0,
        "pause_s": published.pause_s if published else 0.0,
        "publish_bytes": published.nbytes if published else 0,
        "publish_sent_bytes": published.sent_bytes if published else 0,
        "density": published.density if published else None,
        "checksum_agreement": published.agreement if published else None,
        "engines_left_out": published.left_out if published else 0,
        "engines_repaired": published.repaired if published else 0,
        "engine_busy_s": published.busy_s if published else None,
        "trainer_idle": wait_s / step_s if step_s > 0 else None,
        "microbatches": result.microbatches,
        "model_tokens": result.model_tokens,
        "shared_tokens": result.sample_tokens - result.model_tokens,
        "packing_fill": result.packing_fill,
        "rank_imbalance": result.rank_imbalance,
        "device_memory_peak": result.device_memory_peak,
        "tokens_per_s": result.sample_tokens / train_s if train_s > 0 else None,
        "sampled_tokens_per_s": sampled_tokens / step_s if step_s > 0 else None,
        "flops": result.flops,
        "mfu": mfu(result.flops, seconds=train_s, devices=devices, peak=peak),
        "train_parts_s": dict(result.seconds),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return every number by its name in trackers: `section/name`, or `section/name/key` for a mapping."""
    out: dict[str, float] = {}
    for name, value in values.items():
        if name in ("step", "time"):
            continue
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, number in entries:
            if isinstance(number, int | float) and not isinstance(number, bool):
                out["/".join(part for part in (_SECTION_OF.get(name), name, key) if part)] = number
    return out


def _idle(last: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Return the share of the time between two steps in which the engine sampled nothing.

    None if the engine does not count its time, for the first step after the trainer starts, and if an engine
    was restarted, so that it counts from 0, or the clock was set back.
    """
    busy, busy_before = now.get("engine_busy_s"), last.get("engine_busy_s")
    if busy is None or busy_before is None:
        return None
    busy_s, elapsed_s = busy - busy_before, now["time"] - last["time"]
    if busy_s < 0 or elapsed_s <= 0:
        return None
    return max(0.0, 1.0 - busy_s / elapsed_s)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_until(path: Path, step: int) -> dict[str, Any]:
    """Drop the lines of later steps, and a last line that a crash cut short; the last one kept."""
    if not path.exists():
        return {}
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    write_whole(path, "".join(kept))
    return json.loads(kept[-1]) if kept else {}
