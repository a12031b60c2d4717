"""The summary of a run says which evaluations are complete, and why nothing was trained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_agents.core.rollout import Reward, Task
from areal_agents.launch.progress import HeldOut, read_held_out
from areal_agents.launch.summary import Summary, complete_evaluations, plot_rewards
from areal_agents.store import NewEpisode, Store
from areal_agents.store.pages import evaluations
from areal_agents.store.read_only import ReadOnlyStore


def row(step: int, *, tokens: int, some: int) -> dict[str, Any]:
    return {
        "step": step, "version": step, "tokens": tokens, "sampled_tokens": 100, "step_s": 1.0, "wait_s": 0.5,
        "pause_s": 0.0, "staleness_mean": 0.0, "staleness_max": 0, "reward_mean": 0.25 * step,
        "groups_solved_some": some,
    }  # fmt: skip


def evaluation(label: str, done: int, reward: float, fingerprint: str = "") -> HeldOut:
    return HeldOut(label, done, reward, 0, (0, 0), fingerprint)


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


def test_the_gain_has_a_confidence_interval_over_the_tasks_evaluated_before_and_after(tmp_path: Path) -> None:
    """t(0.975, 3) = 3.182 and the standard error of (1, 1, 0, 0) is 0.2887."""

    def scored(label: str, *scores: float, fingerprint: str = "") -> HeldOut:
        by_task = tuple((str(number), score) for number, score in enumerate(scores))
        return HeldOut(label, len(scores), sum(scores) / len(scores), 0, (0, 0), fingerprint, by_task)

    def summary(*held_out: HeldOut) -> Summary:
        return Summary.of([row(1, tokens=9, some=1)], held_out, wall_s=1, engine_idle=None)

    unsure = summary(scored("before", 0, 0, 1, 0), scored("after", 1, 1, 1, 0))
    assert unsure.gain_low == pytest.approx(0.5 - 3.182 * 0.2887, abs=1e-3) and unsure.gain_tasks == 4
    text = "+0.500 (95% interval over 4 tasks: -0.419 to +1.419, which includes 0; evaluate more tasks"
    assert text in text_of(unsure)
    unsure.write(tmp_path / "summary.json")
    assert Summary.read(tmp_path / "summary.json") == unsure
    sure = summary(scored("before", *[0] * 19, 1), scored("after", *[1] * 20))
    assert "(95% interval over 20 tasks: +0.845 to +1.055)" in text_of(sure)
    assert "(no interval: the scores of all 2 tasks changed by the same amount)" in text_of(
        summary(scored("before", 0, 0), scored("after", 1, 1))
    )
    assert "(no interval: there is one task)" in text_of(summary(scored("before", 0), scored("after", 1)))
    assert "interval" not in text_of(summary(scored("before", 0, 1)))
    changed = summary(
        scored("before", 1, 1, 1, 1, fingerprint="a"),
        scored("step-3", 0, 0, 1, 0, fingerprint="b"),
        scored("after", 1, 1, 1, 0, fingerprint="b"),
    )
    assert changed.gain is None and changed.gain_low == unsure.gain_low
    assert "(from 0.250, step-3) (95% interval over 4 tasks: -0.419" in text_of(changed)
    other = summary(
        scored("before", 0, 0, 1, 0, fingerprint="a"), scored("after", 1, 1, 1, 0, fingerprint="b")
    )
    assert (other.gain, other.gain_low, other.gain_tasks) == (None, None, 0)


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


def test_there_is_no_gain_between_the_rewards_of_different_agents(tmp_path: Path) -> None:
    held_out = [
        evaluation("before", 8, 0.25, "old"),
        evaluation("step-3", 8, 0.5, "new"),
        evaluation("after", 8, 0.625, "new"),
    ]
    changes = {"new": "the agent (agent.py) changed after step 3"}
    rows = [row(step, tokens=1, some=1) for step in range(1, 6)]
    summary = Summary.of(rows, held_out, wall_s=1, engine_idle=None, changes=changes)
    assert summary.gain is None and summary.agent_changed == "the agent (agent.py) changed after step 3"
    assert (summary.heldout_since_change, summary.heldout_since_change_label) == (0.5, "step-3")
    assert "the agent (agent.py) changed after step 3" in text_of(summary) and "+0.125" in text_of(summary)
    plot_rewards(rows, held_out, tmp_path / "reward.png")
    assert Summary.of(rows, held_out[::2], wall_s=1, engine_idle=None, changes=changes).gain is None
    back = [*held_out, evaluation("after", 8, 0.75, "old")]
    assert Summary.of(rows, back, wall_s=1, engine_idle=None, changes=changes).gain == 0.5
    unknown = [evaluation("before", 8, 0.25), held_out[-1]]
    assert Summary.of(rows, unknown, wall_s=1, engine_idle=None).gain == 0.375


def test_an_evaluation_counts_the_episodes_with_the_newest_fingerprint(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:

        def play(label: str, step: int, fingerprint: str, *scores: float) -> None:
            for attempt, score in enumerate(scores):
                episode = f"{label}/{fingerprint}/{attempt}"
                known = {"fingerprint": fingerprint} if fingerprint else {}
                metadata = {"source": "rollout", "eval": label, "step": step, "attempt": attempt, **known}
                store.open_episode(
                    NewEpisode(episode, episode, Task("t", {}), split="eval", metadata=metadata)
                ).result()
                store.set_rewards(episode, [Reward("episode", "", "return", score)]).result()
                store.seal(episode, "finished").result()

        def found() -> list[tuple[str, float, str]]:
            by_label = [(e.label, e.reward, e.fingerprint) for e in read_held_out(store)]
            with ReadOnlyStore(tmp_path / "store.db").read() as connection:
                shown = [(e.label, e.reward, e.fingerprint) for e in evaluations(connection)]
            assert by_label == shown
            return by_label

        play("before", 0, "a", 0.0, 0.5)
        play("before", 0, "b", 1.0, 0.5)
        play("step-2", 2, "a", 1.0)
        assert found() == [("before", 0.25, "a"), ("step-2", 1.0, "a")]
        assert read_held_out(store)[0].scores == (("t", 0.25),)  # the mean of two attempts
        play("after", 4, "b", 1.0)
        assert found() == [("before", 0.75, "b"), ("step-2", 1.0, "a"), ("after", 1.0, "b")]
