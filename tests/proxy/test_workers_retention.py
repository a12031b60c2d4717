"""`store.retain` with several workers: only the first worker applies it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy_support import MODEL
from workers_support import wait_for, workers_of

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.store import NewEpisode, Store
from areal_agents.testing import ScriptedApp, running

KEPT, STEPS = 1, 3


@pytest.fixture
def engine_url() -> Iterator[str]:
    with running(ScriptedApp.from_folder(MODEL, lambda call: "never asked")) as url:
        yield url


def train(store: Store) -> None:
    """Train steps of one group each. The last version is kept, and the last checkpoint may be lost."""
    store.publish_version(0, step=0, path="v0")
    for step in range(1, STEPS + 1):
        group = f"g{step}@0"
        store.open_episode(NewEpisode(group, f"hash of {group}", Task(f"g{step}", {}), group, 1)).result()
        turn = Turn(
            id=f"turn of {group}",
            parent=None,
            new_messages=(Message("user", "hello"),),
            new_prompt_ids=[1, 2],
            completion=Completion([3], [-0.5], [step - 1], "stop"),
            reply=Message("assistant", "hello"),
            sampling=SamplingParams(max_new_tokens=1),
        )
        store.add_turn(group, turn).result()
        store.set_rewards(group, [Reward("episode", "", "return", 1.0)]).result()
        store.seal(group, "finished").result()
        assert store.lease_group_ids(1, step=step) == [group]
        store.publish_version(step, step=step, path=f"v{step}")
        store.mark_trained([group], step=step, version=step)
        store.commit_checkpoint(step)


def due(store: Store) -> list[str]:
    """Return the groups whose turns are to be deleted."""
    return [group for group, _ in store.expired_groups(keep_versions=KEPT, after_step=-1, limit=STEPS)]


def wait_for_a_sweep(store: Store, owner: str, name: str) -> None:
    """Wait until a worker has closed an idle episode that it owns."""
    store.open_episode(NewEpisode(name, f"hash of {name}", owner=owner)).result()
    wait_for(lambda: store.episode_row(name).status == "failed")


def test_only_the_first_worker_deletes_expired_turns(engine_url: str, tmp_path: Path) -> None:
    path, settings = tmp_path / "store.db", {"retain": {"versions": KEPT}, "idle_timeout_s": 0.1}
    with workers_of(engine_url, path, **settings) as (serving, pids), Store.open(path) as store:
        os.kill(pids[0], signal.SIGSTOP)
        train(store)
        for name in ("first", "second"):  # so the other worker has made at least one whole sweep
            wait_for_a_sweep(store, serving.lock(1).stem, name)
        assert due(store) == ["g1@0", "g2@0"]
        os.kill(pids[0], signal.SIGCONT)
        wait_for(lambda: due(store) == [])
        assert len(store.load_episode("g3@0").turns) == 1
