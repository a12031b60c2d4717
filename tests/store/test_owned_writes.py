"""A proxy can no longer write to an open episode that another proxy has taken over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.store import NewEpisode, OwnedElsewhere, Store

GIVEN = [Reward("episode", "", "score", 1.0)]


def turn(id: str) -> Turn:
    return Turn(
        id=id,
        parent=None,
        new_messages=(Message("user", "hello"),),
        new_prompt_ids=[1, 2],
        completion=Completion([3], [-0.5], [0], "stop"),
        reply=Message("assistant", "hi"),
        sampling=SamplingParams(max_new_tokens=1),
    )


def write_turn(store: Store, owner: str) -> Future[Any]:
    return store.add_turn("e", turn("late"), owner=owner)


def write_opening(store: Store, owner: str) -> Future[Any]:
    return store.add_turn("e", turn("late"), opening=NewEpisode("e", "hash", owner=owner), owner=owner)


def write_reward(store: Store, owner: str) -> Future[Any]:
    return store.set_rewards("e", GIVEN, owner=owner)


def write_end(store: Store, owner: str) -> Future[Any]:
    return store.seal("e", "finished", given=GIVEN, owner=owner)


WRITES = (write_turn, write_opening, write_reward, write_end)


@pytest.mark.parametrize("write", WRITES)
def test_an_owner_writes_until_its_episode_is_taken_over(
    url: str, write: Callable[[Store, str], Future[Any]]
) -> None:
    with Store.open(url) as cut_off, Store.open(url) as other:
        cut_off.open_episode(NewEpisode("e", "hash", owner="proxy.0.1")).result()
        cut_off.add_turn("e", turn("first"), owner="proxy.0.1").result()
        assert other.claim_episode("e", "proxy.0.1", "proxy.1.1").result()
        with pytest.raises(OwnedElsewhere, match="taken over"):
            write(cut_off, "proxy.0.1").result()
        cut_off.mark_limit("e", "max_turns", owner="proxy.0.1").result()
        cut_off.discard_turn("first", "the client disconnected", owner="proxy.0.1").result()
        recorded = other.load_episode("e")
        assert [(item.id, item.discarded) for item in recorded.turns] == [("first", "")]
        assert (recorded.rewards, other.episode_row("e").status) == ((), "open")
        assert other.episode_row("e").limit_reached is None
        other.mark_limit("e", "max_turns", owner="proxy.1.1").result()
        other.discard_turn("first", "the client disconnected", owner="proxy.1.1").result()
        write(other, "proxy.1.1").result()
        recorded = other.load_episode("e")
        assert recorded.turns[0].discarded == "the client disconnected"
        assert other.episode_row("e").limit_reached == "max_turns"
        assert len(recorded.turns) + len(recorded.rewards) == 2


def test_the_owner_of_an_ended_episode_does_not_matter(url: str) -> None:
    with Store.open(url) as store:
        store.open_episode(NewEpisode("e", "hash", owner="proxy.0.1")).result()
        store.add_turn("e", turn("first"), owner="proxy.0.1").result()
        assert write_end(store, "proxy.0.1").result() == write_end(store, "proxy.1.1").result()
        assert write_reward(store, "proxy.1.1").result().status == "finished"
