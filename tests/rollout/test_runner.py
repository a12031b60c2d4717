from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from store_queries import in_flight_episodes

from areal_agents import AsyncClient, Client
from areal_agents.errors import AgentError, DataError, RequestError
from areal_agents.rollout import runner
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.rollout.runner import evaluate, run

AGENTS = Path(__file__).parent / "rollout_agents.py"
ADMIN_KEY = "admin-key-of-the-tests"
STEPS = 4


def tasks_file(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def train_tasks(served: Any, n: int = 10, **fields: Any) -> DataConfig:
    rows = [{"id": f"train/{i}", "n": i, **fields} for i in range(n)]
    return DataConfig(path=tasks_file(served.folder, "train", rows))


def held_out(served: Any, n: int = 4, **options: Any) -> EvalConfig:
    rows = [{"id": f"held-{i}", "n": i} for i in range(n)]
    return EvalConfig(data=DataConfig(path=tasks_file(served.folder, "held", rows)), **options)


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**{"groups": 2, "group_size": 2, "concurrency": 6, "max_staleness": 1, **changes})


def arguments(served: Any, agent: str | dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "store": served.store,
        "proxy_url": served.url,
        "admin_key": ADMIN_KEY,
        "agent": f"{AGENTS}:{agent}" if isinstance(agent, str) else agent,
        "data": changes.pop("data", None) or train_tasks(served),
        "rollout": config(),
        "evaluation": None,
        "steps": STEPS,
        **changes,
    }


def nothing_is_left(served: Any) -> bool:
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    ours = [name for name in names if "Collector" in name or "StoreWatch" in name or "Agent" in name]
    return not served.store.episodes(status="open") and not ours


async def test_a_run_trains_and_evaluates_before_beside_and_after_training(served: Any) -> None:
    bound = 2 * 2 * 2  # (η + 1) · groups · G
    seen: list[int] = []
    given = arguments(served, "good", evaluation=held_out(served, every=2, concurrency=2))

    def may_train(step: int) -> bool:  # the last step waits for an evaluation beside training
        labels = {episode.metadata["eval"] for episode in served.store.episodes(split="eval")}
        return step < STEPS or any(label.startswith("step-") for label in labels)

    async with served.trainer(
        groups=2,
        steps=STEPS,
        seen=lambda _: seen.append(in_flight_episodes(served.store)),
        may_train=may_train,
    ):
        async with asyncio.timeout(60):
            await run(**given)
    assert nothing_is_left(served)
    assert served.store.group_counts()["trained"] == STEPS * 2
    assert len(seen) == STEPS and max(seen) <= bound

    evaluations: dict[str, list[Any]] = {}
    for episode in served.store.episodes(split="eval"):
        evaluations.setdefault(episode.metadata["eval"], []).append(episode)
    # The evaluation beside training uses the newest version, which may be one step further.
    assert list(evaluations) in [["before", f"step-{step}", "after"] for step in (2, 3)]
    for label in ("before", "after"):
        assert [e.status for e in evaluations[label]] == ["finished"] * 4
        assert {e.task_id for e in evaluations[label]} == {f"held-{i}" for i in range(4)}
        assert all(e.group_id is None and e.score == 1.0 for e in evaluations[label])
    assert {(e.version_min, e.version_max) for e in evaluations["before"]} == {(0, 0)}
    assert {(e.version_min, e.version_max) for e in evaluations["after"]} == {(STEPS, STEPS)}
    training = served.store.episodes(split="train")
    assert min(e.created_at for e in training) >= max(e.ended_at for e in evaluations["before"])
    assert max(e.ended_at for e in training) <= min(e.created_at for e in evaluations["after"])
    greedy = served.store.load_episode(evaluations["before"][0].id).turns[0]
    drawn = served.store.load_episode(training[0].id).turns[0]
    assert (greedy.sampling.temperature, drawn.sampling.temperature) == (0.0, 1.0)


async def test_a_finished_run_has_nothing_left_to_do(served: Any) -> None:
    given = arguments(served, "good", evaluation=held_out(served), steps=1)
    async with served.trainer(groups=2, steps=1), asyncio.timeout(60):
        await run(**given)
    before = len(served.store.episodes())
    async with asyncio.timeout(60):
        await run(**given)
    assert len(served.store.episodes()) == before


