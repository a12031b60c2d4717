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
    """The size of the models' heads; vLLM has no kernel for a CPU that takes 24."""
    return 32 if request.config.getoption("--vllm") else 24


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, head_dim: int) -> Path:
    """Version 0."""
    return build_model(tmp_path_factory.mktemp("model0"), seed=0, head_dim=head_dim)


@pytest.fixture(scope="session")
def next_model_folder(tmp_path_factory: pytest.TempPathFactory, head_dim: int) -> Path:
    """Other weights of the same architecture."""
    return build_model(tmp_path_factory.mktemp("model1"), seed=1, head_dim=head_dim)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build_model in a fresh folder."""
    return lambda kind="qwen3", **options: build_model(tmp_path_factory.mktemp("model"), kind, **options)


@pytest.fixture(scope="session")
def sglang_url(sglang_python: str, model_folder: Path) -> Iterator[str]:
    """A real SGLang as a run starts it: it streams what is new, serves adapters, and prepares steps ahead."""
    with running_sglang(sglang_python, model_folder, lora_rank=16) as url:
        yield url


@pytest.fixture(scope="session")
def plain_sglang_url(sglang_python: str, model_folder: Path) -> Iterator[str]:
    """A real SGLang whose chunks are cumulative, and whose weights may be swapped in place."""
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
    """Each server that has to keep the contract; weights and pauses must be left as they were found."""
    reference = load_reference(model_folder)
    if request.param in REAL_URLS:
        url = request.getfixturevalue(REAL_URLS[request.param])
        asyncio.run(put_back(url, model_folder))  # other modules have swapped weights in it
        yield Target(url, model_folder, reference, embedded=False)
        return
    options = {
        "kernel": request.param,
        "threads": 1,
        "slots": 6,
        "max_context": MAX_CONTEXT,
        "prefill_tokens": 32,
        "incremental_streaming": request.param == "numba",  # the other one streams as SGLang does by default
    }
    with running_engine(model_folder, **options) as url:
        yield Target(url, model_folder, reference, embedded=True)


@pytest.fixture(scope="module", params=[*EVERY_SERVER, PLAIN_SGLANG])
def swapping_url(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[str]:
    """Each server whose weights are swapped; a test begins by putting version 0 back."""
    if request.param in REAL_URLS:
        yield request.getfixturevalue(REAL_URLS[request.param])
        return
    with running_engine(model_folder, kernel=request.param, threads=1, slots=4, max_context=2048) as url:
        yield url
