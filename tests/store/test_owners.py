"""Owners of open episodes: if several processes claim an episode, exactly one gets it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from store_support import make_turn, open_episode

from areal_agents.store import Conflict, NewEpisode, NotFound, OpenEpisode, Store


def test_a_claim_is_compare_and_set(url: str) -> None:
    with Store.open(url) as store:
        open_episode(store, "free")
        open_episode(store, "owned", owner="run.0.0")
        assert store.claim_episode("free", "run.0.0", "run.1.0").result() is False
        assert store.claim_episode("free", None, "run.1.0").result() is True
        assert store.claim_episode("free", None, "run.2.0").result() is False
        assert store.claim_episode("owned", "run.0.0", "run.0.1").result() is True
        assert store.open_episodes() == [
            OpenEpisode("free", False, "run.1.0"),
            OpenEpisode("owned", False, "run.0.1"),
        ]
        store.seal("owned", "finished").result()
        assert store.claim_episode("owned", "run.0.1", "run.1.0").result() is False
        assert store.episode_row("owned").owner == "run.0.1"


def test_one_of_many_claims_succeeds(url: str) -> None:
    with Store.open(url) as store:
        open_episode(store, "e")

    def claim(index: int) -> bool:
        with Store.open(url) as own:
            return own.claim_episode("e", None, f"run.{index}.0").result()

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(claim, range(8)))
    assert sum(won) == 1
    with Store.open(url) as store:
        assert store.episode_row("e").owner == f"run.{won.index(True)}.0"


def test_a_named_session_has_only_one_open_episode(url: str) -> None:
    def new(episode_id: str) -> NewEpisode:
        return NewEpisode(episode_id, episode_id, implicit_key="me/session-id:1", only_one=True)

    with Store.open(url) as store:
        store.open_episode(new("a")).result()
        with pytest.raises(Conflict, match="episode a is open"):
            store.open_episode(new("b")).result()
        found = store.open_implicit_episode("me/session-id:1")
        assert found is not None and found.id == "a"
        store.seal("a", "finished").result()
        assert store.open_implicit_episode("me/session-id:1") is None
        store.open_episode(new("b")).result()


def test_an_episode_is_found_by_its_key_without_its_turns(url: str) -> None:
    with Store.open(url) as store:
        open_episode(store, "e", owner="run.0.0")
        store.add_turn("e", make_turn("t")).result()
        assert store.episode_row_by_key("hash of e").owner == "run.0.0"
        assert [turn.id for turn in store.turns_of("e")] == ["t"]
        with pytest.raises(NotFound):
            store.episode_row_by_key("nobody's")
