"""Errors do not end the sweeps. What the sweeps do is tested over HTTP in test_episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from polling import until

from areal_agents.core.rollout import OPENED_BY_RUNNER, Task
from areal_agents.errors import StoreError
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.episodes.housekeeping import Housekeeping
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.store import EpisodeState, NewEpisode, SealedStatus, Store


class FailingSessions(Sessions):
    """Sessions whose `last_used` raises each of `failures` once."""

    failures: list[Exception]

    def last_used(self) -> dict[str, float]:
        if self.failures:
            raise self.failures.pop(0)
        return super().last_used()


async def test_sweeps_continue_after_errors_and_log_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ProxyConfig(idle_timeout_s=0.02)
    with Store.open(tmp_path / "store.db") as store:
        sessions = FailingSessions(store)
        sessions.failures = [KeyError("a bug"), StoreError("the disk is full")]
        implicit = ImplicitEpisodes(store, sessions, split="eval")
        session = await sessions.open(NewEpisode("e", "hash"))
        housekeeping = Housekeeping(store=store, sessions=sessions, implicit=implicit, config=config)
        sweeping = asyncio.create_task(housekeeping.run())
        await until(lambda: session.status != "open" or sweeping.done())
        assert session.status == "failed"  # as idle, by a later sweep
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
    bug, lost = (record for record in caplog.records if record.name.endswith("housekeeping"))
    assert bug.levelname == "ERROR" and bug.exc_info is not None and "a bug" in str(bug.exc_info[1])
    assert lost.levelname == "WARNING" and "the disk is full" in lost.getMessage()


class OneBadSessions(Sessions):
    """Sessions that raise an error whenever the episode "bad" is sealed."""

    async def seal(self, episode_id: str, status: SealedStatus, **how: Any) -> EpisodeState:
        if episode_id == "bad":
            raise KeyError("a bug")
        return await super().seal(episode_id, status, **how)


async def test_one_bad_episode_stops_no_sweep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The sweep continues with the other episodes and its other parts, and the log names the bad episode."""
    config = ProxyConfig(idle_timeout_s=0.02, implicit_idle_s=0.02, reward_timeout_s=0.02)
    with Store.open(tmp_path / "store.db") as store:
        sessions = OneBadSessions(store)
        implicit = ImplicitEpisodes(store, sessions, split="eval")
        housekeeping = Housekeeping(store=store, sessions=sessions, implicit=implicit, config=config)
        opened = [
            await sessions.open(NewEpisode(name, f"hash of {name}", implicit_key=key))
            for name, key in (("first", None), ("bad", "caller/root"), ("last", "caller/root"))
        ]
        await sessions.open(NewEpisode("unrewarded", "hash", Task("t", {}), "group", 1))
        store.seal("unrewarded", "finished").result()
        await housekeeping.sweep()  # the timeout of the unrewarded episode begins
        await asyncio.sleep(0.03)
        for _ in range(2):
            await housekeeping.sweep()
        assert [session.status for session in opened] == ["failed", "open", "failed"]
        assert store.episode_row("unrewarded").status == "failed"
    bugs = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(bugs) >= 2 and all("episode bad" in bug.getMessage() and bug.exc_info for bug in bugs)


async def test_the_time_for_a_reward_starts_when_the_group_has_ended(tmp_path: Path) -> None:
    """A function that rewards whole groups must wait for the slowest episode."""
    config = ProxyConfig(reward_timeout_s=0.05)
    with Store.open(tmp_path / "store.db") as store:
        sessions = Sessions(store)
        implicit = ImplicitEpisodes(store, sessions, split="eval")
        housekeeping = Housekeeping(store=store, sessions=sessions, implicit=implicit, config=config)
        for name in ("quick", "slow"):
            await sessions.open(NewEpisode(name, f"hash of {name}", Task("t", {}), "group", 2))
        store.seal("quick", "finished").result()
        for _ in range(2):
            await housekeeping.sweep()
            await asyncio.sleep(0.06)
        store.seal("slow", "finished").result()
        await housekeeping.sweep()  # the first sweep that finds them
        assert store.unrewarded_episodes() == ["quick", "slow"]
        await asyncio.sleep(0.06)
        await housekeeping.sweep()
        assert store.unrewarded_episodes() == []


async def test_an_abandoned_group_is_dropped(tmp_path: Path) -> None:
    """The gate counts incomplete groups, so an abandoned group would stop a run for ever."""
    config = ProxyConfig(idle_timeout_s=0.05)
    with Store.open(tmp_path / "store.db") as store:
        sessions = Sessions(store)
        implicit = ImplicitEpisodes(store, sessions, split="eval")
        housekeeping = Housekeeping(store=store, sessions=sessions, implicit=implicit, config=config)

        async def begin(name: str, *, metadata: Mapping[str, str] | None = None, fails: bool = True) -> None:
            task = Task(name, {})
            new = NewEpisode(name, f"hash of {name}", task, name, 2, metadata=dict(metadata or {}))
            await sessions.open(new)
            if fails:
                await sessions.seal(name, "failed", error="its client has died")

        await begin("left")
        await begin("of our runner", metadata=OPENED_BY_RUNNER)
        await housekeeping.sweep()
        assert store.group_counts()["dropped"] == 0  # other episodes may still be opened
        await asyncio.sleep(0.06)
        await begin("open", fails=False)
        await housekeeping.sweep()
        assert store.group_counts()["dropped"] == 1
        assert [group.id for group in store.waiting_groups()] == ["of our runner", "open"]
