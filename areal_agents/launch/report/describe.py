"""What a user is told about a run, in words: steps, failures, rewards that are missing, memory, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.launch.progress import HeldOut, RunProgress

BARS = "▁▂▃▄▅▆▇█"
FEWEST_TURNS = 8  # from so many turns on, it is reported that most are constrained
LONGEST_FAILURE = 300  # characters of the last failure


def describe_step(row: Mapping[str, Any], steps: int) -> str:
    """Return one line about one training step."""
    groups = f"{row['groups_solved_all']}/{row['groups_solved_some']}/{row['groups_solved_none']}"
    return (
        f"step {row['step']:>3}/{steps}  reward {row['reward_mean']:.3f}  groups all/some/none {groups}  "
        f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
        f"clip {row['clip_fraction']:.3f}  {_divergence(row)}  step {row['step_s']:.1f} s, "
        f"waited {row['wait_s']:.1f} s"
    )


def _divergence(row: Mapping[str, Any]) -> str:
    """Return the divergence from the behavior policy; imported episodes have none, and the loss is shown."""
    value = row["kl_behavior_k3"]
    return f"loss {row['loss']:.4f}" if value is None else f"KL {value:.4f}"


def describe_held_out(evaluation: HeldOut) -> str:
    """Return one line about a complete evaluation."""
    return f"held-out {evaluation.label}: {evaluation.reward:.3f} on {evaluation.done} episodes"


def describe_failures(progress: RunProgress) -> str:
    """Return how many training episodes have failed, and why the last one has."""
    count = f"{progress.failed} training episode{'s' if progress.failed > 1 else ''} failed"
    return f"{count}; the last one: {(progress.failure or 'unknown')[:LONGEST_FAILURE]}"


def is_mostly_constrained(progress: RunProgress) -> bool:
    """Whether most of the latest training turns are constrained; False as long as there are few turns."""
    return progress.turns >= FEWEST_TURNS and 2 * progress.constrained > progress.turns


def describe_constrained(progress: RunProgress) -> str:
    """Return how many of the latest training turns are not trained because a grammar constrained them."""
    return (
        f"algorithm.train_constrained is off, and {progress.constrained} of the latest {progress.turns} "
        "turns are constrained, so they are not trained; areal-agents doctor names the agent's setting"
    )


def describe_agent_errors(progress: RunProgress) -> str:
    """Return how many training episodes are scored although their agent raised."""
    return f"{progress.agent_errors} episodes are scored with rollout.agent_error_reward: their agent raised"


def describe_unrewarded(progress: RunProgress) -> str:
    """Return how many episodes wait for a reward, and how to give it."""
    return (
        f"{progress.unrewarded} ended training episodes wait for a reward; post it to /episodes/ID/reward, "
        "or they fail after proxy.reward_timeout_s"
    )


def describe_memory(used: Mapping[str, int], total: int, device_peak: int | None) -> str:
    """Return the resident memory of the run's processes, and the most that a rank allocated on its GPU.

    Args:
        used: bytes by role.
        total: bytes of the machine.
        device_peak: bytes, or None on a CPU.
    """
    parts = ", ".join(f"{role} {gib(size)}" for role, size in used.items())
    shown = f"{gib(sum(used.values()))} of {gib(total)} GiB ({parts})"
    return shown if device_peak is None else f"{shown}; trainer's peak on a GPU {gib(device_peak)} GiB"


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:.1f}"


def describe_duration(seconds: float) -> str:
    """Return a time as people say it: 42 s, 7 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def expected_episodes(rows: Sequence[Any], progress: RunProgress, eval_episodes: int) -> int:
    """Return the expected number of episodes of an evaluation: at most as many as "before" had."""
    before = [evaluation.done for evaluation in progress.held_out if evaluation.label == "before"]
    return min([eval_episodes, *(before if rows else [])])


def sparkline(values: Sequence[float]) -> str:
    """Return the values as a row of block characters, scaled between their minimum and maximum."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)
