"""Reuses of trained groups: which are leased, that each is trained once, and that none counts elsewhere."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_queries import in_flight_episodes
from store_support import make_turn, open_episode, reward

from areal_agents.core.completion import Completion
from areal_agents.errors import StoreError
from areal_agents.store import Conflict, RetainConfig, Retention, Store, UntrainedGroup
from areal_agents.store.schema import groups, leases

KEPT_VERSIONS = 2


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        opened.publish_version(0, step=0, path="v0")
        yield opened


def complete(store: Store, name: str, versions: Sequence[int] = (0,)) -> None:
    """A complete group of one episode, with one turn for each of the versions."""
    open_episode(store, f"{name}/0", name, 1)
    for index, version in enumerate(versions):
        turn = dataclasses.replace(
            make_turn(f"{name}/{index}"), completion=Completion([8], [-0.5], [version], "stop")
        )
        store.add_turn(f"{name}/0", turn).result()
    store.seal(f"{name}/0", "finished", given=reward(1.0)).result()


def train(store: Store, step: int, *, replays: Sequence[tuple[str, int]] = (), groups: int = 1) -> list[str]:
    """Train the oldest complete groups, and the replays, in one step."""
    ids = store.lease_group_ids(groups, step=step)
    store.publish_version(step, step=step, path=f"v{step}")
    store.mark_trained([*ids, *replays], step=step, version=step)
    return ids


def rows(store: Store) -> list[tuple[Any, ...]]:
    """Return (group, use, state, step, version) of every lease."""
    query = sa.select(leases.c["group_id", "use", "state", "step", "version"])
    with store._database.read() as connection:
        return [tuple(row) for row in connection.execute(query.order_by(leases.c.group_id, leases.c.use))]


def replays(store: Store, step: int, *, count: int = 9, uses: int = 2, oldest: int = 0) -> list[Any]:
    return store.lease_replays(count, step=step, min_version=oldest, max_uses=uses)


def test_trained_groups_are_leased_again_newest_first(store: Store) -> None:
    for name in ("a@0", "b@0", "c@0", "d@0"):
        complete(store, name)
    assert replays(store, 1) == []  # nothing is trained
    train(store, 1, groups=2)
    train(store, 2)
    store.lease_group_ids(1, step=3)
    assert replays(store, 3, count=2) == [("c@0", 1), ("b@0", 1)]
    assert replays(store, 3) == [("a@0", 1)]  # groups that are leased for this step are not leased again
    assert replays(store, 3) == []
    assert rows(store) == [
        ("a@0", 0, "trained", 1, 1),
        ("a@0", 1, "leased", 3, None),
        ("b@0", 0, "trained", 1, 1),
        ("b@0", 1, "leased", 3, None),
        ("c@0", 0, "trained", 2, 2),
        ("c@0", 1, "leased", 3, None),
        ("d@0", 0, "leased", 3, None),
    ]
    store.mark_trained(["d@0", ("c@0", 1), ("b@0", 1)], step=3, version=3)
    assert replays(store, 4) == [("d@0", 1)]  # b and c have had both uses; a is still leased
    assert replays(store, 4, uses=3) == [("c@0", 2), ("b@0", 2)]


def test_a_group_is_not_reused_in_a_step_that_trained_it(store: Store) -> None:
    complete(store, "a@0")
    train(store, 5)
    assert replays(store, 5) == replays(store, 4) == []
    assert replays(store, 6) == [("a@0", 1)]


def test_max_uses_includes_the_first_use(store: Store) -> None:
    complete(store, "a@0")
    train(store, 1)
    assert replays(store, 2, uses=1) == []
    for step in (2, 3):
        found = replays(store, step, uses=3)
        assert found == [("a@0", step - 1)]
        store.mark_trained(found, step=step, version=step)
    assert replays(store, 4, uses=3) == []


def test_no_token_of_a_reuse_is_older_than_the_bound(store: Store) -> None:
    """The versions of the tokens decide, not the version in the row of the group."""
    for version in range(1, 7):
        store.publish_version(version, step=version, path="v")
    complete(store, "old@0", [2, 5])
    complete(store, "new@0", [4, 3])
    complete(store, "empty@0", [])  # has nothing to train
    said = sa.case((groups.c.id == "old@0", 6), (groups.c.id == "new@0", 0))
    store._database.submit(lambda c: c.execute(sa.update(groups).values(version=said)).rowcount).result()
    train(store, 7, groups=3)
    assert replays(store, 8, oldest=6) == replays(store, 8, oldest=4) == []
    assert replays(store, 8, oldest=3) == [("new@0", 1)]
    assert replays(store, 8, oldest=2) == [("old@0", 1)]


def test_a_reuse_counts_nowhere_else(store: Store) -> None:
    for name in ("a@0", "b@0", "c@0"):
        complete(store, name)
    train(store, 1, groups=2)

    def seen() -> tuple[Any, ...]:
        return (
            in_flight_episodes(store),
            store.group_counts(),
            store.untrained_groups(),
            store.waiting_groups(),
            store.recorded_groups(),
            store.unrewarded_episodes(),
        )

    before = seen()
    assert before[0] == 1 and before[2] == [UntrainedGroup("c@0", False)]
    assert replays(store, 2) == [("b@0", 1), ("a@0", 1)]
    assert seen() == before
    store.mark_trained([("a@0", 1)], step=2, version=2)
    store.drop_group("b@0", "a broken reward", step=2, use=1)
    assert seen() == before
    with pytest.raises(Conflict, match="is trained"):
        store.set_rewards("a@0/0", reward(2.0)).result()
    with pytest.raises(Conflict, match="is trained"):
        store.drop_open_group("a@0", "x").result()
    with pytest.raises(Conflict, match="is trained"):
        store.drop_group("a@0", "x", step=2)
    assert store.lease_group_ids(1, step=3) == ["c@0"]


def test_only_uses_that_are_leased_for_the_step_are_marked(store: Store) -> None:
    complete(store, "a@0")
    train(store, 1)
    assert replays(store, 2) == [("a@0", 1)]
    for wrong in (["a@0"], [("a@0", 0)], [("a@0", 2)], [("a@0", 1), ("none@0", 1)]):
        with pytest.raises(Conflict, match="are leased for step"):
            store.mark_trained(wrong, step=2, version=2)  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="are leased for step"):
        store.mark_trained([("a@0", 1)], step=3, version=3)
    store.mark_trained([("a@0", 1), ("a@0", 1)], step=2, version=2)
    with pytest.raises(Conflict, match="are leased for step"):
        store.mark_trained([("a@0", 1)], step=2, version=2)


def test_a_group_whose_reuse_is_dropped_is_not_reused_again(store: Store) -> None:
    complete(store, "a@0")
    train(store, 1)
    for use, said in ((1, "not leased"), (0, "trained")):
        with pytest.raises(Conflict, match=said):
            store.drop_group("a@0", "x", step=2, use=use)
    assert replays(store, 2) == [("a@0", 1)]
    store.drop_group("a@0", "misaligned", step=2, use=1)
    assert replays(store, 3, uses=9) == []
    with pytest.raises(Conflict, match="is dropped"):
        store.drop_group("a@0", "x", step=2, use=1)
    store.return_leases(after_step=1)  # the step that dropped it is lost
    assert replays(store, 2, uses=9) == [("a@0", 1)]


def test_groups_that_were_dropped_or_are_held_out_are_not_reused(store: Store) -> None:
    complete(store, "dropped@0")
    complete(store, "trained@0")
    open_episode(store, "held/0", "held@0", 1, split="eval")
    store.seal("held/0", "finished", given=reward(1.0)).result()
    store.drop_group("dropped@0", "stale", step=1)
    train(store, 1)
    assert replays(store, 2) == [("trained@0", 1)]


@pytest.mark.parametrize(("count", "uses"), [(0, 2), (-1, 2), (1, 0)])
def test_invalid_numbers_are_refused(store: Store, count: int, uses: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        store.lease_replays(count, step=1, min_version=0, max_uses=uses)


def test_a_resume_returns_the_reuses_of_later_steps(store: Store) -> None:
    for name in ("a@0", "b@0", "c@0"):
        complete(store, name)
    train(store, 1)
    for step in (2, 3):
        found = replays(store, step, uses=9, count=1)
        train(store, step, replays=found)
    assert replays(store, 4, uses=9) == [("c@0", 1), ("b@0", 2), ("a@0", 2)]
    assert store.return_leases(after_step=2) == 1  # c is complete again; reuses do not count
    assert rows(store) == [
        ("a@0", 0, "trained", 1, 1),
        ("a@0", 1, "trained", 2, 2),
        ("b@0", 0, "trained", 2, 2),
    ]
    assert store.group_counts()["complete"] == 1 and in_flight_episodes(store) == 1
    assert replays(store, 3, uses=9) == [("b@0", 1), ("a@0", 2)]  # the same use numbers again


def test_a_reuse_that_a_dead_trainer_leased_is_void(url: str) -> None:
    with Store.open(url) as store:
        store.publish_version(0, step=0, path="v0")
        complete(store, "a@0")
        train(store, 1)
        assert replays(store, 2) == [("a@0", 1)]
    with Store.open(url) as store:
        with pytest.raises(Conflict, match="leased for step"):
            # A trainer can mark only what it has leased itself.
            store.mark_trained([("a@0", 1)], step=3, version=2)
        assert replays(store, 3) == [("a@0", 1)]
        assert rows(store)[1] == ("a@0", 1, "leased", 3, None)


def test_the_turns_of_a_group_that_is_leased_again_are_kept(store: Store) -> None:
    keeper = Retention(store, RetainConfig(versions=1))
    for name in ("a@0", "b@0", "c@0", "d@0", "e@0"):
        complete(store, name)
    for step in range(1, 5):
        train(store, step)
        store.commit_checkpoint(step)
    assert ("a@0", 1) in replays(store, 5)
    store.drop_group("b@0", "x", step=5, use=1)
    for id in ("c@0", "d@0"):
        store.mark_trained([(id, 1)], step=5, version=5)
    train(store, 5)
    for step in range(6, 9):
        complete(store, f"g{step}@0")
        train(store, step)
        store.commit_checkpoint(step)
    while keeper.run_once():
        pass
    assert emptied(store) == {"b@0", "c@0", "d@0", "e@0", "g6@0", "g7@0"}
    assert len(store.load_groups(["a@0"])[0].rollouts[0].episode.turns) == 1
    # A resume returns the lease of a, whose turns now expire although later steps were examined before.
    store.return_leases(after_step=8)
    store.publish_version(9, step=8, path="v9")
    assert keeper.run_once() == 1 and emptied(store) >= {"a@0"}
    assert replays(store, 9, uses=9) == [("g8@0", 1)]


def emptied(store: Store) -> set[str]:
    """Return the groups whose turns were deleted."""
    out = set()
    for summary in store.episodes():
        try:
            store.load_episode(summary.id)
        except StoreError as error:
            assert "were deleted (store.retain)" in str(error)
            out.add(str(summary.group_id))
    return out


@dataclass
class Use:
    """What the model knows of a lease row."""

    state: str
    step: int


@dataclass
class Group:
    """What the model knows of a group."""

    name: str
    versions: tuple[int, ...]
    uses: list[Use] = field(default_factory=list)
    is_emptied: bool = False

    @property
    def state(self) -> str:
        return self.uses[0].state if self.uses else "complete"


class Leases(RuleBasedStateMachine):
    """Trainers that run, die and resume on one store, compared with a model of it in plain Python."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.proxy = Store.open(Path(self.folder.name) / "s.db")
        self.keeper = Retention(self.proxy, RetainConfig(versions=KEPT_VERSIONS))
        self.trainer = Store.open(self.proxy.url)
        self.groups: list[Group] = []
        self.versions: list[tuple[int, int]] = []  # (version, step)
        self.step = 0
        self.checkpoints = [0]
        self.trained: dict[tuple[str, int], int] = {}  # of the history that survives
        self.leased: list[tuple[str, int]] = []  # of the step in progress
        self.publish(0)
        self.trainer.commit_checkpoint(0)

    def teardown(self) -> None:
        if hasattr(self, "trainer"):
            self.trainer.close()
            self.proxy.close()
            self.folder.cleanup()

    def publish(self, step: int) -> int:
        version = self.versions[-1][0] + 1 if self.versions else 0
        self.trainer.publish_version(version, step=step, path="v")
        self.versions.append((version, step))
        return version

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    @rule(data=st.data(), count=st.integers(1, 3))
    def rollout(self, data: st.DataObject, count: int) -> None:
        known = [version for version, _ in self.versions[-4:]]
        for _ in range(count):
            versions = tuple(data.draw(st.lists(st.sampled_from(known), max_size=2)))
            group = Group(f"g{len(self.groups)}@0", versions)
            complete(self.proxy, group.name, versions)
            self.groups.append(group)

    @rule(count=st.integers(1, 2))
    def lease(self, count: int) -> None:
        waiting = [group for group in self.groups if not group.uses]
        expected = [group.name for group in waiting[:count]] if len(waiting) >= count else []
        assert self.trainer.lease_group_ids(count, step=self.step + 1) == expected
        for name in expected:
            self.group(name).uses.append(Use("leased", self.step + 1))
            self.leased.append((name, 0))

    @rule(count=st.integers(1, 4), uses=st.integers(1, 4), staleness=st.integers(0, 3))
    def lease_again(self, count: int, uses: int, staleness: int) -> None:
        step = self.step + 1
        oldest = self.versions[-1][0]  # every version from it on is of one of the last `staleness` steps
        for version, of_step in reversed(self.versions):
            if of_step < self.step - staleness:
                break
            oldest = version
        expected = [
            (group.name, len(group.uses))
            for group in reversed(self.groups)
            if group.uses
            and group.uses[-1].state == "trained"
            and group.uses[-1].step < step
            and len(group.uses) < uses
            and group.versions
            and min(group.versions) >= oldest
            and not group.is_emptied
        ][:count]
        found = self.trainer.lease_replays(count, step=step, min_version=oldest, max_uses=uses)
        assert found == expected
        for name, _ in found:
            self.group(name).uses.append(Use("leased", step))
        self.leased += found

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name, use = data.draw(st.sampled_from(self.leased))
        self.trainer.drop_group(name, "refused", step=self.step + 1, use=use)
        self.group(name).uses[use].state = "dropped"
        self.leased.remove((name, use))

    @rule(saves=st.booleans())
    def finish_step(self, saves: bool) -> None:
        step = self.step + 1
        version = self.publish(step)
        self.trainer.mark_trained(self.leased, step=step, version=version)
        for name, use in self.leased:
            assert (name, use) not in self.trained
            self.trained[name, use] = step
            self.group(name).uses[use].state = "trained"
        self.leased, self.step = [], step
        if saves:
            self.trainer.commit_checkpoint(step)
            self.checkpoints.append(step)

    @rule(publishes=st.booleans(), newest_is_lost=st.booleans())
    def die(self, publishes: bool, newest_is_lost: bool) -> None:
        """The trainer dies at any moment of a step, also between publishing a version and marking groups."""
        if publishes:
            self.publish(self.step + 1)
        if newest_is_lost and len(self.checkpoints) > 1:
            self.checkpoints.pop()
        self.trainer.close()
        self.trainer = Store.open(self.proxy.url)
        self.trainer.become_trainer()
        self.step, self.leased = self.checkpoints[-1], []
        back = 0
        for group in self.groups:
            kept = [use for use in group.uses if use.state != "leased" and use.step <= self.step]
            assert group.uses[: len(kept)] == kept
            is_lost = bool(group.uses) and not kept
            if is_lost and group.is_emptied:  # more than one checkpoint was removed
                kept = [Use("dropped", self.step)]
            back += is_lost and not kept
            group.uses = kept
        self.trained = {pair: step for pair, step in self.trained.items() if step <= self.step}
        assert self.trainer.return_leases(self.step) == back
        self.publish(self.step)

    @rule()
    def give_up(self) -> None:
        while self.keeper.run_once():
            pass
        kept = min(step for _, step in self.versions[-KEPT_VERSIONS:])
        safe = self.checkpoints[-2] if len(self.checkpoints) > 1 else -1
        for group in self.groups:
            last = group.uses[-1] if group.uses else Use("complete", self.step + 1)
            if last.state in ("trained", "dropped") and last.step < kept and last.step <= safe:
                group.is_emptied = group.is_emptied or bool(group.versions)
        assert emptied(self.proxy) == {group.name for group in self.groups if group.is_emptied}

    @invariant()
    def sees_what_the_model_has(self) -> None:
        if not hasattr(self, "trainer"):
            return
        states = [group.state for group in self.groups]
        counts = self.proxy.group_counts()
        assert counts == {name: states.count(name) for name in counts}
        waits = [group.name for group in self.groups if group.state in ("complete", "leased")]
        assert in_flight_episodes(self.proxy) == len(waits)
        assert [group.id for group in self.proxy.untrained_groups()] == waits
        assert [group.id for group in self.proxy.waiting_groups()] == [
            group.name for group in self.groups if group.state == "complete"
        ]
        found = {(name, use): (state, step) for name, use, state, step, _ in rows(self.proxy)}
        assert found == {
            (group.name, number): (use.state, use.step)
            for group in self.groups
            for number, use in enumerate(group.uses)
        }
        done = {pair: step for pair, (state, step) in found.items() if state == "trained"}
        assert done == self.trained
        for group in self.groups:  # as the schema requires: without gaps, in increasing steps
            steps = [use.step for use in group.uses]
            assert steps == sorted(set(steps))
            assert all(use.state == "trained" for use in group.uses[:-1])


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_leases_against_a_model = Leases.TestCase
