"""The parameters of a cluster are recovered from its trace."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError
from areal_agents.simulate import EmpiricalWork, LogNormal, LogNormalWork, Scenario, StepTime, simulate
from areal_agents.simulate.engine import Generated
from areal_agents.simulate.loop import _SimulatedEpisode, _Simulation
from areal_agents.simulate.report import run
from areal_agents.simulate.trace import _engine_times, _Turns, least_squares, mean_running, read_trace
from areal_agents.store import NewEpisode, Store
from areal_agents.store.rows import TurnTime

SCENARIO = Scenario(
    work=LogNormalWork(LogNormal(60, 1.0, 300), turns=3, tool_s=LogNormal(0.5, 1.0)), groups=8, group_size=4,
    max_staleness=2, concurrency=96, step_time=StepTime(0.004, 0.0003), slots=96, call_s=0.02,
    trainer_s_per_token=2e-4, publish_s=0.05, steps=30, warm_up=8,
)  # fmt: skip


class Recorded(_Simulation):
    """Records the times that the store of a real run would record."""

    def run_recorded(self) -> list[TurnTime]:
        self.times: dict[int, list[TurnTime]] = {}
        self.opened: dict[int, float] = {}
        self.kept: list[_SimulatedEpisode] = []  # so that no id is used twice
        self.run()
        return [turn for own in self.times.values() for turn in own]

    def _call(self, episode: _SimulatedEpisode) -> None:
        if episode.turn == 0:
            self.kept.append(episode)
            self.opened[id(episode)] = self._now - self._s.call_s
        super()._call(episode)

    def _generated_turn(self, one: Generated) -> None:
        episode = one.owner
        tokens = int(episode.plan.tokens[episode.turn])
        turn = TurnTime(str(id(episode)), self.opened[id(episode)], self._now, tokens)
        self.times.setdefault(id(episode), []).append(turn)
        super()._generated_turn(one)


def test_the_times_of_the_engine_and_the_tools_are_recovered_from_the_turns() -> None:
    turns = _Turns.of(Recorded(SCENARIO).run_recorded())
    step_time, call_s, generation_s, calls_are_told = _engine_times(turns, replicas=1)
    assert calls_are_told
    assert step_time.base_s == pytest.approx(0.004, rel=0.25)
    assert step_time(40) == pytest.approx(SCENARIO.step_time(40), rel=0.1)
    assert call_s == pytest.approx(0.02, abs=0.03)
    plans = turns.plans(generation_s)
    assert np.mean([s for plan in plans for s in plan.between]) == pytest.approx(0.52, rel=0.15)
    again = replace(SCENARIO, work=EmpiricalWork(plans), step_time=step_time, call_s=call_s)
    assert simulate(again).step_s == pytest.approx(simulate(SCENARIO).step_s, rel=0.1)
    synchronous = simulate(replace(SCENARIO, max_staleness=0)).step_s
    assert simulate(replace(again, max_staleness=0)).step_s == pytest.approx(synchronous, rel=0.15)


def test_if_longer_turns_took_no_longer_all_time_is_attributed_to_tokens() -> None:
    times = [TurnTime(str(n), 10.0 * n, 10.0 * n + 1.0 - 0.1 * n, 2 + n) for n in range(4)]
    step_time, call_s, generation_s, calls_are_told = _engine_times(_Turns.of(times), replicas=1)
    assert (call_s, calls_are_told) == (0.0, False)
    tokens, seconds = np.arange(2, 6), 1.0 - 0.1 * np.arange(4)
    assert step_time(1) == pytest.approx((tokens @ seconds) / (tokens @ tokens))  # by least squares
    assert generation_s == pytest.approx(seconds)


def test_episodes_whose_turns_were_sampled_in_parallel_are_left_out() -> None:
    turns = _Turns.of(
        [
            TurnTime("a", 0.0, 1.0, 5),
            TurnTime("b", 0.0, 1.0, 5),
            TurnTime("b", 0.0, 1.0, 5),
            TurnTime("c", 2.0, 3.0, 4),
        ]
    )
    assert turns.episodes == 2
    assert turns.tokens.tolist() == [5, 4]


def test_mean_running_counts_overlaps() -> None:
    starts, ends = np.array([0.0, 1.0, 5.0, 7.0]), np.array([2.0, 3.0, 6.0, 7.0])
    assert mean_running(starts, ends).tolist() == [1.5, 1.5, 1.0, 1.0]


def test_least_squares_has_no_negative_coefficients() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx((1.0, 2.0))
    assert least_squares(columns, np.array([0.0, 1.0, 2.0])) == pytest.approx((0.0, 4 / 7))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with four steps of two groups of two, and eight episodes of two turns."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    folder, model = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = {
        "model": str(model), "agent": "m:f", "data": {"path": "m:tasks"}, "name": "run",
        "rollout": {"groups": 2, "group_size": 2, "max_staleness": 3}, "engine": {"slots": 7},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": step, "time": 100.0 + 3 * step, "step_s": 3.0, "wait_s": 1.0, "publish_s": 0.5,
         "pause_s": 0.1, "sampled_tokens": 40 + step}
        for step in range(1, 5)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store.open(folder / "store.db") as store:
        for number in range(8):
            _record(store, f"e{number}", tokens=3 + 3 * number, now=now)
    return folder


def _record(store: Store, episode: str, *, tokens: int, now: list[float]) -> None:
    """Store an episode whose turns take 2 ms, and 1 ms more for each token, by the clock `now`."""
    store.open_episode(NewEpisode(episode, f"key {episode}")).result()
    for turn, count in enumerate((tokens, 2)):
        now[0] += 0.002 + 0.001 * count
        completion = Completion([1] * count, [-1.0] * count, [0] * count, "stop")
        store.add_turn(
            episode,
            Turn(
                id=f"{episode}-{turn}", parent=None, new_messages=(Message("user", "hi"),),
                new_prompt_ids=np.array([1], np.int32), completion=completion,
                reply=Message("assistant", "x"), sampling=SamplingParams(count), tools_id="",
            ),
        ).result()  # fmt: skip
    store.seal(episode, "finished", given=[Reward("episode", "", "return", 1.0)]).result()


def test_a_run_folder_is_read(run_folder: Path) -> None:
    trace = read_trace(run_folder)
    assert (trace.episodes, trace.steps, trace.step_s) == (8, 4, 3.0)
    found = trace.parameters
    assert (found["groups"], found["group_size"], found["max_staleness"], found["slots"]) == (2, 2, 3, 7)
    assert found["trainer_s"] + found["trainer_s_per_token"] * 42 == pytest.approx(1.5, rel=0.02)
    assert (found["publish_s"], found["pause_s"]) == (0.5, pytest.approx(0.1))
    assert found["base_s"] + found["per_request_s"] > 0
    assert [plan.tokens for plan in trace.work.plans] == [(3.0 + 3 * n, 2.0) for n in range(8)]


def test_settings_of_a_run_that_are_not_modelled_are_reported(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_trace(run_folder).not_modelled == ()
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["loop"] = "one_step_off"
    config["rollout"] |= {"max_staleness": 1, "over_sample": 2, "on_stale": "drop"}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    run([], source=run_folder, gpus=None, plot=None, json=True)
    printed = capsys.readouterr()
    said = json.loads(printed.out.splitlines()[-1])["trace"]["not_modelled"]
    assert [setting.partition(" ")[0] for setting in said] == [
        "loop:",
        "rollout.over_sample:",
        "rollout.on_stale:",
    ]
    assert (printed.out + printed.err).count("not modelled: ") == 3


def test_a_folder_without_a_run_and_a_run_without_steps_are_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_trace(tmp_path)
    (run_folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="at least 4 steps and 8 episodes, got 0 and 8"):
        read_trace(run_folder)
