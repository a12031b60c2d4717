"""The ledger of the chaos test detects a use of a group that is trained twice."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chaos_count_support import Ledger

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.store import NewEpisode, Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store in which g is trained in steps 1 and 2 and leased for step 3; the checkpoint is of step 2."""
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.publish_version(0, step=0, path="v0")
        store.open_episode(NewEpisode("e", "hash", None, "g", 1)).result()
        turn = Turn(
            id="t",
            parent=None,
            new_messages=(Message("user", "hello"),),
            new_prompt_ids=[1],
            completion=Completion([2], [-0.5], [0], "stop"),
            reply=Message("assistant", "hi"),
            sampling=SamplingParams(max_new_tokens=1),
        )
        store.add_turn("e", turn).result()
        store.seal("e", "finished", given=[Reward("episode", "", "return", 1.0)]).result()
        assert store.lease_group_ids(1, step=1) == ["g"]
        store.publish_version(1, step=1, path="v1")
        store.mark_trained(["g"], step=1, version=1)
        reused = store.lease_replays(1, step=2, min_version=0, max_uses=3)
        store.publish_version(2, step=2, path="v2")
        store.mark_trained(reused, step=2, version=2)
        store.commit_checkpoint(2)
        assert store.lease_replays(1, step=3, min_version=0, max_uses=3) == [("g", 2)]
    return path


def look(ledger: Ledger) -> set[str]:
    ledger._next_look = 0.0
    ledger.look()
    return ledger.trained_twice


def test_reuses_do_not_count_as_training_twice(path: Path) -> None:
    ledger = Ledger(path)
    assert look(ledger) == set() and ledger.settled == {("g", 0): 1, ("g", 1): 2}
    with Store.open(path) as store:
        store.return_leases(after_step=2)
        reused = store.lease_replays(1, step=3, min_version=0, max_uses=3)
        store.publish_version(3, step=3, path="v3")
        store.mark_trained(reused, step=3, version=3)
    assert look(ledger) == set()


@pytest.mark.parametrize(
    "fault",
    [
        "UPDATE leases SET step = 3 WHERE use = 1",  # trained again in a step after the checkpoint
        "UPDATE leases SET step = 1 WHERE use = 1",  # two uses in one step
        "UPDATE leases SET state = 'trained', use = 3 WHERE use = 2",  # a use is missing
    ],
)
def test_a_use_that_is_trained_twice_is_detected(path: Path, fault: str) -> None:
    ledger = Ledger(path)
    assert look(ledger) == set()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(fault).rowcount == 1
    assert look(ledger) == {"g"}
