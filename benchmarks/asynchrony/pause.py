"""Measures how long an engine pauses for new weights, by the streams of the requests that it serves.

An engine serves a few streams without end; meanwhile its weights are replaced again and again as the trainer
does it: prepared beside serving, then pause (retract), swap, resume.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from areal_agents.core.completion import SamplingParams, TokenChunk
from areal_agents.errors import EngineError
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.engine import Engine

STREAMS = 4
PROMPT = 32
OUTPUT = 96  # tokens of one request
COPIES = 5
TOKEN_TIMEOUT_S = 120.0
ALLOWED_S = 0.020  # of a pause, beside the floor


@dataclass(frozen=True, slots=True)
class PauseFigures:
    """The results of `measure_pause`; seconds are medians over the swaps.

    Attributes:
        megabytes: of the weights, 10^6 bytes. bandwidth_gb_s: of copying as many bytes in memory.
        floor_s: the weights' bytes at that bandwidth.
        pause_s: from the last token before a swap to when the engine is ready to step; pause_max_s: the
            longest.
        recompute_s: from there to the first token after, that token's step included.
        recomputed_tokens: prompts and outputs of the requests that were running.
        lost: requests that did not end with all of their tokens. swaps, requests: how many there were.
    """

    megabytes: float
    bandwidth_gb_s: float
    floor_s: float
    pause_s: float
    pause_max_s: float
    recompute_s: float
    recomputed_tokens: float
    lost: int
    swaps: int
    requests: int

    @property
    def over_floor(self) -> float:
        """(pause − 20 ms) / floor; below 0 for a pause of less than 20 ms."""
        return (self.pause_s - ALLOWED_S) / self.floor_s


@dataclass(slots=True)
class _Streams:
    """The client's view: when tokens arrived, and the tokens of each running request."""

    token_times: list[float] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, int] = field(default_factory=dict)  # rid → its tokens so far
    requests: int = 0
    lost: int = 0

    def note(self, rid: str, chunk: TokenChunk) -> None:
        self.token_times.append(time.monotonic())
        self.running[rid] += len(chunk.token_ids)
        self.came.set()

    async def token_after(self, moment: float) -> float:
        """When the first token after `moment` came."""
        async with asyncio.timeout(TOKEN_TIMEOUT_S):
            while not self.token_times or self.token_times[-1] <= moment:
                self.came.clear()
                await self.came.wait()
        return next(t for t in self.token_times if t > moment)


def measure_pause(folders: Sequence[Path], *, swaps: int, threads: int = 0) -> PauseFigures:
    """Swap the weights of the first of two model folders for the others' under load, `swaps` times.

    Args:
        folders: two, of one shape, each with one file of float32 weights.
        threads: of the engine; 0 takes all cores.

    Raises:
        EngineError: the engine is lost or refused the weights.
    """
    size = (folders[0] / "model.safetensors").stat().st_size
    bandwidth = copy_bandwidth(size)
    with running_engine(folders[0], threads=threads, slots=2 * STREAMS, max_context=256) as url:
        streams, timed = asyncio.run(_measure(url, folders, swaps))
    pauses, recomputes, tokens = zip(*timed, strict=True)
    return PauseFigures(
        megabytes=size / 1e6,
        bandwidth_gb_s=bandwidth / 1e9,
        floor_s=size / bandwidth,
        pause_s=statistics.median(pauses),
        pause_max_s=max(pauses),
        recompute_s=statistics.median(recomputes),
        recomputed_tokens=statistics.mean(tokens),
        lost=streams.lost,
        swaps=swaps,
        requests=streams.requests,
    )


def copy_bandwidth(size: int) -> float:
    """Bytes per second of copying `size` bytes from memory to memory on one core, the best of COPIES."""
    source, target = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    best = 0.0
    for _ in range(COPIES):
        started = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.nbytes / (time.perf_counter() - started))
    return best


async def _measure(
    url: str, folders: Sequence[Path], swaps: int
) -> tuple[_Streams, list[tuple[float, float, int]]]:
    engine, streams, stop = SGLangEngine(url), _Streams(), asyncio.Event()
    try:
        vocabulary = (await engine.model_info()).vocab_size
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(_requests(engine, streams, stop, number, vocabulary))
            timed = []
            for version in range(1, swaps + 1):
                await _all_running(streams)
                timed.append(await _swap(engine, streams, folders[version % 2], version))
            stop.set()
        return streams, timed
    finally:
        await engine.aclose()


async def _requests(
    engine: Engine, streams: _Streams, stop: asyncio.Event, stream: int, vocabulary: int
) -> None:
    """One request after the other until `stop`; the last is completed."""
    random = np.random.default_rng(stream)
    for count in itertools.count():
        if stop.is_set():
            return
        prompt = random.integers(0, vocabulary, PROMPT).astype(np.int32)
        rid = f"stream-{stream}-{count}"
        streams.requests += 1
        streams.running[rid] = 0
        try:
            done = await engine.generate(
                rid, prompt, SamplingParams(OUTPUT, ignore_eos=True), partial(streams.note, rid)
            )
            streams.lost += len(done) != OUTPUT or streams.running[rid] != OUTPUT
        except EngineError:
            streams.lost += 1
        del streams.running[rid]


async def _all_running(streams: _Streams) -> None:
    """Return once every stream has tokens of a request that runs, and some are still to come."""
    while len(streams.running) < STREAMS or not all(streams.running.values()):
        await streams.token_after(time.monotonic())


async def _swap(engine: Engine, streams: _Streams, folder: Path, version: int) -> tuple[float, float, int]:
    """Pause and recomputation in seconds, and the tokens that were recomputed."""
    await engine.prepare_weights_from_disk(str(folder))
    await engine.pause("retract")
    try:
        await engine.update_weights_from_disk(str(folder), version)
        recomputed = sum(PROMPT + tokens for tokens in streams.running.values())
        last = max(streams.token_times)
    finally:
        await engine.resume()
    ready = time.monotonic()
    first = await streams.token_after(last)
    return ready - last, max(0.0, first - ready), recomputed
