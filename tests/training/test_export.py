"""An exported checkpoint is a plain model folder, from which transformers loads the trained weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_support import build_model, random_group, training_data
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import ConfigError, TrainingError
from areal_agents.training.checkpoint.checkpoint import Checkpoints, TrainingProgress
from areal_agents.training.checkpoint.export import export, facts_of, lora_options
from areal_agents.training.config import LoraConfig, TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.folder import write_model
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, train_batch


def save_run(model: Path, run: Path, group: Ranks, lora: LoraConfig | None = None) -> dict[str, torch.Tensor]:
    """Write a run folder with a checkpoint, and return the weights that the policy had in it."""
    config = TrainerConfig(lr=1e-2, lora=lora)
    policy = load_policy(model, group, options=ModelOptions(lora=lora_options(lora)))
    optimizer = make_optimizer(policy, config)
    for seed in range(2):  # the first step of an adapter changes only one of its two factors
        data = training_data(random_group(np.random.default_rng(seed), group_id="g"))
        options = StepOptions(microbatch_tokens=4096, share_prefixes=True, grad_clip=1.0)
        train_batch(policy, optimizer, data, AlgorithmConfig(), options, ranks=group, version=0, seed=seed)
    checkpoints = Checkpoints(run / "checkpoints", group, facts=facts_of(config, model), wait=True)
    checkpoints.save({"policy": (policy, optimizer)}, TrainingProgress(1, 1))
    return policy.full_state_dict()


@pytest.fixture
def source(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder with a tokenizer file beside the weights."""
    folder = build_model(tmp_path / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_transformers_loads_the_trained_weights(
    source: Path, tmp_path: Path, group: Ranks, lora: LoraConfig | None
) -> None:
    want = save_run(source, tmp_path / "run", group, lora)
    before = load_file(source / "model.safetensors")
    assert any((want[name] != before[name]).any() for name in before)
    assert export(tmp_path / "run", tmp_path / "out") == tmp_path / "run" / "checkpoints" / "step-1"
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not any("lora" in name for name in got)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {file.name for file in source.iterdir()} >= {"config.json", "tokenizer.json"}


def test_an_export_can_have_many_shards_and_another_type(source: Path, tmp_path: Path, group: Ranks) -> None:
    want = save_run(source, tmp_path / "run", group)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    export(checkpoint, tmp_path / "out", dtype="bfloat16", shard_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "out" / name).stat().st_size < 25_000 for name in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in want.values())
    assert set(index["weight_map"]) == set(want) and set(index["weight_map"].values()) == set(files)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    got = model.state_dict()
    assert all(torch.equal(got[name], want[name].bfloat16()) for name in want)


def test_a_sharded_folder_can_be_loaded(source: Path, tmp_path: Path, group: Ranks) -> None:
    weights = load_file(source / "model.safetensors")
    write_model(weights, tmp_path / "out", like=source, dtype=torch.float32, shard_bytes=20_000)
    loaded = load_policy(tmp_path / "out", group).full_state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_an_impossible_export_is_refused_with_the_reason(source: Path, tmp_path: Path, group: Ranks) -> None:
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        export(tmp_path, tmp_path / "out")
    save_run(source, tmp_path / "run", group)
    with pytest.raises(ConfigError, match="--dtype"):
        export(tmp_path / "run", tmp_path / "out", dtype="int8")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        export(tmp_path / "run", source)
    (shard,) = (tmp_path / "run" / "checkpoints" / "step-1").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(TrainingError, match=f"is damaged: .*{shard.name}"):
        export(tmp_path / "run", tmp_path / "out")
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match="which no longer exists"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
