"""`Turn.recorded_before`: how many turns of the episode were recorded when a turn's call began."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents_support import AGENTS
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import check_invariant, joined_replies, until
from scripted_sampler import ScriptedSampler

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.core.messages import Message, tools_digest
from areal_agents.proxy import ProxyConfig
from areal_agents.proxy.calls.completer import Completer
from areal_agents.proxy.calls.request import ModelRequest, SamplingWish
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.rendering import ChatRenderer
from areal_agents.store import NewEpisode, Store


@dataclass
class GatedEngine(ScriptedSampler):
    """Holds each generation until its gate is set. `gates` are in the order in which generations began."""

    gates: list[threading.Event] = field(default_factory=list)

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: Callable[[TokenChunk], None] | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        gate = threading.Event()
        self.gates.append(gate)
        async with asyncio.timeout(60):
            while not gate.is_set():
                await asyncio.sleep(0.002)
        return await super().generate(
            rid, input_ids, sampling, on_tokens, affinity=affinity, stream_interval=stream_interval
        )


@contextmanager
def gated(path: Path, renderer: ChatRenderer, **config: Any) -> Iterator[tuple[RunningProxy, Conductor]]:
    engine = GatedEngine(renderer, script=lambda call: tool_call(query=f"sample {len(engine.calls)}"))
    with running_proxy(path, engine, **config) as proxy, ThreadPoolExecutor(8) as threads:
        yield proxy, Conductor(engine, threads)


@dataclass
class Conductor:
    """Begins calls in threads, and ends them in the order that a test wants."""

    engine: GatedEngine
    threads: ThreadPoolExecutor

    def begin(self, ask: Callable[[], Any], choices: int = 1) -> tuple[Future[Any], list[threading.Event]]:
        """Send a request, and return when the engine has begun to generate for it."""
        before = len(self.engine.gates)
        future = self.threads.submit(ask)
        until(lambda: len(self.engine.gates) == before + choices)
        return future, self.engine.gates[before:]

    @staticmethod
    def end(begun: tuple[Future[Any], list[threading.Event]]) -> Any:
        """Let the engine answer a request, and return the result."""
        future, gates = begun
        for gate in gates:
            gate.set()
        return future.result(60)


_KINDS = [(dialect, streamed, "turn") for dialect in sorted(AGENTS) for streamed in (False, True)]


@pytest.mark.parametrize(("dialect", "streamed", "durability"), [*_KINDS, ("chat", False, "batched")])
def test_overlapping_calls_count_the_turns_recorded_before_they_began(
    renderer: ChatRenderer, tmp_path: Path, dialect: str, streamed: bool, durability: str
) -> None:
    """Of two calls in flight, the later one is recorded first; a third one begins between the two."""
    with gated(tmp_path / "s.db", renderer, durability=durability) as (proxy, conductor):
        episode = proxy.open_episode()

        def agent(question: str) -> Any:
            return AGENTS[dialect](proxy, episode, question)

        def ask(who: Any, **options: Any) -> Callable[[], Any]:
            return lambda: who.ask(streamed=streamed, **options)

        planner, first, second, late = (agent(text) for text in ("Plan.", "First?", "Second?", "Late?"))
        [plan] = conductor.end(conductor.begin(ask(planner)))
        a = conductor.begin(ask(first))
        b = conductor.begin(ask(second))
        [after_b] = conductor.end(b)  # recorded before `a`, which began earlier
        second.take(after_b)
        second.results(after_b, "result")
        c = conductor.begin(ask(second))  # continues b's turn, and `a` is not recorded yet
        [after_a] = conductor.end(a)
        d = conductor.begin(ask(late, n=2) if late.many else ask(late), 2 if late.many else 1)
        late_replies = conductor.end(d)
        [after_c] = conductor.end(c)
        planner.take(plan)
        planner.results(plan, "result")
        [last] = conductor.end(conductor.begin(ask(planner)))

        store, choices = proxy.store, len(late_replies)
        until(lambda: len(store.turns_of(episode["id"])) == 5 + choices)
        turns = store.load_episode(episode["id"]).turns
        expected = [plan, after_b, after_a, *late_replies, after_c, last]
        for turn, reply in zip(turns, expected, strict=True):
            assert reply.turn_id in (turn.id, "")  # the ids of further choices are not on the wire
        assert [turn.recorded_before for turn in turns] == [0, 1, 1, *[3] * choices, 2, 4 + choices]
        if dialect != "completions":  # its prompts lack the token that ended a reply, so none continues one
            assert turns[3 + choices].parent == after_b.turn_id and turns[-1].parent == plan.turn_id
        shown = proxy.tokens(episode)["turns"]
        assert [turn["recorded_before"] for turn in shown] == [turn.recorded_before for turn in turns]
        assert [turn["id"] for turn in shown] == [turn.id for turn in turns]
        plain = proxy.http.get(f"/episodes/{episode['id']}").json()["turns"]
        assert "recorded_before" not in plain[0]
        check_invariant(store, episode["id"], proxy.engine.calls)
        for one in (planner, first, second, late):
            one.close()


def test_retries_add_no_turn_and_a_restart_continues_counting(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(url: str, key: str, text: str, **headers: str) -> str:
        answer = httpx.post(
            f"{url}/e/{key}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": text}], "tools": [SEARCH]},
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    replies = joined_replies(monkeypatch)
    path = tmp_path / "s.db"
    with gated(path, renderer) as (proxy, conductor):
        episode = proxy.open_episode()
        key = episode["key"]
        slow = conductor.begin(lambda: chat(proxy.url, key, "slow", idempotency_key="k"))
        quick = conductor.end(conductor.begin(lambda: chat(proxy.url, key, "quick")))
        # This retry joins the call that began before `quick` was recorded; later ones find recorded turns.
        joined = conductor.threads.submit(chat, proxy.url, key, "slow", idempotency_key="k")
        until(lambda: len(replies) == 3)
        assert replies[2] is replies[0]
        slow_id = conductor.end(slow)
        assert joined.result(60) == slow_id
        assert chat(proxy.url, key, "slow", idempotency_key="k") == slow_id
        assert chat(proxy.url, key, "quick", x_stainless_retry_count="1") == quick
        turns = proxy.store.turns_of(episode["id"])
        assert [(turn.id, turn.recorded_before) for turn in turns] == [(quick, 0), (slow_id, 0)]
    with gated(path, renderer) as (proxy, conductor):
        third = conductor.end(conductor.begin(lambda: chat(proxy.url, key, "third")))
        turns = proxy.store.turns_of(episode["id"])
        assert [(turn.id, turn.recorded_before) for turn in turns] == [(quick, 0), (slow_id, 0), (third, 2)]


def test_a_turn_that_is_recorded_while_a_request_is_prepared_counts(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns are counted when the prompt is determined, which may be after the request has arrived."""

    async def scenario(store: Store) -> None:
        session = await Sessions(store).open(NewEpisode("e", "hash"))
        completer = Completer(
            store=store, engine=ScriptedSampler(renderer), renderer=renderer, config=ProxyConfig()
        )
        asked = ModelRequest((Message("user", "Where?"),), (), tools_digest(()), SamplingWish())
        recorded = asyncio.Event()
        model_info = completer.model_info

        async def held() -> Any:
            await recorded.wait()
            return await model_info()

        [first] = await completer.call(session, asked, streamed=False).task
        monkeypatch.setattr(completer, "model_info", held)
        more = (*asked.messages, first.turn.reply, Message("user", "And then?"))
        follow = ModelRequest(more, (), tools_digest(()), SamplingWish())
        waiting = completer.call(session, follow, streamed=False)
        await asyncio.sleep(0)
        monkeypatch.undo()
        other = ModelRequest((Message("user", "Other"),), (), tools_digest(()), SamplingWish())
        await completer.call(session, other, streamed=False).task
        recorded.set()
        [done] = await waiting.task
        assert done.turn.recorded_before == 2
        assert [turn.recorded_before for turn in store.turns_of("e")] == [0, 1, 2]
        completer.close()

    with Store.open(tmp_path / "s.db") as store:
        asyncio.run(scenario(store))


