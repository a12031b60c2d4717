"""The embedded engine in a process of its own: its speed, and the memory that it gives back asleep."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_agents.core.completion import Completion, SamplingParams, TokenIds, as_token_ids
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.engine import MemoryKind
from benchmarks.gpu.parts import Here
from benchmarks.trainer.data import save_model

REQUESTS, PROMPT, OUTPUT, SLOTS, CONTEXT = 32, 64, 64, 64, 1024
GREEDY = SamplingParams(OUTPUT, temperature=0.0, ignore_eos=True)
KINDS: tuple[MemoryKind, ...] = ("kv_cache", "weights")


def engine(here: Here) -> dict[str, Any]:
    """Decode, release weights and cache, take them back, and decode the same tokens again."""
    folder = save_model(here.scratch / "model", here.scale.shape, bfloat16=True, device=here.device)
    started = time.monotonic()
    with running_engine(
        folder, device=here.device, dtype="bfloat16", kernel="torch", slots=SLOTS, max_context=CONTEXT
    ) as url:
        ready_s = time.monotonic() - started
        return {"start_s": round(ready_s, 1)} | asyncio.run(_measure(url, folder, here))


async def _measure(url: str, folder: Path, here: Here) -> dict[str, Any]:
    async with SGLangEngine(url, request_timeout_s=60) as client:
        before = await _decode(client, here, "before")
        await _decode_together(client, here, "warm")
        started = time.monotonic()
        await _decode_together(client, here, "timed")
        decode_s = time.monotonic() - started
        awake = _used_gib(here)
        await client.pause("retract")
        started = time.monotonic()
        await client.release_memory(KINDS)
        release_s, asleep = time.monotonic() - started, _used_gib(here)
        started = time.monotonic()
        await client.resume_memory(KINDS)
        await client.update_weights_from_disk(str(folder), 1)
        wake_s = time.monotonic() - started
        await client.resume()
        after = await _decode(client, here, "after")
    for one, other in zip(before, after, strict=True):
        if one.token_ids.tolist() != other.token_ids.tolist():
            raise AssertionError("the engine samples other tokens after it slept")
    figures: dict[str, Any] = {
        "tokens_per_s": round(REQUESTS * OUTPUT / decode_s),
        "release_s": round(release_s, 3),
        "wake_s": round(wake_s, 3),
    }
    if awake is not None and asleep is not None:
        held = _held_gib(here)
        figures |= {"released_gib": round(awake - asleep, 2), "held_gib": round(held, 2)}
        if awake - asleep < 0.9 * held:
            raise AssertionError(
                f"asleep the engine gave back {awake - asleep:.2f} GiB of {held:.2f} that it held"
            )
    return figures


async def _decode(client: SGLangEngine, here: Here, name: str) -> list[Completion]:
    """Two requests one after the other: in a batch the last bits depend on what else is in it."""
    return [
        await client.generate(f"{name}-{i}", prompt, GREEDY) for i, prompt in enumerate(_prompts(here, 2))
    ]


async def _decode_together(client: SGLangEngine, here: Here, name: str) -> None:
    prompts = _prompts(here, REQUESTS)
    await asyncio.gather(*(client.generate(f"{name}-{i}", p, GREEDY) for i, p in enumerate(prompts)))


def _prompts(here: Here, count: int) -> list[TokenIds]:
    draw = np.random.default_rng(0)
    return [as_token_ids(draw.integers(4, here.scale.shape.vocab, PROMPT)) for _ in range(count)]


def _used_gib(here: Here) -> float | None:
    """Memory of the GPU that all processes use; None on a CPU."""
    if here.device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def _held_gib(here: Here) -> float:
    """What the engine's weights and its keys and values take."""
    shape = here.scale.shape
    cache = 2 * shape.layers * SLOTS * CONTEXT * shape.kv_heads * shape.head_dim
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    weights = shape.vocab * shape.hidden + shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    return 2 * (cache + weights) / 2**30
