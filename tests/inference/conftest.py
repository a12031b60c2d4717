"""Models and servers that the inference tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inference_support import (
    EVERY_SERVER,
    MAX_CONTEXT,
    PLAIN_SGLANG,
    Target,
    build_model,
    client_of,
    load_reference,
)
from real_sglang import running_sglang
from real_vllm import VLLMUrl, running_vllm

from areal_agents.inference import running_engine


@pytest.fixture(scope="session")
def head_dim(request: pytest.FixtureRequest) -> int:
    """The size of the models' attention heads; vLLM's kernels for a CPU do not support 24."""
    return 32 if request.config.getoption("--vllm") else 24


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, head_dim: int) -> Path:
    """The folder of the model that is version 0."""
    return build_model(tmp_path_factory.mktemp("model0"), seed=0, head_dim=head_dim)


@pytest.fixture(scope="session")
def next_model_folder(tmp_path_factory: pytest.TempPathFactory, head_dim: int) -> Path:
    """The folder of a model of the same architecture with other weights."""
    return build_model(tmp_path_factory.mktemp("model1"), seed=1, head_dim=head_dim)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that calls `build_model` with a new folder."""
    return lambda kind="qwen3", **options: build_model(tmp_path_factory.mktemp("model"), kind, **options)


@pytest.fixture(scope="session")
def sglang_url(sglang_python: str, model_folder: Path) -> Iterator[str]:
    """A real SGLang as a run starts it: with incremental streams, adapters and the overlap schedule."""
    with running_sglang(sglang_python, model_folder, lora_rank=16) as url:
        yield url


@pytest.fixture(scope="session")
def plain_sglang_url(sglang_python: str, model_folder: Path) -> Iterator[str]:
    """A real SGLang with cumulative streams, whose weights may be swapped in place."""
    with running_sglang(sglang_python, model_folder, cumulative=True, exact_in_place=True) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_url(vllm_python: str, model_folder: Path) -> Iterator[VLLMUrl]:
    """A real vLLM as a run starts it."""
    with running_vllm(vllm_python, model_folder) as url:
        yield url


REAL_URLS = {"sglang": "sglang_url", "sglang-plain": "plain_sglang_url", "vllm": "vllm_url"}


async def put_back(url: str, folder: Path) -> None:
    """Serve version 0 again."""
    async with client_of(url) as engine:
        await engine.resume()
        await engine.update_weights_from_disk(str(folder), 0)


@pytest.fixture(scope="session", params=EVERY_SERVER)
def target(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Target]:
    """Each server that must satisfy the contract; a test must resume it and restore its weights."""
    reference = load_reference(model_folder)
    if request.param in REAL_URLS:
        url = request.getfixturevalue(REAL_URLS[request.param])
        asyncio.run(put_back(url, model_folder))  # other modules have swapped its weights
        yield Target(url, model_folder, reference, embedded=False)
        return
    options = {
        "kernel": request.param,
        "threads": 1,
        "slots": 6,
        "max_context": MAX_CONTEXT,
        "prefill_tokens": 32,
        "incremental_streaming": request.param == "numba",  # torch: cumulative, SGLang's default
    }
    with running_engine(model_folder, **options) as url:
        yield Target(url, model_folder, reference, embedded=True)


@pytest.fixture(scope="module", params=[*EVERY_SERVER, PLAIN_SGLANG])
def swapping_url(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[str]:
    """Each server whose weights the tests swap; every test first restores version 0."""
    if request.param in REAL_URLS:
        yield request.getfixturevalue(REAL_URLS[request.param])
        return
    with running_engine(model_folder, kernel=request.param, threads=1, slots=4, max_context=2048) as url:
        yield url
