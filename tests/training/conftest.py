"""One engine, one model and one process group for the training tests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_sglang import running_sglang
from training_support import add_tokenizer, build_model, put_back

from areal_agents.inference import running_engine
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.model import Policy, load_policy


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread, so that the order of sums is fixed and other cores are left to the servers."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings."""
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def running_engine_url(model_folder: Path) -> Iterator[str]:
    """A running embedded engine. Tests leave it unpaused, with any weights; `engine_url` resets it."""
    with running_engine(model_folder, kernel="torch", threads=1, slots=16, max_context=256) as url:
        yield url


@pytest.fixture
def engine_url(running_engine_url: str, model_folder: Path) -> str:
    """The engine, serving the initial weights as version 0."""
    asyncio.run(put_back(running_engine_url, model_folder))
    return running_engine_url


@pytest.fixture(scope="session")
def sglang_url(
    sglang_python: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A real SGLang on the tiny model. Tests leave it unpaused, with any weights; `served_url` resets it."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("sglang") / "model")
    add_tokenizer(folder)
    with running_sglang(sglang_python, folder, lora_rank=16) as url:
        yield url


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def served_url(request: pytest.FixtureRequest, model_folder: Path) -> str:
    """Each engine that must support every transport, serving the initial weights as version 0."""
    if request.param == "embedded":
        return str(request.getfixturevalue("engine_url"))
    url = str(request.getfixturevalue("sglang_url"))
    asyncio.run(put_back(url, model_folder))
    return url


@pytest.fixture(scope="session")
def group() -> Iterator[Ranks]:
    """A process group of one rank."""
    with ranks("cpu") as joined:
        yield joined


@pytest.fixture
def policy(model_folder: Path, group: Ranks) -> Policy:
    """The tiny model as a policy to be trained."""
    return load_policy(model_folder, group)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets so small that weights which would fit into one are sent in several."""
    monkeypatch.setattr("areal_agents.training.publish.transports.MB", 100)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def store(run_dir: Path) -> Iterator[Store]:
    """The run's store."""
    with Store.open(run_dir / "store.db") as opened:
        yield opened