def test_turns_are_in_memory_in_the_order_of_the_store(renderer: ChatRenderer, tmp_path: Path) -> None:
    """This holds even if one commit has several turns, and the clients of some of them have hung up."""

    async def scenario(store: Store) -> None:
        session = await Sessions(store).open(NewEpisode("e", "hash"))
        engine = ScriptedSampler(renderer)
        completer = Completer(store=store, engine=engine, renderer=renderer, config=ProxyConfig())
        writer_runs, go_on = threading.Event(), threading.Event()

        def hold(connection: Any) -> None:
            writer_runs.set()
            assert go_on.wait(30)

        held = store._database.submit(hold)
        await asyncio.to_thread(writer_runs.wait, 30)
        calls = []
        for index in range(4):
            asked = ModelRequest((Message("user", f"{index}"),), (), tools_digest(()), SamplingWish())
            call = completer.call(session, asked, streamed=False)
            call.join()
            calls.append(call)
            async with asyncio.timeout(30):
                while session.pending_writes <= index:
                    await asyncio.sleep(0.002)
        for call in (calls[1], calls[3]):
            assert not call.leave(served=False)  # cancels the call
        await asyncio.wait([calls[1].task, calls[3].task], timeout=30)
        go_on.set()
        await asyncio.wrap_future(held)
        async with asyncio.timeout(30):
            while len(session.forest) < 4:
                await asyncio.sleep(0.002)
        order = [call.turn_ids[0] for call in calls]
        assert [turn.id for turn in session.forest.turns] == order
        assert session.pending_writes == 0
        await asyncio.wait([call.task for call in calls], timeout=30)
        async with asyncio.timeout(30):  # a separate callback marks a turn after it is recorded
            while len(session.ledger.undelivered) < 2:
                await asyncio.sleep(0.002)
        assert session.ledger.undelivered == {order[1], order[3]}
        turns = store.turns_of("e")
        assert [turn.id for turn in turns] == order
        assert [turn.recorded_before for turn in turns] == [0, 0, 0, 0]
        completer.close()

    with Store.open(tmp_path / "s.db") as store:
        asyncio.run(scenario(store))


def test_a_session_whose_turn_is_being_written_stays_in_memory(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    """If it were read from the store again, it would lack that turn and count one too few from then on."""

    async def scenario(store: Store) -> None:
        sessions = Sessions(store)
        session = await sessions.open(NewEpisode("e", "hash"))
        session.pending_writes = 1
        sessions.forget_idle(-1)
        assert sessions.get("e") is session
        session.pending_writes = 0
        sessions.forget_idle(-1)
        assert sessions.get("e") is None

    with Store.open(tmp_path / "s.db") as store:
        asyncio.run(scenario(store))
