"""Measures how long an engine pauses for new weights, as seen by the clients of streamed requests.

An engine serves a few endless streams while its weights are replaced repeatedly, as the trainer replaces
them: they are prepared while the engine serves, then the engine pauses (retract), swaps and resumes.
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
ALLOWED_S = 0.020  # allowance for a pause, in addition to the floor


@dataclass(frozen=True, slots=True)
class PauseFigures:
    """The results of `measure_pause`; seconds are medians over the swaps.

    Attributes:
        megabytes: size of the weights in 10^6 bytes. bandwidth_gb_s: bandwidth of copying as many bytes in
            memory.
        floor_s: time to copy the weights at that bandwidth.
        pause_s: time from the last token before a swap until the engine is ready to step. pause_max_s: the
            longest such time.
        recompute_s: time from then to the first token after the swap, the step of this token included.
        recomputed_tokens: number of tokens in prompts and outputs of the requests that were running.
        lost: number of requests that did not return all of their tokens. swaps, requests: numbers of swaps
            and requests.
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
        """(pause − 20 ms) / floor; negative for a pause of less than 20 ms."""
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
        """The time of the first token after `moment`."""
        async with asyncio.timeout(TOKEN_TIMEOUT_S):
            while not self.token_times or self.token_times[-1] <= moment:
                self.came.clear()
                await self.came.wait()
        return next(t for t in self.token_times if t > moment)


def measure_pause(folders: Sequence[Path], *, swaps: int, threads: int = 0) -> PauseFigures:
    """Alternate between the weights of two model folders under load, with `swaps` swaps.

    Args:
        folders: two model folders with the same shapes, each with one file of float32 weights.
        threads: CPU threads of the engine; 0 uses all cores.

    Raises:
        EngineError: the engine does not answer or refused the weights.
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
    """Bytes per second of copying `size` bytes within memory on one core, best of COPIES."""
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
    """Make one request after another until `stop`; the last request is completed."""
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
    """Return once every stream is in the middle of a request, with some of its tokens received."""
    while len(streams.running) < STREAMS or not all(streams.running.values()):
        await streams.token_after(time.monotonic())


async def _swap(engine: Engine, streams: _Streams, folder: Path, version: int) -> tuple[float, float, int]:
    """Return pause and recomputation in seconds, and the number of recomputed tokens."""
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
