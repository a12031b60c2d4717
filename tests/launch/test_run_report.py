"""What a user sees of a run while it trains: on a terminal, without one, quietly, and as JSON."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from areal_agents.config import Config
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.health.rules import WINDOW
from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.progress import HeldOut, ProgressReader, RunProgress
from areal_agents.launch.report import changes as changes_module
from areal_agents.launch.report import panel as panel_module
from areal_agents.launch.report.changes import Changes
from areal_agents.launch.report.describe import describe_duration, describe_memory
from areal_agents.launch.report.json_lines import JsonReport
from areal_agents.launch.report.lines import LineReport
from areal_agents.launch.report.panel import PanelReport
from areal_agents.launch.report.report import Report
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.train import report_resume
from areal_agents.quickstart import quickstart_model
from areal_agents.store import NewEpisode, Store


def shown(*snapshots: RunProgress, terminal: bool, trains_constrained: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    report: Report = LineReport(console, changes(trains_constrained=trains_constrained))
    if terminal:
        report = PanelReport(
            console, title="t", steps=3, eval_episodes=0, trains_constrained=trains_constrained
        )
    with report:
        report.stage("waiting for the trainer's first version")
        for snapshot in snapshots:
            report.update([], snapshot)
    return out.getvalue()


def changes(*, trains_constrained: bool = False, eval_episodes: int = 0) -> Changes:
    return Changes(steps=3, eval_episodes=eval_episodes, trains_constrained=trains_constrained)


def row(step: int, **values: object) -> dict[str, object]:
    return {
        "step": step, "time": 1000.0 + 10 * step, "reward_mean": 0.1 * step, "groups_solved_all": 1,
        "groups_solved_some": 2, "groups_solved_none": 3, "staleness_mean": 0.5, "staleness_max": 2,
        "clip_fraction": 0.01, "kl_behavior_k3": 0.001, "step_s": 9.0, "wait_s": 1.0, "tokens_per_s": 5100.0,
        "trainer_idle": 0.11, "rollout_idle": 0.2, "pause_s": 0.04, **values,
    }  # fmt: skip


def test_a_resumed_run_shows_only_what_is_new() -> None:
    """A step that the trainer repeats after the resume is new."""
    found = changes(eval_episodes=2)
    rows = [row(1), row(2), row(3)]
    before = HeldOut("before", 2, 0.5, 0, (0, 0))
    found.know(rows, ["before"])
    progress = RunProgress(0, {}, held_out=[before])
    assert [*found.since_last(rows, progress)] == []
    assert [*found.since_last(rows[:2], progress)] == []
    (new,) = found.since_last([*rows[:2], row(3, reward_mean=0.9)], progress)
    assert new.kind == "step" and "reward 0.900" in new.text


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ((), "; it has no checkpoint yet, so training continues at step 1"),
        (
            ("step-1", "step-2", ".step-3.tmp"),
            "; its newest checkpoint is that of step 2, so training continues at step 3",
        ),
        (("step-2", "step-3"), ""),
    ],
)
def test_a_resumed_run_says_which_steps_are_trained_again(
    checkpoints: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(f"{json.dumps(row(step))}\n" for step in (1, 2, 3)))
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    out = io.StringIO()
    report = LineReport(Console(file=out, width=1000), changes())
    Store.open(folder.store).close()
    data = {"episodes": str(folder.store)}
    config = Config.model_validate({"model": str(quickstart_model()), "data": data})
    report_resume(config, folder, report)
    assert f"which has trained 3 steps{said}; use --fresh to start over" in out.getvalue()


def test_the_last_failure_is_read_from_the_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        assert (ProgressReader(store).read().failed, ProgressReader(store).read().failure) == (0, None)
        for name, error in (("a", "KeyError: 'first'"), ("b", "KeyError: 'second'")):
            store.open_episode(NewEpisode(name, f"hash of {name}")).result()
            store.seal(name, "failed", error=error).result()
        progress = ProgressReader(store).read()
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
        progress = ProgressReader(store).read()
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
    assert shown(first, first, second, terminal=False).count("failed") == 1  # no repeat within 15 s
    monkeypatch.setattr(changes_module, "FAILURES_EVERY_S", 0.0)
    output = shown(first, first, second, terminal=False)
    assert output.count("1 training episode failed") == output.count("2 training episodes failed") == 1


def test_the_stage_changes_after_the_first_version() -> None:
    assert "waiting for the trainer's first version" in shown(RunProgress(-1, {}), terminal=True)
    last = shown(RunProgress(0, {}), terminal=True).rpartition("now")[2]
    assert "waiting for the first batch" in last


def test_episodes_that_wait_for_rewards_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, none = (RunProgress(0, {}, unrewarded=n) for n in (3, 0))
    assert "3 ended training episodes wait for a reward" in shown(waiting, terminal=True)
    assert "wait for a reward" not in shown(waiting, waiting, terminal=False)  # not waiting long enough
    monkeypatch.setattr(changes_module, "UNREWARDED_S", 0.0)
    output = shown(waiting, waiting, waiting, none, waiting, waiting, terminal=False)
    assert output.count("3 ended training episodes wait for a reward") == 2


def test_the_panel_shows_what_the_run_does() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    progress = RunProgress(
        2,
        {"complete": 4, "pending": 5, "trained": 6, "dropped": 1},
        held_out=[HeldOut("before", 8, 0.25, 0, (0, 0)), HeldOut("step-2", 3, 0.5, 0, (2, 2))],
        published_at=time.time() - 125,
        sampled_tokens_per_s=1234.0,
    )
    memory = MemoryUse(lambda: {"engine-0": os.getpid(), "engine-1": os.getpid(), "proxy": os.getpid()})
    memory.update()
    assert set(memory.by_role) == {"engine", "proxy"} and memory.by_role["engine"] > 2**20
    with PanelReport(console, title="t", steps=3, eval_episodes=8) as report:
        report.warn("the disk is low")
        report.event("the proxy was restarted")
        report.update([row(1), row(2, device_memory_peak=3 << 30)], progress, memory)
    text = out.getvalue()
    for part in (
        "step 2/3", "10.0 s per step, about 10 s left", "0.200  ▁█", "0.250 (before) · step-2: 3/8 episodes",
        "engine 1,234 sampled · trainer 5,100 while it computes", "mean 0.50, max 2",
        "trainer 11%, engine 20%", "4 groups ready, 5 in progress, 6 trained, 1 dropped",
        "version 2, published 2 min ago, which paused generation for 0.04 s",
        "trainer's peak on a GPU 3.0 GiB", "warning: the disk is low", "the proxy was restarted",
    ):  # fmt: skip
        assert part in text, part


def test_a_wait_is_shown_with_its_time_and_its_limit() -> None:
    out = io.StringIO()
    with LineReport(Console(file=out, width=200), changes()) as report:
        for seconds in range(100):
            report.wait("the inference engine", float(seconds), 600.0)
        for seconds in (0.0, 0.5):
            report.wait("the proxy", seconds, 180.0)
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == [
        "waiting for the inference engine, at most 600 s",
        *(f"waiting for the inference engine: {seconds} s of at most 600 s" for seconds in (10, 20, 40, 80)),
        "waiting for the proxy, at most 180 s",
    ]
    shown = io.StringIO()
    with JsonReport(shown, changes(), steps=3) as json_report:
        for seconds in (0.0, 5.0, 11.0):
            json_report.wait("the inference engine", seconds, 600.0)
    events = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["stage", "stage"] and "11 s of" in events[1]["text"]


def test_the_panel_shows_a_wait_before_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_module, "WAIT_DRAWN_S", 0.0)
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=120, color_system=None)
    with PanelReport(console, title="t", steps=3, eval_episodes=0) as report:
        report.wait("the inference engine", 0.2, 600.0)
        report.wait("the inference engine", 42.0, 600.0)
        assert "waiting for the inference engine, at most 600 s" in out.getvalue()
        assert "waiting for the inference engine: 42 s of at most 600 s" in out.getvalue()
        monkeypatch.setattr(panel_module, "WAIT_DRAWN_S", 3600.0)
        report.wait("the inference engine", 43.0, 600.0)
        assert "43 s of" not in out.getvalue(), "it is not drawn ten times a second"
        report.stage("waiting for the trainer's first version")
        assert "the trainer's first version" in out.getvalue()


def test_quiet_output_has_only_unusual_events() -> None:
    out = io.StringIO()
    with LineReport(Console(file=out, width=200), changes(eval_episodes=1), quiet=True) as report:
        report.say("trainer: 1 rank")
        report.stage("waiting for the proxy")
        held_out = [HeldOut("before", 1, 0.5, 0, (0, 0))]
        report.update([row(1)], RunProgress(0, {}, held_out=held_out))
        assert out.getvalue() == ""
        report.event("the proxy was killed by signal 9 and will be restarted")
        report.update([row(1)], RunProgress(0, {}, failed=1, failure="KeyError: 'x'"))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "signal 9" in lines[0] and "KeyError: 'x'" in lines[1]


def test_every_line_of_json_output_is_an_object() -> None:
    out = io.StringIO()
    before = HeldOut("before", 1, 0.5, 0, (0, 0), scores=(("task", 0.5),))
    progress = RunProgress(1, {"complete": 2}, held_out=[before], failed=1)
    with JsonReport(out, changes(eval_episodes=1), steps=3) as report:
        report.say("trainer: 1 rank")
        report.stage("waiting")
        for text in ("low", "low", None):
            report.warn(text)
        for rows in ([row(1)], [row(1)], [row(1), row(2, mfu=None)]):
            report.update(rows, progress)
    events: list[Mapping[str, object]] = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "setup", "stage", "warning", "warning", "failures", "step", "held_out", "progress", "step",
    ]  # fmt: skip
    assert [event["text"] for event in events if event["event"] == "warning"] == ["low", None]
    assert [e["metrics"]["step"] for e in events if e["event"] == "step"] == [1, 2]  # type: ignore[index]
    held_out = next(event for event in events if event["event"] == "held_out")
    assert (held_out["label"], held_out["reward"], held_out["done"]) == ("before", 0.5, 1)
    assert "scores" not in held_out  # there is one for each task, which may be thousands
    assert next(e for e in events if e["event"] == "progress")["groups"] == {"complete": 2}


def test_a_condition_of_the_metrics_is_reported_when_it_begins() -> None:
    equal = {"groups_solved_some": 0, "groups_solved_all": 0, "skipped_steps": 0}
    bad, good = [row(n, **equal) for n in range(WINDOW + 2)], row(WINDOW + 2, skipped_steps=0)
    out = io.StringIO()
    with LineReport(Console(file=out, width=300), changes(), quiet=True) as report:
        for rows in (bad[:WINDOW], bad[: WINDOW + 1], bad, [*bad, good], [*bad, good, *bad]):
            report.update(rows, RunProgress(0, {}))
    assert out.getvalue().count("all groups had equal scores (no episode succeeds)") == 2
    console = Console(file=(shown := io.StringIO()), force_terminal=True, width=120, color_system=None)
    with PanelReport(console, title="t", steps=99, eval_episodes=0) as panel:
        panel.update(bad, RunProgress(0, {}))
    assert "equal groups" in shown.getvalue() and "Choose harder or easier tasks" in shown.getvalue()


def test_the_sampling_rate_is_that_of_the_last_half_minute(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        assert store.sampled_tokens_per_s() == 0.0
        store.open_episode(NewEpisode("a", "hash of a")).result()
        for index in range(6):
            store.add_turn("a", turn(f"a{index}", constrained=False)).result()
        assert store.sampled_tokens_per_s(within_s=30.0) == pytest.approx(6 / 30.0)
        assert store.sampled_tokens_per_s(within_s=30.0, latest=6) > 6 / 30.0  # over a shorter time


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (125, "2 min"), (3600 * 2.5, "2 h 30 min"), (3600 * 52, "2 d 4 h")],
)
def test_durations_are_described_in_readable_units(seconds: float, said: str) -> None:
    assert describe_duration(seconds) == said


def test_memory_is_described_by_role() -> None:
    said = describe_memory({"engine": 2 << 30, "proxy": 1 << 29}, 24 << 30, None)
    assert said == "2.5 of 24.0 GiB (engine 2.0, proxy 0.5)"
