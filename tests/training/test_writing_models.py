"""A folder of weights is complete or absent, however it is written."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_agents.errors import TrainingError
from areal_agents.training.model.folder import ModelFolder, write_model


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Make writes beyond `most` bytes of a file fail, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)


def test_transformers_loads_a_folder_as_it_was_written(model_folder: Path, tmp_path: Path) -> None:
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


def test_tensors_may_be_added_in_any_order_and_written_to_several_files(
    model_folder: Path, tmp_path: Path
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    weights["a.scalar"] = torch.tensor(3.0)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    folder = ModelFolder(tmp_path / "v1", shapes, like=model_folder, dtype=torch.float32, shard_bytes=20_000)
    for name in reversed(weights):
        assert not (tmp_path / "v1").exists()
        folder.add(name, weights[name].t().contiguous().t())  # not in the memory layout of the file
    folder.finish()
    files = sorted((tmp_path / "v1").glob("*.safetensors"))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and read.keys() == weights.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_a_folder_is_replaced_and_has_the_requested_type(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    path = tmp_path / "final"
    write_model(weights, path, like=model_folder, dtype=torch.float32)
    write_model(weights, path, like=model_folder, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(path / "model.safetensors").values()} == {torch.bfloat16}


def test_a_failed_write_is_an_error_and_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    for most in (50_000, 100):  # in the middle of the weights, before them
        with full_disk(most), pytest.raises(TrainingError, match="cannot write the weights to"):
            write_model(weights, tmp_path / "out" / "final", like=model_folder, dtype=torch.float32)
        assert list((tmp_path / "out").iterdir()) == []
