"""The speed of the store: many writers commit turns through the public API, as the proxy does.

A writer awaits the future of each turn before it creates the next one, so the measured time is the time that
an agent waits: until the turn is on the disk, with the requested durability.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.store import NewEpisode, Store
from areal_agents.store.config import Durability

WRITERS = 64
TURNS = 8192
TOKENS = 500
PROMPT_TOKENS = 100
_CHARACTERS = 4  # characters of text per token, approximately
_VOCABULARY = 150_000
_TURNS_BETWEEN_ROOTS = 8
_START_S, _END_S = 120.0, 600.0  # the longest times until all processes are ready, and until they are done


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The results of `measure_store`.

    Attributes:
        turns_per_s: committed turns a second, over all writers.
        commit_p50_ms, commit_p99_ms: time from the submission of a turn to its commit.
        turns, writers, tokens: number of turns in total, number of writers, and sampled tokens per turn.
        durability: the durability of every commit.
    """

    turns_per_s: float
    commit_p50_ms: float
    commit_p99_ms: float
    turns: int
    writers: int
    tokens: int
    durability: Durability


def measure_store(
    *,
    turns: int = TURNS,
    writers: int = WRITERS,
    tokens: int = TOKENS,
    durability: Durability = "power",
    folder: Path | None = None,
) -> StoreFigures:
    """Commit `turns` turns of `tokens` sampled tokens from `writers` concurrent writers and measure the
    speed.

    Args:
        folder: a folder on the disk to measure, by default the working directory. The store is removed
            afterwards.

    Raises:
        StoreError: the store cannot be written.
    """
    made = make_turns(turns, writers, tokens)
    with (
        tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder or Path.cwd()) as where,
        Store.open(Path(where) / "store.db", durability) as store,
    ):
        for writer in range(writers):
            store.open_episode(NewEpisode(f"e{writer}", f"key {writer}")).result()
        started = time.perf_counter()
        waits = asyncio.run(_write(store, made))
        elapsed = time.perf_counter() - started
    p50, p99 = np.percentile(waits, [50, 99])
    return StoreFigures(
        turns_per_s=round(len(waits) / elapsed, 1),
        commit_p50_ms=round(1000 * p50, 2),
        commit_p99_ms=round(1000 * p99, 2),
        turns=len(waits),
        writers=writers,
        tokens=tokens,
        durability=durability,
    )


def run(*, json: bool) -> None:
    """Measure both durabilities and print a line for each and then, with `json`, the figures of "power"."""
    console = Console()
    figures = [measure_store(durability=durability) for durability in ("process", "power")]
    for found in figures:
        console.print(
            f"durability {found.durability}: {found.turns_per_s:,.0f} turns/s of {found.tokens} tokens from "
            f"{found.writers} writers; a commit takes {found.commit_p50_ms:.1f} ms, "
            f"{found.commit_p99_ms:.1f} ms at the 99th percentile",
            highlight=False,
            soft_wrap=True,
        )
    if json:
        print(jsonlib.dumps(asdict(figures[-1])))


def measure_shared(url: str, *, processes: int, turns: int = TURNS, writers: int = WRITERS) -> StoreFigures:
    """Commit turns from several processes to one store and measure the speed of all of them together.

    Args:
        url: a store that does not exist yet; it is left there.
        turns, writers: of all processes together.

    Raises:
        StoreError: the store cannot be written.
    """
    Store.open(url).close()
    spawning = multiprocessing.get_context("spawn")
    start, results = spawning.Barrier(processes + 1), spawning.Queue()
    others = [
        spawning.Process(
            target=_write_share, args=(index, url, turns // processes, writers // processes, start, results)
        )
        for index in range(processes)
    ]
    for other in others:
        other.start()
    try:
        start.wait(_START_S)
        started = time.perf_counter()
        waits = [wait for _ in others for wait in results.get(timeout=_END_S)]
        elapsed = time.perf_counter() - started
    finally:
        for other in others:
            other.join(_END_S)
            other.kill()
    p50, p99 = np.percentile(waits, [50, 99])
    return StoreFigures(
        turns_per_s=round(len(waits) / elapsed, 1),
        commit_p50_ms=round(1000 * p50, 2),
        commit_p99_ms=round(1000 * p99, 2),
        turns=len(waits),
        writers=writers,
        tokens=TOKENS,
        durability="process",
    )


def run_shared(url: str, *, processes: int, json: bool) -> None:
    """Measure several processes on one store, print a line and, with `json`, the figures."""
    found = measure_shared(url, processes=processes)
    Console().print(
        f"{processes} processes on one store: {found.turns_per_s:,.0f} turns/s of {found.tokens} tokens from "
        f"{found.writers} writers; a commit takes {found.commit_p50_ms:.1f} ms, {found.commit_p99_ms:.1f} ms "
        "at the 99th percentile",
        highlight=False,
        soft_wrap=True,
    )
    if json:
        print(jsonlib.dumps({**asdict(found), "processes": processes}))


def _write_share(
    index: int,
    url: str,
    turns: int,
    writers: int,
    start: threading.Barrier,
    results: multiprocessing.Queue[list[float]],
) -> None:
    """Run in another process: write its turns when all are ready, and send the seconds of each commit."""
    made = make_turns(turns, writers, TOKENS, prefix=f"{index}-")
    with Store.open(url) as store:
        for writer in range(writers):
            store.open_episode(NewEpisode(f"{index}-e{writer}", f"key {index} {writer}")).result()
        start.wait(_START_S)
        results.put(asyncio.run(_write(store, made, prefix=f"{index}-")))


async def _write(store: Store, turns: Sequence[Sequence[Turn]], *, prefix: str = "") -> list[float]:
    """Make writer i write `turns[i]`, one after another; return the seconds that each commit took."""
    waits: list[float] = []

    async def write(episode: str, own: Sequence[Turn]) -> None:
        for turn in own:
            handed_in = time.perf_counter()
            await asyncio.wrap_future(store.add_turn(episode, turn))
            waits.append(time.perf_counter() - handed_in)

    await asyncio.gather(*(write(f"{prefix}e{writer}", own) for writer, own in enumerate(turns)))
    return waits


def make_turns(turns: int, writers: int, tokens: int, *, prefix: str = "") -> list[list[Turn]]:
    """Create conversations of several turns for each writer in advance, so that this work is not measured."""
    rng = np.random.default_rng(0)
    made = []
    for writer in range(writers):
        own: list[Turn] = []
        for number in range(turns // writers):
            is_root = number % _TURNS_BETWEEN_ROOTS == 0
            own.append(
                Turn(
                    id=f"{prefix}{writer}-{number}",
                    parent=None if is_root else own[-1].id,
                    new_messages=(Message("user", "q" * _CHARACTERS * PROMPT_TOKENS),),
                    new_prompt_ids=rng.integers(0, _VOCABULARY, PROMPT_TOKENS, np.int32),
                    completion=Completion(
                        rng.integers(0, _VOCABULARY, tokens, np.int32),
                        -rng.random(tokens, np.float32),
                        np.zeros(tokens, np.int32),
                        "stop",
                    ),
                    reply=Message("assistant", "a" * _CHARACTERS * tokens),
                    sampling=SamplingParams(max_new_tokens=tokens),
                )
            )
        made.append(own)
    return made