async def test_the_last_step_that_an_earlier_process_published_does_not_end_a_resumed_run(
    served: Any,
) -> None:
    """The trainer died before it had saved its last step, and the engine still serves that version."""
    served.publish(1)
    given = arguments(served, "good", evaluation=held_out(served), steps=1, first_version=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await run(**given)
    assert not served.store.episodes()


async def test_no_episode_begins_on_weights_that_another_run_left_in_the_engine(served: Any) -> None:
    served.store.publish_version(0, step=0, path="not swapped in yet")
    body = {"new_version": "7", "abort_all_requests": False}
    httpx.post(f"{served.engine_url}/update_weight_version", json=body).raise_for_status()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await run(**arguments(served, "good", evaluation=held_out(served)))
    assert not served.store.episodes()


async def test_a_failed_episode_of_a_group_is_attempted_again(served: Any) -> None:
    data = train_tasks(served, folder=str(served.folder))
    (served.folder / "train").mkdir()
    async with served.trainer(groups=2, steps=2), asyncio.timeout(60):
        await run(**arguments(served, "fails_at_first", data=data, steps=2))
    again = 0
    for group in {e.group_id for e in served.store.episodes(status="failed")}:
        attempts = served.store.episodes(group_id=group)
        failed = next(e for e in attempts if e.status == "failed")
        statuses = [e.status for e in attempts if e.index == failed.index]
        again += statuses == ["failed", "finished"]
    assert again >= 4  # the trained groups at least; the end of the run cut off the others
    assert served.store.group_counts()["trained"] == 4
    assert served.store.group_counts()["dropped"] == 0


async def test_a_group_that_keeps_failing_is_dropped_and_the_run_continues(served: Any) -> None:
    rows = [{"id": "bad/task", "bad": True}, *({"id": f"t{i}", "n": 1} for i in range(6))]
    data = DataConfig(path=tasks_file(served.folder, "mixed", rows), epochs=1)
    served.publish(0)
    given_up = config(retries=1, on_failed="drop")
    given = arguments(served, "fails_on_bad_tasks", data=data, steps=3, rollout=given_up)
    running = asyncio.create_task(run(**given))
    async with asyncio.timeout(60):
        while not served.store.group_counts()["dropped"]:
            await asyncio.sleep(0.02)
        async with served.trainer(groups=2, steps=3):
            await running
    counts = served.store.group_counts()
    assert (counts["trained"], counts["dropped"]) == (6, 1)
    failed = served.store.episodes(group_id="bad/task@0", status="failed")
    assert len(failed) >= 2 and "this task never works" in failed[0].error
    assert nothing_is_left(served)


async def test_an_agent_that_always_fails_ends_the_run_with_its_error(served: Any) -> None:
    served.publish(0)
    given = arguments(served, "raises", rollout=config(give_up_after=6, give_up_s=0))
    with pytest.raises(AgentError, match="6 attempts in a row failed.*no such tool"):
        async with asyncio.timeout(60):
            await run(**given)
    assert nothing_is_left(served)


async def test_an_unreachable_proxy_ends_the_run(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROXY_TIMEOUT_S", 0.5)
    served.publish(0)
    given = arguments(served, "good", proxy_url="http://127.0.0.1:9")
    with pytest.raises(RequestError, match="cannot reach http://127.0.0.1:9"):
        async with asyncio.timeout(60):
            await run(**given)


class Wire:
    """Forwards TCP connections to the proxy, and can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = False

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_connections()

    def break_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, up_writer}
        await asyncio.gather(self._pipe(reader, up_writer), self._pipe(up_reader, writer))
        self._writers -= {writer, up_writer}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_lost_connection_does_not_end_the_run(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(int(served.url.rsplit(":", 1)[1]))
    async with asyncio.timeout(60), wire as url, served.trainer(groups=2, steps=STEPS):
        given = arguments(served, "good", rollout=config(retries=4), proxy_url=url)
        running = asyncio.create_task(run(**given))
        for seen in (3, 6, 9):
            while len(served.store.episodes(status="finished")) < seen:
                await asyncio.sleep(0.005)
            wire.cut = True
            wire.break_connections()
            await asyncio.sleep(0.3)
            wire.cut = False
        await running
    assert nothing_is_left(served)
    counts = served.store.group_counts()
    assert (counts["trained"], counts["dropped"]) == (STEPS * 2, 0)
    assert f"cannot reach {url}" in caplog.text


async def test_data_that_ends_too_early_is_an_error(served: Any) -> None:
    served.publish(0)
    data = DataConfig(path=train_tasks(served, n=5).path, epochs=1)
    with pytest.raises(DataError, match="5 tasks × 1 epochs are fewer than the 8 groups"):
        await run(**arguments(served, "good", data=data))
    rows = [{"id": f"t{i}", "n": 1, "bad": i < 2} for i in range(4)]
    data = DataConfig(path=tasks_file(served.folder, "bad", rows), epochs=1)
    with pytest.raises(
        DataError, match="the data ended: .* 2 dropped, and the 2 left are too few for a batch of 4"
    ):
        async with asyncio.timeout(60):
            await run(
                **arguments(
                    served, "fails_on_bad_tasks", data=data, steps=1, rollout=config(groups=4, retries=0)
                )
            )


async def test_stopping_ends_agents_and_aborts_their_episodes(served: Any) -> None:
    served.publish(0)
    stop = asyncio.Event()
    running = asyncio.create_task(run(**arguments(served, "hangs", stop=stop)))
    async with asyncio.timeout(60):
        while len(served.store.episodes(status="open")) < 6:
            await asyncio.sleep(0.05)
        stop.set()
        await running
    assert nothing_is_left(served)
    assert {e.status for e in served.store.episodes()} == {"aborted"}


async def test_a_group_that_is_dropped_from_outside_is_not_continued(served: Any) -> None:
    served.publish(0)
    stop = asyncio.Event()
    outside = config(groups=1, max_staleness=0, outside_rewards=True)
    given = arguments(served, "unrewarded", rollout=outside, stop=stop)
    running = asyncio.create_task(run(**given))
    async with asyncio.timeout(60), AsyncClient(served.url, ADMIN_KEY) as client:
        while not (finished := served.store.episodes(status="finished")):
            await asyncio.sleep(0.02)
        dropped = finished[0].group_id
        await client.drop_group(dropped, "by hand")
        while not [e for e in served.store.episodes() if e.group_id != dropped]:  # the gate has room again
            await asyncio.sleep(0.02)
        stop.set()
        await running
    assert served.store.group_counts()["dropped"] == 1 and nothing_is_left(served)


async def test_a_group_that_was_begun_before_a_change_of_the_agent_is_dropped(served: Any) -> None:
    served.publish(0)
    stop = asyncio.Event()
    outside = config(groups=1, max_staleness=0, outside_rewards=True)
    given = arguments(served, "unrewarded", rollout=outside, stop=stop, training_fingerprint="before")
    running = asyncio.create_task(run(**given))
    async with asyncio.timeout(60):
        while len(served.store.episodes(status="finished")) < 2:  # they have no reward yet
            await asyncio.sleep(0.02)
        stop.set()
        await running
    [begun] = served.store.open_groups()
    given = arguments(served, "good", rollout=config(groups=1), steps=1, training_fingerprint="since")
    async with served.trainer(groups=1, steps=1), asyncio.timeout(60):
        await run(**given)
    counts = served.store.group_counts()
    assert (counts["dropped"], counts["trained"]) == (1, 1)
    played = {(e.group_id == begun.id, e.metadata["fingerprint"]) for e in served.store.episodes()}
    assert played == {(True, "before"), (False, "since")}


@pytest.mark.parametrize("reward_timeout_s", [1.0])
async def test_rewards_from_outside_complete_a_group(served: Any) -> None:
    served.publish(0)
    stop = asyncio.Event()
    outside = config(groups=1, outside_rewards=True)
    running = asyncio.create_task(run(**arguments(served, "unrewarded", rollout=outside, stop=stop)))

    def judge() -> None:
        with Client(served.url, ADMIN_KEY) as client:
            for episode in client.list_episodes(status="finished"):
                if episode["group_id"] == first and episode["score"] is None:
                    with suppress(RequestError):  # it has failed meanwhile, and is attempted again
                        client.reward(episode["id"], 1.0)

    async with asyncio.timeout(60):
        while not (finished := served.store.episodes(status="finished")):
            await asyncio.sleep(0.02)
        first = finished[0].group_id
        while not served.store.group_counts()["complete"]:
            await asyncio.to_thread(judge)
            await asyncio.sleep(0.02)
        # The other episodes get no reward: the proxy fails them after 1 s, and they are attempted again.
        while not [e for e in served.store.episodes(status="failed") if e.error == "no_reward"]:
            await asyncio.sleep(0.05)
        group = served.store.episodes(status="failed")[0].group_id
        while len(served.store.episodes(group_id=group)) < 3:
            await asyncio.sleep(0.05)
        stop.set()
        await running


RUNNER = """
import asyncio, json, sys
sys.path.insert(0, {root!r})
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.store import Store
with Store.open({store!r}) as store:
    asyncio.run(run(store=store, proxy_url={url!r}, admin_key={key!r}, agent={agent!r},
        data=DataConfig.model_validate_json({data!r}), rollout=RolloutConfig.model_validate_json({rollout!r}),
        evaluation=None, steps={steps}))
"""


async def test_a_killed_runner_continues_where_it_was(served: Any) -> None:
    given = arguments(served, "good", rollout=config(group_size=3, concurrency=2))
    code = RUNNER.format(
        root=str(Path(__file__).parents[2]),
        store=str(served.folder / "store.db"),
        url=served.url,
        key=ADMIN_KEY,
        agent=given["agent"],
        data=given["data"].model_dump_json(),
        rollout=given["rollout"].model_dump_json(),
        steps=STEPS,
    )
    async with served.trainer(groups=2, steps=STEPS), asyncio.timeout(90):
        child = subprocess.Popen([sys.executable, "-c", code])
        try:
            while len(served.store.episodes(status="finished")) < 7:
                await asyncio.sleep(0.01)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        partial = [group for group in served.store.open_groups() if group.attempts]
        await run(**given)
    assert nothing_is_left(served)
    counts = served.store.group_counts()
    assert counts["trained"] == STEPS * 2 and counts["dropped"] == 0
    episodes = served.store.episodes(split="train")
    for group in partial:  # these groups were continued, not begun again
        scored = {e.id for tried in group.attempts.values() for e in tried if e.status == "finished"}
        assert scored <= {rollout.episode.id for rollout in served.store.load_groups([group.id])[0].rollouts}
    groups = [e.group_id for e in episodes if e.index == 0 and e.status == "finished"]
    assert len(groups) == len(set(groups))
    assert {task for task, _ in served.store.task_ids_started()} <= {f"train/{i}" for i in range(10)}
    assert [epoch for _, epoch in served.store.task_ids_started()] == sorted(
        epoch for _, epoch in served.store.task_ids_started()
    )


async def test_a_sync_agent_runs_in_worker_processes(served: Any) -> None:
    tasks = train_tasks(served, runner=os.getpid())  # the agent compares it with its parent process
    given = arguments(served, "sync_good", data=tasks, steps=1, rollout=config(workers=2, max_staleness=0))
    async with served.trainer(groups=2, steps=1), asyncio.timeout(60):
        await run(**given)
    assert served.store.group_counts()["trained"] == 2
    trained = [e for e in served.store.episodes(status="finished")]
    assert {e.score for e in trained} == {1.5}


async def test_a_single_evaluation_plays_every_held_out_task(served: Any) -> None:
    served.publish(0)
    given = arguments(served, "by_name", evaluation=held_out(served, n=3), label="extra")
    for name in ("data", "steps"):
        del given[name]
    async with asyncio.timeout(60):
        await evaluate(**given)
    episodes = served.store.episodes(split="eval", metadata={"eval": "extra"})
    assert [e.score for e in episodes] == [1.5] * 3
    assert served.store.group_counts("train")["pending"] == 0


async def test_an_evaluation_repeats_only_failed_episodes(served: Any) -> None:
    served.publish(0)
    rows = [{"id": "bad", "bad": True}, {"id": "good", "n": 1}]
    evaluation = EvalConfig(data=DataConfig(path=tasks_file(served.folder, "held", rows)))
    given = arguments(served, "fails_on_bad_tasks", evaluation=evaluation, label="extra")
    for name in ("data", "steps"):
        del given[name]
    given["rollout"] = config(retries=1)
    for attempts_at_bad in (2, 4):  # an evaluation that is started again continues
        async with asyncio.timeout(60):
            await evaluate(**given)
        episodes = served.store.episodes(split="eval", metadata={"eval": "extra"})
        assert sorted((e.task_id, e.status) for e in episodes) == [
            *[("bad", "failed")] * attempts_at_bad,
            ("good", "finished"),
        ]
