"""Measures the proxy's cost per call, compared with a minimal recording proxy and LiteLLM's proxy.

Every server runs in its own process; its CPU time and memory are read from outside. The proxy is started as
users start it, with `areal-agents serve`, an admin key, a store on disk and the real Qwen vocabulary. The
model is a stub with prepared replies. Timed calls arrive at a fixed rate that loads the proxy with less than
half a core; each continues a turn that was played before and adds one new message.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import itertools
import json as jsonlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from areal_agents.errors import EngineError
from areal_agents.launch.signals import interruptible
from areal_agents.rendering import Tokenizer
from benchmarks.proxy.agents import ADMIN_KEY, BARE_KEY, Agents, Length
from benchmarks.proxy.load import Call, Connection, Conversation, Tally, all_at_once, at_rate
from benchmarks.proxy.processes import Server
from benchmarks.proxy.qwen_vocabulary import qwen_folder
from benchmarks.proxy.servers import litellm_server, passthrough, proxy_server, stub_engine
from benchmarks.proxy.texts import Texts

LOAD = 0.4  # load of a server while it is timed, in cores
MANY_ENGINE_S, MANY_TOOL_S = 2.0, 3.0  # time of the engine and of the tool in one turn of the memory scenario
MANY_OUTPUT, STREAMED_OUTPUT = 100, 64


LENGTHS = {
    "4k": Length(output=300, warm_turns=4, warm_result=250, timed_turns=4),
    "32k": Length(output=1000, warm_turns=10, warm_result=1900, timed_turns=6),
}


@dataclass(frozen=True)
class Counts:
    """How much each measurement runs."""

    waves: int  # waves of episodes at each length
    episodes: int  # episodes per wave
    litellm_waves: int
    long_episodes: int  # episodes that are played to turn 64
    memory_episodes: int
    memory_turns: int
    streamed: int
    pause: float = 1.0  # factor of the engine's and the tool's time in the memory scenario


FULL = Counts(
    waves=5,
    episodes=100,
    litellm_waves=2,
    long_episodes=150,
    memory_episodes=500,
    memory_turns=20,
    streamed=400,
)
QUICK = Counts(
    waves=2, episodes=25, litellm_waves=1, long_episodes=25, memory_episodes=500, memory_turns=4, streamed=60
)


def run(*, json: bool, quick: bool = False, counts: Counts | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures; with `json` the last line printed is one JSON object.

    Args:
        quick: whether to make fewer calls, for a quick estimate; the figures of docs/benchmarks.md are from a
            full run.
        counts: how much to run; overrides `quick`.

    Raises:
        ConfigError: the vocabulary's package is missing.
        EngineError: a server does not start, or a figure would include failed calls; all other figures are
            printed first.
    """
    counts = counts or (QUICK if quick else FULL)
    folder = qwen_folder()
    texts = Texts(Tokenizer.from_folder(folder))
    # SIGTERM must also end the servers.
    with interruptible(), tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch:
        bench = Bench(Path(scratch), folder, texts, counts)
        figures = bench.measure()
    for name, tally in bench.tallies.items():
        for example in tally.examples:
            print(f"failure of {name}: {example}")
    if json:
        print(jsonlib.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    if bench.unsound:
        raise EngineError("; ".join(bench.unsound))
    return figures


class UnsoundFigure(EngineError):
    """Some of the calls over which a figure is averaged have failed."""


class Bench:
    """The scenarios, one method each, with servers that this class starts and ends."""

    def __init__(self, scratch: Path, folder: Path, texts: Texts, counts: Counts) -> None:
        self.tally = Tally()  # of the proxy
        self.tallies = {"the proxy": self.tally, "the pass-through": Tally(), "LiteLLM": Tally()}
        self.unsound: list[str] = []  # figures that could not be measured, with the reason
        self._agents = Agents(texts, self.tally)
        self._scratch = scratch
        self._folder = folder
        self._texts = texts
        self._counts = counts
        self._stores = itertools.count()

    def measure(self) -> dict[str, Any]:
        """Every figure, by name."""
        figures: dict[str, Any] = {}
        with stub_engine(self._scratch, self._replies(), self._folder) as stub:
            with self._proxy(stub) as proxy, passthrough(stub.url) as least:
                for name, length in LENGTHS.items():
                    figures |= uvloop.run(self._beside(proxy, least, name, length))
                    self._progress(figures)
                figures |= uvloop.run(self._early_and_late(proxy, figures["cpu_ms_4k"] / 1e3))
                figures |= uvloop.run(self._first_token(proxy, stub))
                self._progress(figures)
            with self._proxy(stub) as proxy:
                figures |= uvloop.run(self._many_episodes(proxy, stub))
                figures["throughput_1_worker"] = round(uvloop.run(self._throughput(proxy)))
                self._progress(figures)
            with self._proxy(stub, ("--workers", "2")) as proxy:
                figures["throughput_2_workers"] = round(uvloop.run(self._throughput(proxy)))
            figures |= self._litellm(stub)
        if (theirs := figures["litellm_cpu_ms_4k"]) is not None:
            figures["litellm_over_ours_4k"] = _ratio(theirs, figures["cpu_ms_4k"])
        figures |= {
            "failures": self.tally.failures,
            "passthrough_failures": self.tallies["the pass-through"].failures,
            "litellm_failures": self.tallies["LiteLLM"].failures,
            "litellm_reopened": self.tallies["LiteLLM"].reopened,
        }
        figures |= {"cores": len(os.sched_getaffinity(0))}
        packages = ("aiohttp", "orjson", "renderers", "starlette", "tokenizers", "uvicorn")
        return figures | {"versions": {name: importlib.metadata.version(name) for name in packages}}

    def _progress(self, figures: dict[str, Any]) -> None:
        print(f"so far, {self.tally.failures} failures: {figures}", file=sys.stderr, flush=True)

    def _replies(self) -> dict[int, dict[str, Any]]:
        """The stub's answers by token limit."""

        def reply(tokens: int, prompt: int, *, delay_s: float = 0.0, token_s: float = 0.0) -> dict[str, Any]:
            said = self._texts.reply(tokens, reasoning=not token_s)
            return {**said, "prompt_tokens": prompt, "delay_s": delay_s, "token_s": token_s}

        return {
            300: reply(300, 4000),
            1000: reply(1000, 32_000),
            MANY_OUTPUT: reply(MANY_OUTPUT, 6000, delay_s=MANY_ENGINE_S * self._counts.pause),
            STREAMED_OUTPUT: reply(STREAMED_OUTPUT, 1000, token_s=0.002),
        }

    def _proxy(self, stub: Server, extra: Sequence[str] = ()) -> Server:
        """The proxy with a store of its own."""
        store = self._scratch / f"store-{next(self._stores)}" / "store.db"
        return proxy_server(self._folder, stub.url, store, ADMIN_KEY, extra)

    def _litellm(self, stub: Server) -> dict[str, Any]:
        server = litellm_server(self._scratch, stub.url, BARE_KEY)
        if server is None:
            return {"litellm_cpu_ms_4k": None}
        with server:
            return {"litellm_cpu_ms_4k": self.litellm_cpu_ms(server)}

    def litellm_cpu_ms(self, server: Server) -> float | None:
        """CPU ms per call of LiteLLM; None, with the reason in `unsound`, if some of its calls failed."""
        try:
            return round(uvloop.run(self._bare_waves(server)), 2)
        except UnsoundFigure as error:
            self.unsound.append(str(error))
            return None

    async def _beside(self, proxy: Server, least: Server, name: str, length: Length) -> dict[str, Any]:
        """CPU ms per call of the proxy and of the pass-through, measured in alternating waves."""
        ours: list[float] = []
        theirs: list[float] = []
        timed = Tally()
        for _ in range(self._counts.waves):
            cpu_ms, per_s = await self._wave(proxy, length, timed)
            ours.append(cpu_ms)
            theirs.append(await self._bare_wave(least, length, "the pass-through", per_s=per_s))
        self.tally.add(timed)
        return {
            f"cpu_ms_{name}": round(statistics.mean(ours), 2),
            f"passthrough_cpu_ms_{name}": round(statistics.mean(theirs), 2),
            f"vs_passthrough_{name}": _ratio(statistics.mean(ours), statistics.mean(theirs)),
            f"timed_calls_{name}": len(timed.latencies_s),
            f"prompt_tokens_{name}": round(statistics.mean(timed.prompt_tokens or [0])),
        }

    async def _wave(self, proxy: Server, length: Length, timed: Tally) -> tuple[float, float]:
        """CPU ms per timed call of one wave of episodes, and the calls per second."""
        episodes = await self._agents.episodes(proxy, self._counts.episodes, system=length.system)
        before = proxy.cpu_s()
        await self._agents.play(episodes, length, turns=length.warm_turns, result=length.warm_result)
        per_s = _rate((proxy.cpu_s() - before) / (len(episodes) * length.warm_turns))
        calls = self._agents.turns(episodes, length.timed_turns, length.output, length.newest, timed)
        cpu_ms = await _timed("the proxy", proxy, calls, per_s, timed)
        await self._agents.finish(proxy, episodes)
        return cpu_ms, per_s

    async def _bare_wave(
        self, server: Server, length: Length, name: str, *, per_s: float | None = None
    ) -> float:
        """Make the same timed calls through a proxy without state; the earlier turns are only written into
        the history.

        Args:
            name: name of the server, as in `tallies`.

            per_s: calls per second; without it, a rate that suits the server.

        Raises:
            UnsoundFigure: a timed call failed.
        """
        tally = self.tallies[name]
        conversations = await self._agents.bare(server, self._counts.episodes, system=length.system)
        reply = self._texts.reply(length.output)["message"]
        warm = self._texts.results(length.warm_result)
        for conversation in conversations:
            for turn in range(length.warm_turns - 1):
                if turn:
                    conversation.add_result(warm[turn])
                conversation.add_reply(reply)
        before, failed = server.cpu_s(), tally.failures
        first = self._agents.turns(conversations, 1, length.output, length.warm_result, tally)
        await all_at_once(first, at_a_time=4)
        per_s = per_s or _rate((server.cpu_s() - before) / len(first))
        _refuse_failures(name, first, tally, failed)
        rest = self._agents.turns(conversations, length.timed_turns, length.output, length.newest, tally)
        try:
            return await _timed(name, server, rest, per_s, tally)
        finally:
            for conversation in conversations:
                conversation.close()

    async def _early_and_late(self, proxy: Server, call_s: float) -> dict[str, Any]:
        """CPU ms per call at turn 2 and at turn 64, each with 250 new and 300 sampled tokens.

        The calls arrive at a rate suited to calls of `call_s`, since turn 1, a full rendering, does not show
        their cost.
        """
        length = LENGTHS["4k"]
        episodes = await self._agents.episodes(proxy, self._counts.long_episodes)
        await self._agents.play(episodes, length, turns=1, result=length.newest)
        per_s = _rate(call_s)

        def more(turns: int) -> list[Call]:
            return self._agents.turns(episodes, turns, length.output, length.newest, self.tally)

        early = await _timed("the proxy", proxy, more(1), per_s, self.tally)
        await all_at_once(more(61), at_a_time=4)
        late = await _timed("the proxy", proxy, more(1), per_s, self.tally)
        await self._agents.finish(proxy, episodes)
        return {
            "cpu_ms_turn2": round(early, 2),
            "cpu_ms_turn64": round(late, 2),
            "turn64_over_turn2": _ratio(late, early),
        }

    async def _throughput(self, proxy: Server) -> float:
        """Maximum calls per second of a proxy at the 4k length, with the load generator on the same
        machine."""
        length = LENGTHS["4k"]
        episodes = await self._agents.episodes(proxy, self._counts.episodes)
        await self._agents.play(episodes, length, turns=length.warm_turns, result=length.warm_result)
        calls = self._agents.turns(episodes, length.timed_turns, length.output, length.newest, self.tally)
        started, failed = time.perf_counter(), self.tally.failures
        await all_at_once(calls, at_a_time=min(32, len(episodes)))
        speed = len(calls) / (time.perf_counter() - started)
        _refuse_failures("the proxy", calls, self.tally, failed)
        await self._agents.finish(proxy, episodes)
        return speed

    async def _first_token(self, proxy: Server, stub: Server) -> dict[str, Any]:
        """Milliseconds from the stub's first token to the first text at the client, one call at a time."""
        episodes = await self._agents.episodes(proxy, self._counts.streamed)
        received = dict([await episode.call_streamed(STREAMED_OUTPUT, self.tally) for episode in episodes])
        await self._agents.finish(proxy, episodes)
        asked = await Connection.open(stub.url)
        sent = orjson.loads((await asked.post("/sent", b"", ""))[1])
        asked.close()
        overhead = [1e3 * (received[rid] - sent[rid]) for rid in received if rid in sent]
        return _percentiles("ttft_overhead_ms", overhead)

    async def _many_episodes(self, proxy: Server, stub: Server) -> dict[str, Any]:
        """Memory and added latency with many concurrent episodes, in which each turn adds a tool result of
        500 tokens."""
        counts = self._counts
        own = Tally()
        direct = await self._agents.bare(stub, 8, system=600)
        await all_at_once([functools.partial(c.call, MANY_OUTPUT, own) for c in direct], at_a_time=8)
        first = (await self._agents.episodes(proxy, 1))[0]
        await first.call(MANY_OUTPUT, self.tally)
        idle_mb, _ = proxy.memory_mb()
        episodes = await self._agents.episodes(proxy, counts.memory_episodes)
        period_s = (MANY_ENGINE_S + MANY_TOOL_S) * counts.pause
        tally, results = Tally(), self._texts.results(500)

        async def play(index: int, episode: Conversation) -> None:
            started = time.perf_counter() + period_s * index / len(episodes)
            for turn in range(counts.memory_turns):
                await asyncio.sleep(max(0.0, started + turn * period_s - time.perf_counter()))
                await episode.call(
                    MANY_OUTPUT, tally, results[(index + turn) % len(results)] if turn else None
                )

        before, clock = proxy.cpu_s(), time.perf_counter()
        await asyncio.gather(*(play(index, episode) for index, episode in enumerate(episodes)))
        load = (proxy.cpu_s() - before) / (time.perf_counter() - clock)
        _, peak_mb = proxy.memory_mb()
        await self._agents.finish(proxy, [first, *episodes])
        for conversation in direct:
            conversation.close()
        self.tally.add(tally)
        stub_s = statistics.median(own.latencies_s)
        return {
            "peak_rss_mb": round(peak_mb),
            "idle_rss_mb": round(idle_mb),
            "growth_mb": round(peak_mb - idle_mb),
            "many_episodes_load_cores": round(load, 2),
            **_percentiles("added_latency_ms", [1e3 * (s - stub_s) for s in tally.latencies_s]),
        }

    async def _bare_waves(self, server: Server) -> float:
        """CPU ms per call of a stateless proxy at the 4k length, at a rate suited to it."""
        length = LENGTHS["4k"]
        waves = [await self._bare_wave(server, length, "LiteLLM") for _ in range(self._counts.litellm_waves)]
        return statistics.mean(waves)


def _rate(cpu_s: float) -> float:
    """Calls per second that use LOAD of a core, if each uses `cpu_s`, as measured at full speed."""
    return LOAD / max(cpu_s, 1e-3)


def _refuse_failures(name: str, calls: Sequence[Call], tally: Tally, before: int) -> None:
    """Raise UnsoundFigure if some of the calls failed; `before` is the number of failures before them."""
    if failed := tally.failures - before:
        seen = f"; the first failures: {tally.examples}" if tally.examples else ""
        raise UnsoundFigure(
            f"{failed} of {len(calls)} timed calls to {name} failed, so no figure is given{seen}"
        )


async def _timed(name: str, server: Server, calls: Sequence[Call], per_s: float, tally: Tally) -> float:
    """CPU ms of a server per call, at a fixed rate. Raises UnsoundFigure if one of the calls fails."""
    await asyncio.sleep(0.2)  # work left over from earlier calls ends outside the measured window
    before, failed = server.cpu_s(), tally.failures
    await at_rate(calls, per_s=per_s)
    _refuse_failures(name, calls, tally, failed)
    return 1e3 * (server.cpu_s() - before) / len(calls)


def _ratio(above: float, below: float) -> float | None:
    """None if there were too few calls for the resolution of the clock, a hundredth of a second."""
    return round(above / below, 2) if below else None


def _percentiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    if len(values) < 2:
        return {f"{name}_p50": None, f"{name}_p99": None}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p50": round(cuts[49], 2), f"{name}_p99": round(cuts[98], 2)}
