"""Decode speed of the embedded engine over HTTP, with each of its kernels, and of transformers' generate.

Every prompt has 300 tokens, 236 of them a system prompt that all share. Its prefix is in the cache before
the clock starts; transformers gets its keys and values precomputed too. All sides sample 48 tokens at
temperature 1 with the same number of threads. The client is this process; it uses plain sockets and prepared
bodies in order to use as little CPU time as possible.
"""

from __future__ import annotations

import asyncio
import copy
import json as jsonlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import torch
import uvloop

from areal_agents.errors import EngineError
from areal_agents.inference import EmbeddedEngineConfig, EngineProcess

CONTEXT = 300
SYSTEM_PROMPT = 236
OUTPUT = 48
CONCURRENCIES = (1, 32, 64)
REPEATS = 5
ROUNDS: Mapping[int, int] = {1: 8, 32: 3, 64: 3}  # requests per connection in one timed repeat
GENERATE_BATCH = 32
QUICK_START_MODEL = Path("examples/search_agent/model")


def run(*, json: bool, model: str | None = None, threads: int = 0) -> dict[str, Any]:
    """Measure, print, and return the figures; with `json` the last line printed is one JSON object.

    Args:
        model: a model folder; by default the quick-start model or, if it is missing, random weights of its
            shape.
        threads: CPU threads for the engine and for transformers; 0 uses all cores.
    """
    cores = len(os.sched_getaffinity(0))
    threads = threads or cores
    with tempfile.TemporaryDirectory(prefix="areal-agents-bench-") as scratch:
        folder = Path(model) if model else _default_model(Path(scratch))
        figures = _measure_engine(folder, threads, kernel="numba", numba_cache=Path(scratch) / "numba")
        with_torch = _measure_engine(folder, threads, kernel="torch", numba_cache=Path(scratch) / "numba")
        figures["generate_b32"] = round(_measure_generate(folder, threads), 1)
    figures |= {f"{name}_torch": value for name, value in with_torch.items()}
    for count in CONCURRENCIES:
        figures[f"vs_torch_b{count}"] = round(figures[f"tok_s_b{count}"] / with_torch[f"tok_s_b{count}"], 2)
    figures["vs_generate"] = round(figures["tok_s_b32"] / figures["generate_b32"], 2)
    figures |= {"threads": threads, "cores": cores, "model": str(folder) if model else folder.name}
    if json:
        print(jsonlib.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value}")
    return figures


def _default_model(scratch: Path) -> Path:
    """The quick-start model, or a random model of exactly its shape."""
    if (QUICK_START_MODEL / "config.json").is_file():
        return QUICK_START_MODEL
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = scratch / "random-0.9M"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def prompts(count: int, vocab_size: int) -> np.ndarray:
    """[count, CONTEXT] random ids that share their first SYSTEM_PROMPT tokens."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, vocab_size, SYSTEM_PROMPT)
    own = draw.integers(0, vocab_size, (count, CONTEXT - SYSTEM_PROMPT))
    return np.concatenate([np.broadcast_to(shared, (count, SYSTEM_PROMPT)), own], axis=1)


def _measure_engine(
    folder: Path, threads: int, *, kernel: Literal["numba", "torch"], numba_cache: Path
) -> dict[str, Any]:
    """Start-up time without compiled kernels, then tokens per second at each concurrency."""
    config = EmbeddedEngineConfig(
        model=str(folder), port=0, threads=threads, slots=96, max_context=1024, kernel=kernel
    )
    vocab_size = jsonlib.loads((folder / "config.json").read_text())["vocab_size"]
    started = time.perf_counter()
    with EngineProcess(config, env={"NUMBA_CACHE_DIR": str(numba_cache)}) as process:
        figures: dict[str, Any] = {"startup_s": round(time.perf_counter() - started, 2)}
        ids = prompts(max(CONCURRENCIES), vocab_size)
        for concurrency in CONCURRENCIES:
            speed = uvloop.run(_best_speed(process.url, ids[:concurrency], ROUNDS[concurrency]))
            figures[f"tok_s_b{concurrency}"] = round(speed, 1)
    return figures


async def _best_speed(url: str, ids: np.ndarray, rounds: int) -> float:
    """Tokens per second, best of REPEATS, after one round that fills the prefix cache."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    connections = [await _Connection.open(address.hostname, address.port, prompt) for prompt in ids]
    try:
        await asyncio.gather(*(connection.generate(1) for connection in connections))
        best = 0.0
        for _ in range(REPEATS):
            started = time.perf_counter()
            await asyncio.gather(*(connection.generate(rounds) for connection in connections))
            best = max(best, len(ids) * rounds * OUTPUT / (time.perf_counter() - started))
        return best
    finally:
        for connection in connections:
            connection.close()


class _Connection:
    """A keep-alive connection that repeats one prepared request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._request = request

    @classmethod
    async def open(cls, host: str, port: int, prompt: np.ndarray) -> _Connection:
        body = jsonlib.dumps(
            {
                "input_ids": prompt.tolist(),
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": OUTPUT, "temperature": 1.0, "ignore_eos": True},
            }
        )
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        return cls(reader, writer, (head + body).encode())

    async def generate(self, count: int) -> None:
        """Send the request `count` times, each after the answer to the one before."""
        for _ in range(count):
            self._writer.write(self._request)
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r")[0])
            answer = await self._reader.readexactly(length)
            if b'"completion_tokens":%d,' % OUTPUT not in answer:
                raise EngineError(
                    f"the engine answered {head.decode()}{answer[:300].decode(errors='replace')}"
                )

    def close(self) -> None:
        self._writer.close()


@torch.inference_mode()
def _measure_generate(folder: Path, threads: int) -> float:
    """Tokens per second of transformers' generate on the same prompts, with precomputed keys and values."""
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompts(GENERATE_BATCH, model.config.vocab_size))
    filled = model(
        ids[:, :-1], use_cache=True, past_key_values=DynamicCache(config=model.config)
    ).past_key_values
    best = 0.0
    for _ in range(REPEATS + 1):
        cache = copy.deepcopy(filled)
        started = time.perf_counter()
        out = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=OUTPUT,
            min_new_tokens=OUTPUT,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert out.shape == (GENERATE_BATCH, CONTEXT + OUTPUT)
        best = max(best, GENERATE_BATCH * OUTPUT / seconds)
    return best
