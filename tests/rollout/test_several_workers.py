"""Several rollout processes of one run, with a real proxy, store and agents; one is killed or paused.

`test_schedules.py` tests the same with random orders of events.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal_agents.core.rollout import RUNNER
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.rollout.data import load_tasks
from areal_agents.rollout.runner import run
from areal_agents.rollout.worker_share import WorkerShare

AGENT = f"{Path(__file__).parent / 'rollout_agents.py'}:good"
STEPS, GROUPS = 3, 2
BOUND = 2 * GROUPS  # (η + 1) · groups
HELD_OUT = 9
SETTINGS = RolloutConfig(groups=GROUPS, group_size=3, concurrency=6, max_staleness=1)

# Records the count of the gate at each insertion of a group, in the same transaction.
OBSERVER = """
CREATE TABLE observed (untrained INTEGER NOT NULL);
CREATE TRIGGER observe AFTER INSERT ON groups BEGIN INSERT INTO observed SELECT count(*) FROM groups
WHERE split = 'train' AND state IN ('pending', 'complete') AND id NOT IN
(SELECT group_id FROM leases WHERE "use" = 0 AND state != 'leased'); END;
"""

CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import Store
with Store.open({store!r}) as store:
    asyncio.run(run(store=store, proxy_url={url!r}, admin_key="admin-key-of-the-tests", agent={agent!r},
        data=DataConfig.model_validate_json({data!r}), rollout=RolloutConfig.model_validate_json({rollout!r}),
        evaluation=EvalConfig.model_validate_json({evaluation!r}), steps={steps},
        worker=WorkerShare(1, 2, "rollout-1", lambda runner: True)))
"""


def arguments(served: Any, **changes: Any) -> dict[str, Any]:
    paths = {}
    for name, count in (("train", 12), ("held", HELD_OUT)):
        paths[name] = served.folder / f"{name}.jsonl"
        paths[name].write_text("\n".join(json.dumps({"id": f"{name}-{n}"}) for n in range(count)))
    return {
        "store": served.store,
        "proxy_url": served.url,
        "admin_key": "admin-key-of-the-tests",
        "agent": AGENT,
        "data": DataConfig(path=str(paths["train"]), seed=3),
        "rollout": SETTINGS,
        "evaluation": EvalConfig(data=DataConfig(path=str(paths["held"])), episodes=HELD_OUT, concurrency=3),
        "steps": STEPS,
        **changes,
    }


def observe(served: Any) -> None:
    with closing(sqlite3.connect(served.store.path)) as connection:
        connection.executescript(OBSERVER)


def check(served: Any, data: DataConfig) -> None:
    """Check that a run has ended with nothing lost, played twice, beyond the bound, or left open."""
    store = served.store
    with closing(sqlite3.connect(store.path)) as connection:
        observed = [count for (count,) in connection.execute("SELECT untrained FROM observed")]
    assert max(observed) <= BOUND
    counts = store.group_counts()
    assert counts["trained"] == STEPS * GROUPS and counts["dropped"] == 0
    begun = store.task_ids_started()
    one_process = [(task.id, epoch) for task, epoch in islice(load_tasks(data).stream(), len(begun))]
    assert begun == one_process and len(observed) == len(begun)
    assert not store.episodes(status="open")
    scored = Counter(
        (e.group_id, e.index) for e in store.episodes(split="train") if e.status in ("finished", "truncated")
    )
    assert set(scored.values()) == {1}
    evaluations = Counter(
        (e.metadata["eval"], e.task_id) for e in store.episodes(split="eval") if e.status == "finished"
    )
    once = {(label, f"held-{n}"): 1 for label in ("before", "after") for n in range(HELD_OUT)}
    assert once.items() <= evaluations.items() and set(evaluations.values()) == {1}
    before = [e for e in store.episodes(split="eval", status="finished") if e.metadata["eval"] == "before"]
    training = store.episodes(split="train")
    assert min(e.created_at for e in training) >= max(e.ended_at for e in before)


def runners_of(served: Any, split: str) -> Counter[str]:
    return Counter(e.metadata[RUNNER] for e in served.store.episodes(split=split, status="finished"))


async def test_three_processes_share_a_run(scripted: Any) -> None:
    observe(scripted)
    given = arguments(scripted)
    evaluation = given["evaluation"].model_copy(update={"every": 1})

    def may_train(step: int) -> bool:  # the last step waits for an evaluation beside training
        labels = {episode.metadata["eval"] for episode in scripted.store.episodes(split="eval")}
        return step < STEPS or any(label.startswith("step-") for label in labels)

    async with (
        scripted.trainer(groups=GROUPS, steps=STEPS, may_train=may_train),
        asyncio.timeout(120),
        asyncio.TaskGroup() as processes,
    ):
        for index in range(3):
            worker = WorkerShare(index, 3, f"rollout-{index}", lambda runner: True)
            processes.create_task(run(**{**given, "evaluation": evaluation}, worker=worker))
    check(scripted, given["data"])
    assert set(runners_of(scripted, "train")) == {"rollout-0", "rollout-1", "rollout-2"}
    of_eval = runners_of(scripted, "eval")
    assert set(of_eval) == {"rollout-0", "rollout-1", "rollout-2"}
    assert min(of_eval.values()) >= HELD_OUT // 3


@pytest.mark.parametrize("split", ["eval", "train"])
@pytest.mark.parametrize("comes_back", [False, True])
async def test_the_episodes_that_a_process_leaves_are_taken_over(
    scripted: Any, split: str, comes_back: bool
) -> None:
    """The process is killed, or only considered dead while it is stopped."""
    observe(scripted)
    given = arguments(scripted)
    code = CHILD.format(
        root=str(Path(__file__).parents[2]),
        store=str(scripted.store.path),
        url=scripted.url,
        agent=AGENT,
        steps=STEPS,
        **{name: given[name].model_dump_json() for name in ("data", "rollout", "evaluation")},
    )
    seen_alive = {"rollout-0", "rollout-1"}
    worker = WorkerShare(0, 2, "rollout-0", seen_alive.__contains__)

    def left() -> list[str]:
        """Return the open episodes of the child."""
        is_at = scripted.store.episodes(split=split, status="open", metadata={RUNNER: "rollout-1"})
        return [episode.id for episode in is_at]

    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        async with scripted.trainer(groups=GROUPS, steps=STEPS), asyncio.timeout(120):
            if split == "train":  # both begin together: the child starts slowly, and the run is short
                while not scripted.store.episodes(split="eval", metadata={RUNNER: "rollout-1"}):
                    assert child.poll() is None
                    await asyncio.sleep(0.005)
                first = asyncio.create_task(run(**given, worker=worker))
            while True:
                while not left():
                    assert child.poll() is None
                    await asyncio.sleep(0.005)
                os.kill(child.pid, signal.SIGSTOP)
                if abandoned := left():  # the proxy may have handled a request of the child meanwhile
                    break
                os.kill(child.pid, signal.SIGCONT)
            if split == "eval":
                first = asyncio.create_task(run(**given, worker=worker))
            if not comes_back:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
            seen_alive.discard("rollout-1")
            while any(scripted.store.episode_row(id).status == "open" for id in abandoned):
                await asyncio.sleep(0.02)
            if comes_back:
                seen_alive.add("rollout-1")
                os.kill(child.pid, signal.SIGCONT)
            await first
            if comes_back:
                assert await asyncio.to_thread(child.wait) == 0
    finally:
        child.kill()
        child.wait()
    check(scripted, given["data"])
    assert {scripted.store.episode_row(id).status for id in abandoned} <= {"aborted", "finished"}
