"""How a proxy of a run on several machines determines which other proxies are running."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from areal_agents.errors import ConfigError
from areal_agents.proxy.workers import places
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.proxy.workers.places import Places, ProxyPlace, owner_name, refuse_beside_places
from areal_agents.store import NewEpisode, Store
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.schema import roles


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is read only when a test requests it, and each time anew."""
    monkeypatch.setattr(places, "_SOONEST_S", 0.0)
    monkeypatch.setattr(places, "_READ_S", 60.0)


def claim(store: Store, index: int) -> int:
    """Claim a place for a new process, and return its epoch."""
    earlier = next((row.epoch for row in store.role_rows("proxy") if row.index == index), None)
    epoch = store.claim_role("proxy", index, host="h", pid=1, gone=earlier).epoch
    assert store.beat_role("proxy", index, epoch, url=f"http://h:{index}")
    return epoch


def make_old(store: Store, index: int) -> None:
    engine = sa.create_engine(store.url)
    with engine.begin() as connection:
        old = roles.c.beat_at - DEAD_AFTER_S - 1
        connection.execute(sa.update(roles).where(roles.c.index == index).values(beat_at=old))
    engine.dispose()


async def test_a_process_is_alive_until_it_leaves_is_replaced_or_is_silent(store: Store) -> None:
    first, second = claim(store, 0), claim(store, 1)
    own, other = Places(store, ProxyPlace(0, first, 3, "s")), owner_name(1, second)
    with own.watching():
        assert own.is_alive(own.owner) and own.is_alive(other)
        assert (own.address(1), own.address(2), own.measured()) == ("http://h:1", None, [0, 1])
        for stranger in ("proxy.2.1", "proxy.1.2", "proxy.1", "proxy.x.1", "rollout.1.1", "a1b2.1.0", ""):
            assert not own.is_alive(stranger)
        make_old(store, 1)
        await own.refresh()
        assert not own.is_alive(other) and own.address(1) is own.owner_of(1) is None
        assert own.measured() == [0]
        third = claim(store, 1)
        await own.refresh()
        assert own.is_alive(owner_name(1, third)) and not own.is_alive(other)
        assert (own.address(1), own.owner_of(1)) == ("http://h:1", owner_name(1, third)), (
            "at the same address"
        )
        store.leave_role("proxy", 1, third)
        await own.refresh()
        assert not own.is_alive(owner_name(1, third)) and own.address(1) is None
        assert [own.index_of(name) for name in (other, "proxy.7.1", "a1b2.1.0", None)] == [1, 7, None, None]


async def test_an_episode_of_a_proxy_that_has_just_started_is_not_taken_over(store: Store) -> None:
    own = Places(store, ProxyPlace(0, claim(store, 0), 2, "s"))
    lost: list[str] = []
    ownership = Ownership(store, own, lost.append)
    with own.watching():
        for name in ("first", "restarted"):
            other = owner_name(1, claim(store, 1))
            store.open_episode(NewEpisode(name, f"hash of {name}", None, None, None)).result()
            assert store.claim_episode(name, None, other).result()
            assert not own.is_alive(other), "the table was last read before that proxy started"
            assert not await ownership.claim(name, other)
            assert await ownership.locate(partial(store.episode_row, name)) == 1
        assert await ownership.claim("first", owner_name(1, 1)), "that process was replaced"
        assert lost == ["first"]


async def test_no_proxy_counts_as_dead_directly_after_a_time_without_the_database(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim(store, 0), claim(store, 1)
    own, other = Places(store, ProxyPlace(0, first, 2, "s")), owner_name(1, second)
    with own.watching():
        make_old(store, 1)
        monkeypatch.setattr(places, "DEAD_AFTER_S", 0.0)  # any time between two readings is a gap
        monkeypatch.setattr(places, "_SETTLE_S", 60.0)
        await own.refresh()  # the first reading after a gap
        assert own.is_alive(other)
        monkeypatch.setattr(places, "_SETTLE_S", 0.0)
        assert not own.is_alive(other)


def test_a_single_proxy_does_not_serve_a_store_that_proxies_of_a_run_use(store: Store) -> None:
    refuse_beside_places(store)
    epoch = claim(store, 1)
    with pytest.raises(ConfigError, match="proxy 1 of a run uses this store at http://h:1"):
        refuse_beside_places(store)
    store.leave_role("proxy", 1, epoch)
    refuse_beside_places(store)
