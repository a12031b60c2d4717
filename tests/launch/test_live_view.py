"""What a user sees of failing agents while a run trains, with and without a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.launch import live_view
from areal_agents.launch.live_view import LiveView
from areal_agents.launch.progress import RunProgress, read_progress
from areal_agents.store import NewEpisode, Store


def shown(*snapshots: RunProgress, terminal: bool, **options: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    with LiveView(console, title="t", steps=3, eval_episodes=0, **options) as view:
        view.stage("waiting for the trainer's first version")
        for snapshot in snapshots:
            view.update([], snapshot)
    return out.getvalue()


def test_the_last_failure_is_read_from_the_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        assert (read_progress(store).failed, read_progress(store).failure) == (0, None)
        for name, error in (("a", "KeyError: 'first'"), ("b", "KeyError: 'second'")):
            store.open_episode(NewEpisode(name, f"hash of {name}")).result()
            store.seal(name, "failed", error=error).result()
        progress = read_progress(store)
    assert (progress.failed, progress.failure) == (2, "KeyError: 'second'")


@pytest.mark.parametrize("terminal", [False, True])
def test_failures_are_shown_with_their_number_and_reason(terminal: bool) -> None:
    progress = RunProgress(0, {}, failed=12, failure="KeyError: 'oops' (agent.py, line 7)")
    output = shown(progress, terminal=terminal)
    assert "12 training episodes failed" in output and "KeyError: 'oops' (agent.py, line 7)" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_turns_that_are_not_trained_are_reported_first(terminal: bool) -> None:
    mostly, partly, few = (
        RunProgress(0, {}, agent_errors=1, constrained=constrained, turns=turns)
        for constrained, turns in ((6, 8), (4, 8), (7, 7))
    )
    said = "algorithm.train_constrained is off"
    output = shown(mostly, mostly, terminal=terminal)
    assert said in output and (terminal or output.count(said) == 1)
    if terminal:
        assert output.index(said) < output.index("waiting for the first batch")
    assert said not in shown(partly, few, terminal=terminal)
    assert said not in shown(mostly, terminal=terminal, trains_constrained=True)


def test_constrained_turns_are_counted_in_the_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        for name, split in (("a", "train"), ("b", "eval")):
            store.open_episode(NewEpisode(name, f"hash of {name}", split=split)).result()
            turns = [turn(f"{name}{index}", constrained=index < 5) for index in range(8)]
            for one in turns:
                store.add_turn(name, one).result()
        progress = read_progress(store)
        assert (progress.constrained, progress.turns) == (5, 8)
        assert store.constrained_turns("eval", latest=4) == (1, 4)


def turn(name: str, *, constrained: bool) -> Turn:
    return Turn(
        id=name,
        parent=None,
        new_messages=(Message("user", "hi"),),
        new_prompt_ids=[1],
        completion=Completion([2], [-0.5], [0], "stop"),
        reply=Message("assistant", "ok"),
        sampling=SamplingParams(8),
        constrained=constrained,
    )


def test_without_a_terminal_failures_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (RunProgress(0, {}, failed=n, failure="x") for n in (1, 2))
    assert shown(first, first, second, terminal=False).count("failed") == 1  # the second within 15 s
    monkeypatch.setattr(live_view, "FAILURES_EVERY_S", 0.0)
    output = shown(first, first, second, terminal=False)
    assert output.count("1 training episode failed") == output.count("2 training episodes failed") == 1


def test_after_the_first_version_the_stage_is_another() -> None:
    assert "waiting for the trainer's first version" in shown(RunProgress(-1, {}), terminal=True)
    last = shown(RunProgress(0, {}), terminal=True).rpartition("now")[2]
    assert "waiting for the first batch" in last


def test_episodes_that_wait_for_rewards_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, none = (RunProgress(0, {}, unrewarded=n) for n in (3, 0))
    assert "3 ended training episodes wait for a reward" in shown(waiting, terminal=True)
    assert "wait for a reward" not in shown(waiting, waiting, terminal=False)  # not for long enough
    monkeypatch.setattr(live_view, "UNREWARDED_S", 0.0)
    output = shown(waiting, waiting, waiting, none, waiting, waiting, terminal=False)
    assert output.count("3 ended training episodes wait for a reward") == 2
