"""A canary has one candidate version at a time, which is judged by the conversations after its swap."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from areal_agents.core.rollout import Reward
from areal_agents.store import Conflict, ServedVersions, Store, canary
from tests.store.store_support import make_turn, open_episode, reward


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


def numbers(served: ServedVersions | None) -> tuple[int, int | None]:
    assert served is not None
    return served.stable.version, served.candidate.version if served.candidate is not None else None


def converse(store: Store, name: str, score: float | None, *, version: int = 0) -> None:
    open_episode(store, name, name, 1, implicit_key=f"project/{name}")
    store.add_turn(name, make_turn(f"{name}/a", version=version)).result()
    if score is not None:
        store.set_rewards(name, reward(score)).result()
    store.seal(name, "finished").result()


def test_a_promoted_candidate_is_served_by_all_replicas(store: Store) -> None:
    assert store.served_versions() is None
    with pytest.raises(Conflict, match="no version is served yet"):
        store.publish_candidate(3, step=3, path="v3", share=0.4)
    store.publish_version(0, step=0, path="v0")
    store.publish_candidate(2, step=2, path="v2", share=0.4)
    assert numbers(store.served_versions()) == (0, 2)
    with pytest.raises(Conflict, match="version 2 is one"):
        store.publish_candidate(3, step=3, path="v3", share=0.4)
    store.promote_candidate(2, {"least": 0.1})
    assert numbers(store.served_versions()) == (2, None)
    with pytest.raises(Conflict, match="not a candidate"):
        store.promote_candidate(2, {})
    row = store.published_versions()[-1]
    assert row.canary == "promoted"
    assert row.verdict is not None and row.verdict["least"] == 0.1


def test_a_rollback_publishes_the_old_weights_under_a_new_number(store: Store) -> None:
    store.publish_version(0, step=0, path="v0")
    store.publish_candidate(2, step=2, path="v2", share=0.4)
    store.roll_back_candidate(2, {"most": -0.1}, restored=3, step=3, path="v3")
    assert numbers(store.served_versions()) == (3, None)
    assert [row.canary for row in store.published_versions()] == [None, "rolled_back", None]
    with pytest.raises(Conflict, match="not a candidate"):
        store.roll_back_candidate(2, {}, restored=4, step=4, path="v4")
    assert store.max_version() == 3, "the number of a refused rollback is not used"


def test_only_conversations_after_the_swap_are_compared(store: Store) -> None:
    store.publish_version(0, step=0, path="v0")
    converse(store, "before", 1.0)
    store.publish_candidate(1, step=1, path="v1", share=0.4)
    store.begin_comparison(1)
    converse(store, "first", 0.0)
    store.begin_comparison(1)  # by a resumed trainer: the comparison continues
    converse(store, "second", 1.0, version=1)
    converse(store, "without reward", None)
    open_episode(store, "running", "running", 1, implicit_key="project/running")
    complete = [("first", 0.0, 0), ("second", 1.0, 1)]
    served = store.served_versions()
    assert served is not None and served.candidate is not None
    after = served.candidate.canary_after
    assert after == 1
    found = store.scored_conversations(after=after, settle_s=0)
    # Rewards that arrive after the end of an episode and its time to settle do not count.
    assert [(c.id, c.score, c.version_min) for c in found] == complete
    store.set_rewards("without reward", [Reward("turn", "without reward/a", "late", 1.0)]).result()
    assert len(store.scored_conversations(after=after, settle_s=0)) == 2
    assert not store.scored_conversations(after=after, settle_s=60.0), "none has had time to settle"


def test_groups_of_the_canary_are_as_old_as_the_stable_version(store: Store) -> None:
    for step in range(2):
        store.publish_version(step, step=step, path=f"v{step}")
    for step in (2, 5, 8):  # two of them are rolled back
        store.publish_candidate(step, step=step, path=f"v{step}", share=0.4)
        if step < 8:
            store.roll_back_candidate(step, {}, restored=step + 1, step=step + 1, path="old")
    open_episode(store, "late", "late@0", 1)
    assert store.waiting_groups()[0].version <= 3, "version 6 may not be swapped in yet"


def test_an_order_applies_to_one_candidate_only(store: Store) -> None:
    assert not store.is_frozen()
    store.freeze(True)
    assert store.is_frozen()
    store.freeze(False)
    assert not store.is_frozen()
    with pytest.raises(Conflict, match="not a candidate"):
        store.give_order(1, "promote")
    store.publish_version(0, step=0, path="v0")
    store.publish_candidate(1, step=1, path="v1", share=0.4)
    store.give_order(1, "promote")
    store.give_order(1, "roll_back")
    assert store.order_for(1) == "roll_back"
    store.roll_back_candidate(1, {}, restored=2, step=2, path="v2")
    store.publish_candidate(3, step=3, path="v3", share=0.4)
    assert store.order_for(3) is None


def test_a_late_reward_within_the_time_to_settle_counts(store: Store) -> None:
    store.publish_version(0, step=0, path="v0")
    converse(store, "talk", None)
    store.set_rewards("talk", reward(1.0)).result()
    assert not store.scored_conversations(after=0, settle_s=0)
    with store._database.read() as connection:  # two hours later
        later = canary.scored_conversations(connection, after=0, settle_s=3600, now=time.time() + 7200)
    assert [c.id for c in later] == ["talk"]
