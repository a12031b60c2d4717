"""Races within a call that no HTTP client can time: calls are made without HTTP, with a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from polling import until
from scripted_sampler import ScriptedSampler

from areal_agents.algorithms.credit.trained import TrainedTurns
from areal_agents.core.messages import Message, tools_digest
from areal_agents.errors import EngineUnavailable, RequestError, StoreError
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.auth import key_hash
from areal_agents.proxy.calls.completer import Completer
from areal_agents.proxy.calls.request import ModelRequest, Retry, SamplingWish
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.episodes.sessions import Session, Sessions
from areal_agents.rendering import ChatRenderer
from areal_agents.store import NewEpisode, Store, episodes

ASKED = ModelRequest((Message("user", "Where?"),), (), tools_digest(()), SamplingWish())
LIMIT_S = 60.0  # for what takes far less, even on a busy machine


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
async def session(store: Store) -> Session:
    return await Sessions(store).open(NewEpisode("e", "hash"))


@pytest.fixture
def engine(renderer: ChatRenderer) -> ScriptedSampler:
    # A long reply is parsed in a thread, so that other tasks run meanwhile.
    return ScriptedSampler(renderer, script=lambda call: "word " * 2500)


@pytest.fixture
async def completer(
    store: Store, renderer: ChatRenderer, engine: ScriptedSampler
) -> AsyncIterator[Completer]:
    completer = Completer(store=store, engine=engine, renderer=renderer, config=ProxyConfig())
    yield completer
    completer.close()


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, happening: asyncio.Event) -> None:
    """Set `happening` when `owner.name` begins to run in a thread."""
    loop, original = asyncio.get_running_loop(), getattr(owner, name)

    def method(*arguments: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(happening.set)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, method)


def begin(completer: Completer, session: Session, *, count: int = 0, streamed: bool = False) -> SharedReply:
    """Start a call with one client."""
    call = completer.call(session, replace(ASKED, retry=Retry(count)), streamed=streamed)
    call.join()
    return call


async def hang_up(completer: Completer, session: Session, call: SharedReply) -> None:
    """Disconnect the client of a call, and wait until the call has ended."""
    if call.leave(served=False):
        completer.retries.discard(session, call)
    await asyncio.wait([call.task], timeout=LIMIT_S)
    assert call.task.done()


async def test_a_client_that_disconnects_while_its_reply_is_parsed_leaves_no_turn(
    completer: Completer,
    session: Session,
    store: Store,
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsing = asyncio.Event()
    during(monkeypatch, renderer, "parse", parsing)
    call = begin(completer, session)
    async with asyncio.timeout(LIMIT_S):
        await parsing.wait()
    await hang_up(completer, session, call)
    assert call.task.cancelled()
    assert store.load_episode("e").turns == () and len(session.forest) == 0 and session.pending_calls == 0


async def test_a_turn_recorded_after_its_client_disconnected_is_kept_for_a_retry_and_not_trained(
    completer: Completer, session: Session, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = asyncio.Event()
    during(monkeypatch, store, "add_turn", recording)
    call = begin(completer, session)
    async with asyncio.timeout(LIMIT_S):
        await recording.wait()
    await hang_up(completer, session, call)
    await until(lambda: bool(session.ledger.undelivered))
    await until(lambda: store.load_episode("e").turns[0].discarded != "")
    [turn] = store.load_episode("e").turns
    assert not TrainedTurns().includes(turn) and turn.id == call.turn_ids[0]
    # The same request again, not marked as a retry, gets the sample that no client received.
    again = begin(completer, session)
    [done] = await again.task
    assert done.turn.id == turn.id and again.is_repeated
    assert done.prompt_tokens == len(session.forest.prompt_ids(turn.id))
    await until(lambda: store.load_episode("e").turns[0].discarded == "")
    assert len(store.load_episode("e").turns) == 1


async def test_a_reply_that_its_client_did_not_wait_for_is_kept_for_a_retry(
    completer: Completer, session: Session, store: Store
) -> None:
    call = begin(completer, session)
    await call.task
    await hang_up(completer, session, call)
    assert session.ledger.undelivered == set(call.turn_ids)
    await until(lambda: bool(store.load_episode("e").turns[0].discarded))
    restored = Session(*store.episode_by_key("hash"))  # after a restart, the turn is still known
    assert restored.ledger.undelivered == set(call.turn_ids)


async def test_a_retry_joins_a_call_that_is_still_running(completer: Completer, session: Session) -> None:
    first = begin(completer, session, streamed=True)
    await asyncio.sleep(0)
    retry = begin(completer, session, count=1, streamed=True)
    assert retry is first
    assert not first.leave(served=False)
    [done] = await first.task  # the retry still waits for it
    assert done.turn.id == first.turn_ids[0]
    assert not first.leave(served=True)


async def test_a_retry_of_a_recorded_call_gets_the_same_sample(
    completer: Completer, session: Session
) -> None:
    [first] = await begin(completer, session).task
    [retried] = await begin(completer, session, count=1).task
    [another] = await begin(completer, session).task
    assert retried.turn.id == first.turn.id != another.turn.id
    fork = another.turn.forked_from
    assert fork is not None and (fork.turn, fork.reason) == (first.turn.id, "resampled")


async def test_an_idempotency_key_identifies_one_request(completer: Completer, session: Session) -> None:
    def ask(asked: ModelRequest) -> SharedReply:
        return completer.call(session, replace(asked, retry=Retry(0, "key")), streamed=False)

    first = ask(ASKED)
    assert ask(ASKED) is first
    [done] = await first.task
    [again] = await ask(ASKED).task
    assert again.turn.id == done.turn.id
    with pytest.raises(RequestError, match="another request") as caught:
        ask(replace(ASKED, messages=(Message("user", "Else?"),)))
    assert caught.value.status == 409


async def test_several_replies_to_one_request_are_siblings(
    completer: Completer, session: Session, store: Store
) -> None:
    call = completer.call(session, replace(ASKED, choices=3), streamed=False)
    done = await call.task
    assert [item.turn.id for item in done] == list(call.turn_ids)
    first, *others = store.load_episode("e").turns
    assert first.forked_from is None
    assert {turn.forked_from.turn for turn in others if turn.forked_from} == {first.id}
    assert len({turn.completion.logprobs.tobytes() for turn in (first, *others)}) == 3


async def test_the_retry_of_a_refused_call_is_a_sample_of_its_own(
    completer: Completer, session: Session, engine: ScriptedSampler
) -> None:
    """An equal call has its own sample already; the refused call has none yet."""
    [beside] = await begin(completer, session).task
    script, engine.script = engine.script, lambda call: EngineUnavailable("busy")
    refused = begin(completer, session)
    with pytest.raises(EngineUnavailable):
        await refused.task
    engine.script = script
    [retried] = await begin(completer, session, count=1).task
    assert retried.turn.id != beside.turn.id and not session.ledger.was_refused(ASKED)
    [again] = await begin(completer, session, count=2).task  # the response of the first retry was lost
    assert again.turn.id == retried.turn.id


async def test_a_retry_does_not_join_a_call_that_is_being_cancelled(
    completer: Completer, session: Session, engine: ScriptedSampler
) -> None:
    engine.delay_s = 30
    call = begin(completer, session)
    await until(lambda: bool(engine.calls))
    assert not call.leave(served=False)  # cancelled, but not ended yet
    engine.delay_s = 0
    retry = begin(completer, session, count=1)
    assert retry is not call
    [done] = await retry.task
    assert done.turn.id == retry.turn_ids[0] and call.task.cancelled()


async def test_siblings_are_recorded_together_or_not_at_all(
    completer: Completer, session: Session, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = episodes.insert_turn
    call = completer.call(session, replace(ASKED, choices=2), streamed=False)

    def insert_turn(connection: Any, row: dict[str, Any], *, owner: Any) -> None:
        if row["id"] == call.turn_ids[1]:
            raise StoreError("the disk is full")
        original(connection, row, owner=owner)

    monkeypatch.setattr(episodes, "insert_turn", insert_turn)
    with pytest.raises(StoreError, match="disk is full"):
        await call.task
    assert store.load_episode("e").turns == () and len(session.forest) == 0 and session.ledger.has_lost


async def test_a_session_that_is_sealed_while_it_is_loaded_is_not_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, loop = Sessions(store), asyncio.get_running_loop()
    await sessions.open(NewEpisode("e", key_hash("key")))
    sessions.forget_idle(-1)
    load = store.episode_by_key

    def slow_load(digest: str) -> Any:
        found = load(digest)  # still open
        asyncio.run_coroutine_threadsafe(sessions.seal("e", "finished"), loop).result(LIMIT_S)
        return found

    monkeypatch.setattr(store, "episode_by_key", slow_load)
    with pytest.raises(RequestError) as caught:
        await sessions.by_key("key")
    assert caught.value.code == "episode_sealed" and sessions.get("e") is None


async def test_a_queued_call_ends_with_its_episode(
    store: Store, renderer: ChatRenderer, session: Session
) -> None:
    engine = ScriptedSampler(renderer, delay_s=30)
    completer = Completer(store=store, engine=engine, renderer=renderer, config=ProxyConfig(max_concurrent=1))
    other = await Sessions(store).open(NewEpisode("other", "other"))
    running = begin(completer, other)
    await until(lambda: bool(engine.calls))
    waiting = begin(completer, session)
    await until(lambda: completer.waiting == 1)
    session.end("finished")
    with pytest.raises(RequestError) as caught:
        await waiting.task
    assert caught.value.code == "episode_sealed" and completer.waiting == 0
    await hang_up(completer, other, running)
    completer.close()


async def test_a_call_waits_in_the_queue_for_a_limited_time(
    store: Store, renderer: ChatRenderer, session: Session
) -> None:
    engine = ScriptedSampler(renderer, delay_s=30)
    config = ProxyConfig(max_concurrent=1, generate_timeout_s=0.05)
    completer = Completer(store=store, engine=engine, renderer=renderer, config=config)
    admission = completer._admission
    async with admission.slot():
        with pytest.raises(RequestError) as caught:
            await begin(completer, session).task
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    completer.close()


async def test_the_main_session_is_known_after_a_restart(
    completer: Completer, session: Session, store: Store
) -> None:
    await completer.call(session, replace(ASKED, session="main"), streamed=False).task
    await completer.call(session, replace(ASKED, session="sub", label="sub-agent/sub"), streamed=False).task
    assert Session(*store.episode_by_key("hash")).main_session == "main"
