"""`areal-agents plan`, and the refusal of runs that do not fit; of the models there is config.json only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from transformers import Qwen3Config

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch import train as launching
from areal_agents.launch.gpus import Machine
from areal_agents.launch.plan import check_gpus, engine_bytes_in_training

GIB = 2**30
SGLANG = {"kind": "sglang", "python": "/nowhere/bin/python"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 million weights in four layers."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=32_000, tie_word_embeddings=False,
        max_position_embeddings=16_384, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    assert not [*folder.glob("*.safetensors")]
    return folder


def config_file(folder: Path, model: Path, **settings: object) -> Path:
    (folder / "tasks.jsonl").write_text('{"question": "?"}\n')
    tree = {"model": str(model), "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}, **settings}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def load(folder: Path, model: Path, **settings: object) -> Config:
    return load_config(config_file(folder, model, **settings))


def plan(path: Path, *overrides: str, gpus: int, gib: float) -> tuple[int, str]:
    """The exit status and the output of the command; in a process of its own, as it makes a process group."""
    command = [sys.executable, "-m", "areal_agents", "plan", str(path), *overrides]
    command += ["--gpus", str(gpus), "--gpu-memory", str(gib)]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def numbers(output: str, row: str, *, title: str = "") -> list[float]:
    """The numbers in a row of the first table after a title."""
    lines = output[output.index(title) :].splitlines()
    line = next(line for line in lines if row in line)
    return [float(cell) for cell in re.findall(r"[\d.]+", line.replace(row, ""))]


def test_the_command_prints_the_budget_and_says_whether_it_fits(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, model, engine={**SGLANG, "colocate": "sleep"})
    status, output = plan(path, gpus=1, gib=80)
    assert status == 0 and "The run fits." in output and "activation_checkpointing: off" in output
    assert numbers(output, "trained weights, float32") == [2.4] * 2  # 634 million; not while it samples
    assert numbers(output, "optimizer ") == [4.7] * 2
    assert numbers(output, "gradients") == [2.4] * 2
    assert numbers(output, "capacity") == [80.0] * 3
    parts = [
        "trained weights, float32", "optimizer ", "gradients", "gathered", "gradient of a block, whole",
        "activations", "temporary, in a block or the head", "CUDA, NCCL, fragmentation",
    ]  # fmt: skip
    total = sum(numbers(output, part)[0] for part in parts)
    assert numbers(output, "total")[0] == pytest.approx(total, abs=0.5)

    status, output = plan(path, gpus=1, gib=12)
    assert status == 1
    assert re.search(r"does not fit: GPU 0: the trainer and the engines \(\d+\.\d of 12\.0 GiB\)", output)


def test_what_is_suggested_fits(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, model, engine={**SGLANG, "colocate": "sleep", "memory_fraction": 0.3})
    status, output = plan(path, gpus=4, gib=12)
    suggestions = output.rpartition("It would fit with: ")[2].strip().removesuffix(".").split("; or ")
    assert status == 1 and len(suggestions) >= 2
    for suggestion in (suggestions[0], suggestions[-1]):
        overrides = [part.replace(": ", "=", 1) for part in suggestion.split(", ")]
        assert plan(path, *overrides, gpus=4, gib=12)[0] == 0, suggestion


def test_engines_of_their_own_have_the_rest_for_keys_and_values(tmp_path: Path, model: Path) -> None:
    engine = {**SGLANG, "tensor_parallel": 2, "memory_fraction": 0.5}
    status, output = plan(config_file(tmp_path, model, engine=engine), gpus=3, gib=80)
    assert status == 0 and "GPU 0: the trainer\n" in output.replace(" \n", "\n").replace("  ", "")
    title = "GPU 1-2: the engines"
    (weights,), (room,) = (numbers(output, row, title=title) for row in ("weights", "keys and values"))
    assert weights == 0.6 and weights + room == 40.0
    tokens = int(re.search(r"values of\s+([\d,]+)", output)[1].replace(",", ""))  # type: ignore[index]
    # 8 layers of keys and values in bfloat16, of half of the 8 heads
    assert tokens == pytest.approx(room * GIB / (8 * 2 * 4 * 128 * 2), rel=0.002)


def test_memory_of_colocated_engines_during_a_step(tmp_path: Path, model: Path) -> None:
    def held(**engine: object) -> int:
        return engine_bytes_in_training(load(tmp_path, model, engine=engine), 80 * GIB)

    assert held(**SGLANG, colocate="split") == 32 * GIB
    assert held(**SGLANG, colocate="sleep") == 0
    assert held(device="cuda", colocate="sleep") == 2 * 634_425_344  # only keys and values are released
    assert held() == 0


def test_gpus_that_are_not_there_or_shared_unintendedly(tmp_path: Path, model: Path) -> None:
    def check(gpus: int, **settings: object) -> None:
        check_gpus(load(tmp_path, model, **settings), Machine(gpus, 80 * GIB))

    with pytest.raises(ConfigError, match="trainer.ranks: 4 ranks need as many GPUs .* there are 2"):
        check(2, trainer={"ranks": 4, "device": "cuda"})
    with pytest.raises(ConfigError, match=r"puts an engine on GPU 0, which the trainer uses.*cuda:1"):
        check(2, engine={"device": "cuda"})
    with pytest.raises(ConfigError, match="puts an engine on GPU 1, which the trainer uses"):
        check(2, engine={**SGLANG, "device": "cuda:1"}, trainer={"ranks": 2})
    check(2, engine={"device": "cuda:1"})
    check(1, engine={"device": "cuda", "colocate": "split"})
    check(1, engine={"device": "cuda"}, trainer={"device": "cpu"})


def test_train_refuses_before_it_starts_anything(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "this_machine", lambda: Machine(1, 12 * GIB))
    config = load(tmp_path, model, run_dir=str(tmp_path / "run"), trainer={"trackers": []})
    with pytest.raises(ConfigError, match=r"does not fit: GPU 0: the trainer .*trainer\.lora: {}"):
        launching.train(config, console=Console(quiet=True))
    assert not [*(tmp_path / "run" / "logs").glob("*.log")]
