"""The moments of a call that no client can time: driven without HTTP, over the real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from proxy_support import ScriptedEngine

from areal_agents.core.messages import Message, tools_digest
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.completer import Completer
from areal_agents.proxy.errors import ClientGone
from areal_agents.proxy.request import ModelRequest, SamplingWish
from areal_agents.proxy.sessions import Session, Sessions
from areal_agents.rendering import ChatRenderer
from areal_agents.store import NewEpisode, Store

ASKED = ModelRequest((Message("user", "Where?"),), (), tools_digest(()), SamplingWish())


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
async def session(store: Store) -> Session:
    return await Sessions(store).open(NewEpisode("e", "hash"))


@pytest.fixture
async def completer(store: Store, renderer: ChatRenderer) -> AsyncIterator[Completer]:
    # A long reply is parsed in a thread: the event loop sees what happens meanwhile.
    engine = ScriptedEngine(renderer, script=lambda call: "word " * 300)
    completer = Completer(store=store, engine=engine, renderer=renderer, config=ProxyConfig())
    yield completer
    completer.close()


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, happening: asyncio.Event) -> None:
    """Let `happening` come while `owner.name` is running in a thread."""
    loop, original = asyncio.get_running_loop(), getattr(owner, name)

    def method(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(happening.set)
        return original(*arguments)

    monkeypatch.setattr(owner, name, method)


async def test_a_client_that_hangs_up_while_its_reply_is_parsed_leaves_no_turn(
    completer: Completer,
    session: Session,
    store: Store,
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = asyncio.Event()
    during(monkeypatch, renderer, "parse", gone)
    with pytest.raises(ClientGone):
        await completer.complete(session, ASKED, gone.wait)
    assert gone.is_set()
    assert store.load_episode("e").turns == () and len(session.forest) == 0 and session.pending_calls == 0


async def test_a_client_that_hangs_up_while_its_turn_is_recorded_changes_nothing(
    completer: Completer, session: Session, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = asyncio.Event()
    during(monkeypatch, store, "add_turn", gone)
    done = await completer.complete(session, ASKED, gone.wait)
    assert gone.is_set()
    assert [turn.id for turn in store.load_episode("e").turns] == [done.turn.id]
