"""A version leaves the trainer whole, and the engine goes on whatever happens."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_support import build_model
from transformers import AutoModelForCausalLM

from areal_agents.core.completion import SamplingParams, as_token_ids
from areal_agents.errors import EngineError, EngineUnavailable, TrainingError
from areal_agents.inference import PauseMode, SGLangEngine
from areal_agents.store import Store
from areal_agents.training.model_folder import write_model
from areal_agents.training.publish import Publisher, swap


def test_a_folder_is_what_transformers_loads(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    for file in model_folder.iterdir():
        (tmp_path / "like" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "like" / "tokenizer.json").write_text("{}")
    (tmp_path / "like" / "pytorch_model.bin").write_text("stale weights")
    weights = {name: tensor + 1 for name, tensor in load_file(model_folder / "model.safetensors").items()}
    path = tmp_path / "weights" / "v3"
    write_model(weights, path, like=tmp_path / "like", dtype=torch.float32)
    assert sorted(p.name for p in path.iterdir()) == sorted(
        {*(p.name for p in model_folder.iterdir()), "tokenizer.json"}
    )
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert [p.name for p in path.parent.iterdir()] == ["v3"]  # no temporary name is left


def test_a_folder_is_replaced_and_its_type_is_the_one_asked_for(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    path = tmp_path / "final"
    write_model(weights, path, like=model_folder, dtype=torch.float32)
    write_model(weights, path, like=model_folder, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(path / "model.safetensors").values()} == {torch.bfloat16}


def test_a_refusing_disk_is_an_error_and_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # larger files fail, as on a full disk
    try:
        with pytest.raises(TrainingError, match="cannot write the weights to"):
            write_model(weights, tmp_path / "out" / "final", like=model_folder, dtype=torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_run_left_half_written_is_removed(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    left, kept = run_dir / "weights" / ".v3.99.tmp", run_dir / "weights" / "v2"
    left.mkdir(parents=True)
    kept.mkdir()
    Publisher(
        store=store, engine=SGLangEngine(engine_url), run_dir=run_dir, model_path=model_folder, keep=2
    ).close()
    assert list((run_dir / "weights").iterdir()) == [kept]


def test_versions_are_recorded_served_and_the_last_two_kept(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    publisher = Publisher(
        store=store, engine=SGLangEngine(engine_url), run_dir=run_dir, model_path=model_folder, keep=2
    )
    weights = load_file(model_folder / "model.safetensors")
    for version in range(12):
        published = publisher.publish(weights, version=version, step=version, dtype=torch.float32)
        assert 0 < published.pause_s < published.publish_s
    publisher.close()
    assert sorted(p.name for p in (run_dir / "weights").iterdir()) == ["v10", "v11"]
    latest = store.latest_version()
    assert latest is not None and (latest.version, latest.path) == (11, str(run_dir / "weights" / "v11"))


def test_tokens_after_a_swap_carry_the_new_version(engine_url: str, tmp_path: Path) -> None:
    other = build_model(tmp_path, seed=7)

    async def play() -> np.ndarray:
        async with SGLangEngine(engine_url) as generating, SGLangEngine(engine_url) as swapping:
            sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
            running = asyncio.create_task(generating.generate("r", as_token_ids([2, 3, 4]), sampling))
            for version in (1, 2):
                await swap(swapping, str(other), version)
            return (await running).versions

    versions = asyncio.run(play())
    assert len(versions) == 200 and (np.diff(versions) >= 0).all() and versions[-1] == 2


def test_an_engine_that_refuses_the_weights_goes_on_with_the_old_ones(
    engine_url: str, tmp_path: Path
) -> None:
    async def play() -> list[int]:
        async with SGLangEngine(engine_url) as engine:
            with pytest.raises(EngineError):
                await swap(engine, str(tmp_path / "nowhere"), 1)
            completion = await engine.generate(
                "r", as_token_ids([2, 3]), SamplingParams(max_new_tokens=3, ignore_eos=True)
            )
            return completion.versions.tolist()

    assert asyncio.run(play()) == [0, 0, 0]


class LossyEngine(SGLangEngine):
    """The real client on a connection that loses the answers of the named calls."""

    def __init__(self, url: str, *, loses: tuple[str, ...]) -> None:
        super().__init__(url)
        self._loses = loses

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self._lose("pause")

    async def resume(self) -> None:
        await super().resume()
        self._lose("resume")

    def _lose(self, call: str) -> None:
        if call in self._loses:
            raise EngineUnavailable(f"the answer to {call} was lost")


@pytest.mark.parametrize("loses", [("pause",), ("pause", "resume")])
def test_a_lost_answer_to_the_pause_does_not_leave_the_engine_paused(
    engine_url: str, model_folder: Path, loses: tuple[str, ...]
) -> None:
    async def play() -> int:
        async with LossyEngine(engine_url, loses=loses) as engine:
            with pytest.raises(EngineUnavailable, match="pause was lost"):  # the first error, not the last
                await swap(engine, str(model_folder), 1)
            return len(await engine.generate("r", as_token_ids([2, 3]), SamplingParams(max_new_tokens=1)))

    async def bounded() -> int:
        try:
            return await asyncio.wait_for(play(), 20)
        finally:
            async with SGLangEngine(engine_url) as engine:
                await engine.resume()  # whatever happened, the module's other tests need it

    assert asyncio.run(bounded()) == 1
