"""Saturates one proxy process with the streams of eight engines: `python -m benchmarks proxy --saturate`.

The engines are scripted ones, each in a process of its own. They write one event for each token, as fast as
they can, or as many tokens in each event as the proxy asks for with `stream_interval`. No client streams.
Every call waits for its first token until all calls are open, so all streams are open at the same time.
Figures per core are per second of the proxy's processor time. Afterwards every recorded turn is compared with
what the engines sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as jsonlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from areal_agents.errors import EngineError
from areal_agents.launch.signals import interruptible
from areal_agents.rendering import Tokenizer
from areal_agents.sockets import allow_many_connections
from areal_agents.store import Store
from benchmarks.proxy.agents import ADMIN_KEY, Agents
from benchmarks.proxy.load import Connection, Conversation, Tally
from benchmarks.proxy.processes import Server
from benchmarks.proxy.qwen_vocabulary import qwen_folder
from benchmarks.proxy.servers import proxy_server, scripted_engine
from benchmarks.proxy.texts import Texts

OPENING_S = 0.004  # of each stream, for which the first tokens wait
SYSTEM = 100  # tokens of the prompt's first message
WATCH_S = 0.2
REPLY_S = 1500.0  # longest wait for a reply, on a machine with other work


@dataclass(frozen=True)
class Load:
    """Streams that are open at the same time, and the tokens of each."""

    streams: int
    tokens: int
    engines: int = 8


FULL = (Load(500, 512), Load(2000, 512))
QUICK = (Load(500, 128),)


def run(*, json: bool, quick: bool = False, loads: Sequence[Load] | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures; with `json` the last line printed is one JSON object.

    Raises:
        ConfigError: the vocabulary's package is missing.
        EngineError: a call failed, or a turn is not what the engine sampled; the figures are printed first.
    """
    loads = loads or (QUICK if quick else FULL)
    folder = qwen_folder()
    texts = Texts(Tokenizer.from_folder(folder))
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    tally = Tally()
    allow_many_connections()
    with interruptible(), tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch:
        for load in loads:
            for one_token in (True, False):
                name = f"{load.streams}_streams_{'event_per_token' if one_token else 'stream_interval'}"
                store = Path(scratch) / name / "store.db"
                with _servers(folder, store, load, one_token=one_token) as proxy:
                    figures[name] = uvloop.run(_measure(Agents(texts, tally), proxy, load, tally))
                figures[name] |= _check(store, load, tally)
                print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    figures["failures"] = tally.failures
    if json:
        print(jsonlib.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:40} {value}")
    if tally.failures:
        raise EngineError(f"{tally.failures} failures, the first: {tally.examples}")
    return figures


@contextlib.contextmanager
def _servers(folder: Path, store: Path, load: Load, *, one_token: bool) -> Iterator[Server]:
    """Start the engines, and one proxy process in front of them."""
    delay_ms = 1000 * (1.0 + load.streams * OPENING_S)
    arguments = ["--reply-tokens", str(load.tokens), "--delay-ms", str(delay_ms), "--incremental"]
    if one_token:
        arguments.append("--ignore-stream-interval")
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(scripted_engine(folder, arguments)) for _ in range(load.engines)]
        first, *others = (engine.url for engine in engines)
        extra = [word for url in others for word in ("--engine-url", url)]
        yield stack.enter_context(proxy_server(folder, first, store, ADMIN_KEY, [*extra, "--workers", "1"]))


async def _measure(agents: Agents, proxy: Server, load: Load, tally: Tally) -> dict[str, Any]:
    """Open all streams, wait for the whole replies, and return the figures."""
    episodes = await agents.episodes(proxy, load.streams, system=SYSTEM)
    running: list[int] = []
    watching = asyncio.ensure_future(_watch(proxy, running))
    idle_mb, _ = proxy.memory_mb()
    before, started = proxy.cpu_s(), time.perf_counter()
    await asyncio.gather(*(_play(episode, load, tally) for episode in episodes))
    cpu_s, wall_s = proxy.cpu_s() - before, time.perf_counter() - started
    _, peak_mb = proxy.memory_mb()
    watching.cancel()
    await asyncio.wait([watching])
    await agents.finish(proxy, episodes)
    sampled = load.streams * load.tokens
    return {
        "engines": load.engines,
        "tokens_per_core_s": round(sampled / cpu_s),
        "cpu_ms_per_call": round(1e3 * cpu_s / load.streams, 2),
        "tokens_per_s": round(sampled / wall_s),
        "most_running": max(running, default=0),
        "idle_mb": round(idle_mb),
        "peak_mb": round(peak_mb),
    }


async def _play(episode: Conversation, load: Load, tally: Tally) -> None:
    """Make one call that is not streamed, and check that the reply is whole."""
    try:
        async with asyncio.timeout(REPLY_S):
            status, raw = await episode.post(load.tokens)
    except (TimeoutError, OSError, EOFError, ValueError) as error:
        tally.failed(repr(error))
        return
    answer = orjson.loads(raw) if status == 200 else {}
    if not answer or answer["usage"]["completion_tokens"] != load.tokens:
        tally.failed(f"{status} {raw[:300].decode(errors='replace')}")


async def _watch(proxy: Server, running: list[int]) -> None:
    """Collect how many calls the engines are answering, until cancelled."""
    connection = await Connection.open(proxy.url)
    try:
        while True:
            metrics = await connection.get("/metrics", ADMIN_KEY)
            found = metrics.partition(b"\nareal_agents_calls_running ")[2].partition(b"\n")[0]
            running.append(int(float(found)))
            await asyncio.sleep(WATCH_S)
    finally:
        connection.close()


def _check(store: Path, load: Load, tally: Tally) -> dict[str, Any]:
    """Compare every recorded turn with what the engines sampled, which is the same for all calls."""
    exact, expected = 0, None
    with Store.open(store) as opened:
        for episode in opened.episodes():
            turns = opened.turns_of(episode.id)
            ids = [turn.completion.token_ids.tolist() for turn in turns]
            expected = expected or ids[0]
            whole = len(expected) == load.tokens and set(turns[0].completion.versions.tolist()) == {0}
            if ids == [expected] and whole:
                exact += 1
            else:
                tally.failed(f"episode {episode.id} has turns of {[len(each) for each in ids]} tokens")
    if exact != load.streams:
        tally.failed(f"{exact} turns of {load.streams} were recorded as they were sampled")
    return {"turns_recorded_exactly": exact}
