"""The summary of a run says which evaluations are complete, and why nothing was trained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_agents.launch.progress import HeldOut
from areal_agents.launch.summary import Summary, complete_evaluations, plot_rewards


def row(step: int, *, tokens: int, some: int) -> dict[str, Any]:
    return {
        "step": step, "version": step, "tokens": tokens, "sampled_tokens": 100, "step_s": 1.0, "wait_s": 0.5,
        "pause_s": 0.0, "staleness_mean": 0.0, "staleness_max": 0, "reward_mean": 0.25 * step,
        "groups_solved_some": some,
    }  # fmt: skip


def evaluation(label: str, done: int, reward: float) -> HeldOut:
    return HeldOut(label, done, reward, 0, (0, 0))


def text_of(summary: Summary) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(summary.table())
    return out.getvalue()


def test_an_evaluation_that_was_ended_early_is_marked(tmp_path: Path) -> None:
    held_out = [evaluation("before", 64, 0.5), evaluation("step-2", 39, 0.9), evaluation("after", 64, 0.6)]
    summary = Summary.of([row(1, tokens=9, some=1)], held_out, wall_s=1, engine_idle=None)
    assert summary.heldout == {"before": 0.5, "after": 0.6} and summary.heldout_incomplete == {"step-2": 39}
    assert "step-2 after 39 episodes" in text_of(summary)
    assert [e.label for e in complete_evaluations(held_out)] == ["before", "after"]
    summary.write(tmp_path / "summary.json")
    assert Summary.read(tmp_path / "summary.json") == summary


def test_a_run_that_trained_nothing_says_why() -> None:
    equal = Summary.of([row(1, tokens=0, some=0)], [], wall_s=1, engine_idle=None)
    assert "all episodes of each group had the same reward" in text_of(equal)
    assert equal.model_is == "the initial model, untrained"
    untrained = Summary.of([row(1, tokens=0, some=3)], [], wall_s=1, engine_idle=None)
    assert "3 groups had different rewards, but none of their turns can be trained" in text_of(untrained)
    trained = Summary.of([row(1, tokens=0, some=0), row(2, tokens=5, some=1)], [], wall_s=1, engine_idle=None)
    assert trained.model_is == "trained model"
    assert trained.nothing_trained == "" and "nothing was trained" not in text_of(trained)


def test_the_plot_is_written(tmp_path: Path) -> None:
    rows = [row(step, tokens=1, some=1) for step in range(1, 4)]
    for held_out in ([], [evaluation("before", 4, 0.1), evaluation("after", 4, 0.2)]):
        plot_rewards(rows, held_out, tmp_path / "reward.png")
        assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
