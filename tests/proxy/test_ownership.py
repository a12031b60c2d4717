"""Which workers are running, and which of them is responsible for an episode."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agents.core.messages import Message
from areal_agents.errors import ConfigError, RequestError
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.episodes.housekeeping import Housekeeping
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes, home_key
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.proxy.workers import identity
from areal_agents.proxy.workers.identity import (
    Workers,
    WorkerSpec,
    forget_dead,
    listen_after,
    supervising,
    wait_for_orphans,
)
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.proxy.workers.peers import home, homes, new_key
from areal_agents.sockets import listen
from areal_agents.store import NewEpisode, OpenEpisode, Store

HOLD = """
import sys
from pathlib import Path
from areal_agents.proxy.workers.identity import Workers, WorkerSpec
with Workers(WorkerSpec(Path(sys.argv[1]), "run", 1, 0, (1, 2), "s")).holding_lock():
    print("living", flush=True)
    sys.stdin.read()
"""


def worker(folder: Path, index: int, starts: int = 0, run: str = "run") -> Workers:
    return Workers(WorkerSpec(folder, run, index, starts, (1, 2, 3), "s"))


def owned_by(store: Store, workers: Workers) -> Ownership:
    """Return the ownership of a worker that has no episode in memory."""
    return Ownership(store, workers, Sessions(store, workers.owner).lose)


def test_the_lock_of_a_worker_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    first = worker(tmp_path, 0)
    assert not first.is_alive("run.1.0") and not first.is_up(1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"living\n"
    assert first.is_alive("run.1.0") and first.is_up(1)
    assert not first.is_alive("run.1.1") and not first.is_alive("other.1.0")
    process.kill()
    process.communicate(timeout=60)
    assert not first.is_alive("run.1.0") and not first.is_up(1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.1.0.lock"]
    with first.holding_lock():
        forget_dead(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["run.0.0.lock"]
    forget_dead(tmp_path)
    assert not tmp_path.exists()


def test_a_new_process_removes_the_lock_file_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "run.0.0.lock").touch()
    (tmp_path / "run.1.0.lock").touch()
    with worker(tmp_path, 0, starts=1).holding_lock():
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.0.1.lock", "run.1.0.lock"]


def test_the_home_of_an_episode_key_is_the_worker_that_created_it(tmp_path: Path) -> None:
    workers = [worker(tmp_path, index) for index in range(3)]
    for item in workers:
        keys = [new_key(item) for _ in range(20)]
        assert {home(key, 3) for key in keys} == {item.index}
        assert len(set(keys)) == 20


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running worker of "run" in `tmp_path` that has no supervisor."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"living\n"
        yield process
        process.kill()


def test_orphans_are_waited_for(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_orphans, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        orphan.kill()
        waiting.result(60)
    assert not tmp_path.exists()  # the folder was empty


def test_an_orphan_that_does_not_end_is_an_error(
    tmp_path: Path, orphan: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "ORPHANS_END_S", 0.1)
    with pytest.raises(ConfigError, match=r"1 workers .* still running after 0.1 s"):
        wait_for_orphans(tmp_path)


def test_workers_with_a_supervisor_are_not_orphans(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    with supervising(tmp_path, "run"):
        wait_for_orphans(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1.0.lock", "run.supervisor.lock"]


def test_a_port_is_waited_for_after_a_supervisor_was_killed(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as held, ThreadPoolExecutor(1) as pool:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"):
            listen_after("127.0.0.1", port, tmp_path)
        with supervising(tmp_path, "living"), pytest.raises(ConfigError, match="cannot listen"):
            listen_after("127.0.0.1", port, tmp_path)
        (tmp_path / "killed.supervisor.lock").touch()
        waiting = pool.submit(listen_after, "127.0.0.1", port, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        held.close()
        with waiting.result(60) as listener:
            assert listener.getsockname()[1] == port


def swept(ownership: Ownership) -> list[str | None]:
    """Return the owners whose episodes this worker sweeps."""
    owners = (None, "run.0.0", "run.1.0", "run.2.0")
    return [item.owner for item in ownership.swept(OpenEpisode("e", False, owner) for owner in owners)]


def test_the_first_running_worker_sweeps_episodes_without_a_running_owner(tmp_path: Path) -> None:
    workers = [worker(tmp_path / "locks", index) for index in range(3)]
    with Store.open(tmp_path / "s.db") as store:
        owned = [owned_by(store, item) for item in workers]
        with workers[1].holding_lock(), workers[2].holding_lock():
            assert [swept(item) for item in owned[1:]] == [[None, "run.0.0", "run.1.0"], ["run.2.0"]]
            with workers[0].holding_lock():
                assert [swept(item) for item in owned] == [[None, "run.0.0"], ["run.1.0"], ["run.2.0"]]


async def test_idle_episodes_are_closed_by_their_owner_or_by_the_first_worker(tmp_path: Path) -> None:
    first, second = worker(tmp_path, 0), worker(tmp_path, 1)
    config = ProxyConfig(idle_timeout_s=0.01)
    with Store.open(tmp_path / "s.db") as store, first.holding_lock(), second.holding_lock():
        for owner in (first.owner, second.owner, "run.2.0", None):
            store.open_episode(NewEpisode(f"of {owner}", f"{owner}", owner=owner)).result()

        async def sweep(workers: Workers) -> list[str]:
            sessions = Sessions(store, workers.owner)
            ownership = Ownership(store, workers, sessions.lose)
            implicit = ImplicitEpisodes(store, sessions, split="eval", ownership=ownership)
            housekeeping = Housekeeping(
                store=store, sessions=sessions, implicit=implicit, config=config, ownership=ownership
            )
            await housekeeping.sweep()  # sees the episodes for the first time
            await asyncio.sleep(0.02)
            await housekeeping.sweep()
            return [episode.id for episode in store.open_episodes()]

        assert await sweep(second) == ["of run.0.0", "of run.2.0", "of None"]
        assert await sweep(first) == []


async def test_an_episode_belongs_to_one_process_of_a_worker(tmp_path: Path) -> None:
    old, new, other = worker(tmp_path, 0), worker(tmp_path, 0, starts=1), worker(tmp_path, 1)
    stranger = worker(tmp_path, 0, run="another")
    with Store.open(tmp_path / "s.db") as store, other.holding_lock():
        store.open_episode(NewEpisode("e", "hash", owner=old.owner)).result()

        def find() -> object:
            return store.episode_row("e")

        with old.holding_lock():
            assert await owned_by(store, other).locate(find) == 0  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="started separately"):
                await owned_by(store, stranger).locate(find)  # type: ignore[arg-type]
        with new.holding_lock():
            assert await owned_by(store, other).locate(find) == 1  # type: ignore[arg-type]
            assert store.episode_row("e").owner == other.owner
            assert await owned_by(store, new).locate(find) == 1  # type: ignore[arg-type]
            assert not await owned_by(store, new).claim("e", old.owner)


async def test_an_episode_that_is_claimed_back_is_no_longer_in_memory(tmp_path: Path) -> None:
    """Another worker may have recorded turns in between."""
    first, other = worker(tmp_path, 0), worker(tmp_path, 1)
    with Store.open(tmp_path / "s.db") as store:
        sessions = Sessions(store, first.owner)
        ownership = Ownership(store, first, sessions.lose)
        await sessions.open(NewEpisode("e", "hash"))
        assert await ownership.claim("e", first.owner) and sessions.get("e") is not None
        assert store.claim_episode("e", first.owner, other.owner).result()
        assert await ownership.claim("e", other.owner) and sessions.get("e") is None


def test_keys_are_spread_evenly_over_the_workers() -> None:
    keys = [str(number).encode() for number in range(300)]
    orders = [homes(key, 3) for key in keys]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    counts = [sum(order[0] == index for order in orders) for index in range(3)]
    assert min(counts) > 70


def test_a_conversation_keeps_its_home() -> None:
    system, user = Message("system", "be brief"), Message("user", "hello")
    later = [system, user, Message("assistant", "hi"), Message("user", "and?")]
    assert home_key("me/root", [system, user]) == home_key("me/root", later)
    assert home_key("me/root", [system, user]) != home_key("you/root", [system, user])
    assert home_key("me/root", [system, user]) != home_key("me/root", [system, Message("user", "bye")])
    assert home_key("me/session-id:1", [user]) == home_key("me/session-id:1", later) == b"me/session-id:1"
