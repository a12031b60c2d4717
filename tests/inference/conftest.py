"""Models and servers that the inference tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inference_support import MAX_CONTEXT, Target, build_model, load_reference

from areal_agents.inference import running_engine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 0."""
    return build_model(tmp_path_factory.mktemp("model0"), seed=0)


@pytest.fixture(scope="session")
def next_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same architecture."""
    return build_model(tmp_path_factory.mktemp("model1"), seed=1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build_model in a fresh folder."""
    return lambda kind="qwen3", **options: build_model(tmp_path_factory.mktemp("model"), kind, **options)


# A real SGLang server on the folder that AREAL_TEST_SGLANG_MODEL names joins the list when its URL is given.
TARGETS = ["numba", "torch"] + (["sglang"] if "AREAL_TEST_SGLANG_URL" in os.environ else [])


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Target]:
    """Each server that has to keep the contract; weights and pauses must be left as they were found."""
    if request.param == "sglang":
        folder = Path(os.environ["AREAL_TEST_SGLANG_MODEL"])
        yield Target(os.environ["AREAL_TEST_SGLANG_URL"], folder, load_reference(folder), embedded=False)
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
        yield Target(url, model_folder, load_reference(model_folder), embedded=True)
