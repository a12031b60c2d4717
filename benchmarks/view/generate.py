"""Writes the folder of a large run. Rows are inserted directly, since the store would take minutes."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import yaml

from areal_agents.launch.run_folder import RunFolder
from areal_agents.quickstart import quickstart_model
from areal_agents.store import Store

GROUPS, GROUP_SIZE = 32, 16  # of a step
_TOKENS = 12  # prompt tokens and sampled tokens of a turn, each
_EPISODE_S = 0.05  # time from the beginning of an episode to the next one's


def make_run(folder: RunFolder, *, episodes: int, turns: int) -> None:
    """Write a run of `episodes` training episodes with `turns` turns each, none of which continues another.

    One episode in a hundred failed, and one in a thousand contains the string "needle".
    """
    (folder.root / "logs").mkdir(parents=True)
    (folder.root / "lock").touch()
    steps = episodes // (GROUPS * GROUP_SIZE)
    config = {"model": str(quickstart_model()), "trainer": {"steps": steps}, "rollout": {"max_staleness": 1}}
    folder.config.write_text(yaml.safe_dump(config))
    began = time.time() - episodes * _EPISODE_S
    with open(folder.metrics, "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(_metrics(step, began)) + "\n")
    with Store.open(folder.store):
        pass
    with sqlite3.connect(folder.store) as connection:
        _fill(connection, episodes, turns, steps, began)
    connection.close()


def _fill(connection: sqlite3.Connection, episodes: int, turns: int, steps: int, began: float) -> None:
    groups = -(-episodes // GROUP_SIZE)

    def insert(table: str, columns: str, rows: Iterator[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(columns.split(", ")))
        connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)

    tasks = ((f"uid{i}", f"task-{i}", json.dumps({"question": f"What is {i}?"})) for i in range(400))
    insert("tasks", "uid, id, input", tasks)
    insert(
        "groups",
        "id, task_uid, split, size, state, created_at, completed_at",
        (
            (f"g{i}", f"uid{i % 400}", "train", GROUP_SIZE, "complete", began, began + 1)
            for i in range(groups)
        ),
    )
    insert(
        "episodes",
        'id, key_hash, task_uid, group_id, "index", split, status, error, metadata, limits, sampling, '
        "created_at, ended_at",
        (_episode(i, began) for i in range(episodes)),
    )
    insert(
        "rewards",
        "episode_id, scope, target, name, value, created_at",
        ((f"e{i}", "episode", "", "return", (i % 7) / 6, began) for i in range(episodes)),
    )
    insert(
        "leases",
        'group_id, "use", state, step, holder, version',
        ((f"g{i}", 0, "trained", i // GROUPS + 1, "h", i // GROUPS + 1) for i in range(steps * GROUPS)),
    )
    insert(
        "versions",
        "version, step, path, published_at",
        ((v, v, f"weights/v{v}", began + v * 25) for v in range(steps + 1)),
    )
    insert(
        "turns",
        "id, episode_id, codec, created_at, sampled_tokens, version_min, version_max, finish_reason, record, "
        "prompt_ids, token_ids, logprobs, versions",
        _turns(episodes, turns, began),
    )


def _episode(i: int, began: float) -> tuple[Any, ...]:
    failed = i % 100 == 7
    opened = began + i * _EPISODE_S
    error = f"the tool answered {i}" if failed else None
    status = "failed" if failed else "finished"
    # fmt: off
    return (f"e{i}", f"k{i}", f"uid{i // GROUP_SIZE % 400}", f"g{i // GROUP_SIZE}", i % GROUP_SIZE, "train",
            status, error, "{}", "{}", "{}", opened, opened + 3)
    # fmt: on


def _turns(episodes: int, turns: int, began: float) -> Iterator[tuple[Any, ...]]:
    ids = np.arange(3, 3 + _TOKENS, dtype="<i4").tobytes()
    logprobs = np.linspace(0, -2, _TOKENS, dtype="<f4").tobytes()
    for i in range(episodes):
        version = i // (GROUPS * GROUP_SIZE)
        versions = np.full(_TOKENS, version, "<i4").tobytes()
        answer = "a needle" if i % 1000 == 500 else "an ordinary answer"
        record = orjson.dumps(
            {
                "messages": [{"role": "user", "content": f"Where is place {i}? Please look it up first."}],
                "reply": {
                    "role": "assistant",
                    "content": answer,
                    "tool_calls": [{"id": "c", "name": "search", "arguments": '{"query": "place"}'}],
                },
                "sampling": {"max_new_tokens": 64},
            }
        )
        at = began + i * _EPISODE_S
        for turn in range(turns):
            # fmt: off
            yield (f"t{i}-{turn}", f"e{i}", 1, at + turn / turns, _TOKENS, version, version, "stop", record,
                   ids, ids, logprobs, versions)
            # fmt: on


def _metrics(step: int, began: float) -> dict[str, Any]:
    """Return a row with as many numbers as a real one."""
    numbers = {f"metric_{i}": step / (i + 1) for i in range(90)}
    parts = {"step_s": 25.0, "wait_s": 5.0, "train_s": 18.0, "publish_s": 2.0, "pause_s": 0.1}
    time_s = began + step * 25
    return {"step": step, "version": step, "time": time_s, "reward_mean": step / 1000, **parts, **numbers}
