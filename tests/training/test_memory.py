"""Compares the estimate of the trainer's memory with real passes, and tests the settings chosen from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_support import build_moe
from torch import Tensor, nn
from training_support import VOCAB
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.config import Offload, TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.activations import Measurer
from areal_agents.training.memory.choices import settle, settled_within
from areal_agents.training.memory.estimate import Need, TrainerMemory
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.learner import Learner
from areal_agents.training.step.optimizer import make_optimizer

TOKENS = 768
LAYERS = 5


def build_dense(path: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    config = Qwen3Config(**sizes) if tied else LlamaConfig(**sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": build_dense(root / "qwen3", tied=True),
        "llama": build_dense(root / "llama", tied=False),
        "moe": build_moe(root / "moe"),
    }


def microbatch() -> MicroBatch:
    """Two packed samples with TOKENS tokens in total and no shared prefix; all but two tokens are trained."""
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate((TOKENS // 3, TOKENS - TOKENS // 3)):
        zeros = np.zeros(length, np.int32)
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=np.arange(length) > 0,
                behavior_logprobs=zeros.astype(np.float32),
                versions=zeros,
                temperatures=np.ones(length, np.float32),
                advantages=np.ones(length, np.float32),
                turn_index=zeros,
                episode_id=f"e{number}",
                group_id="g",
            )
        )
    (batch,) = pack(samples, token_budget=TOKENS, share_prefixes=False)
    return batch


class Kept:
    """Counts the bytes that a real forward pass saves for the backward pass, except sharded and gathered
    weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        weights = {p.untyped_storage()._cdata for p in self._plain(self._module.parameters())}
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            self._found[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._found.values())

    @staticmethod
    def _plain(parameters: Iterator[nn.Parameter]) -> Iterator[Tensor]:
        return (p for p in parameters if type(p) is nn.Parameter)


@pytest.mark.parametrize(
    ("model", "checkpointing", "lora"),
    [
        ("qwen3", "off", False),
        ("qwen3", "full", False),
        ("qwen3", 2, False),
        ("qwen3", 3, True),
        ("llama", "off", True),
        ("llama", "full", False),
        ("moe", "off", False),
        ("moe", "full", False),
    ],
)
def test_estimated_memory_matches_that_of_a_real_step(
    model: str, checkpointing: Any, lora: bool, folders: dict[str, Path], group: Ranks
) -> None:
    config = TrainerConfig(device="cpu", lora={"rank": 4} if lora else None)
    estimated = TrainerMemory(config, AlgorithmConfig(), folders[model], group, on_gpu=False)
    need = estimated.need(checkpointing, TOKENS)

    options = ModelOptions(
        activation_checkpointing=checkpointing, lora=LoraOptions(rank=4, alpha=32.0) if lora else None
    )
    policy = load_policy(folders[model], group, options=options)
    learner = Learner(policy, make_optimizer(policy, config), shards=1)
    kept = Kept(policy)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        logprobs = policy(microbatch())[0]
    assert need.activations == pytest.approx(kept.bytes, rel=0.1)

    learner.backward(logprobs.sum(), last=True)
    gradients = [p.grad.to_local() for p in policy.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    assert need.gradients == sum(g.nbytes for g in gradients)
    learner.step(1.0)
    state = [v for states in learner.optimizer.state.values() for v in states.values() if v.ndim]
    assert need.optimizer == pytest.approx(sum(v.to_local().nbytes for v in state), rel=0.01)
    weights = [p.to_local() for p in policy.parameters()]  # type: ignore[attr-defined]
    buffers = sum(b.nbytes for b in policy.buffers())
    assert need.masters + need.frozen == sum(w.nbytes for w in weights) + buffers


def test_the_estimate_of_an_8b_model_on_8_ranks_follows_from_its_sizes(tmp_path: Path) -> None:
    Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    states, embedding = 8_190_735_360, 151_936 * 4096
    block = (states - 2 * embedding - 4096) // 36
    code = f"""
from pathlib import Path
from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.training.config import TrainerConfig
from areal_agents.training.memory.choices import choose
from areal_agents.training.memory.estimate import TrainerMemory
from areal_agents.training.memory.states import fake_ranks
with fake_ranks(8) as ranks:
    known = {{}}
    memory = TrainerMemory(
        TrainerConfig(), AlgorithmConfig(), Path({str(tmp_path)!r}), ranks, on_gpu=True, measured=known
    )
    step = TrainerMemory(
        TrainerConfig(reshard="step"), AlgorithmConfig(), Path({str(tmp_path)!r}), ranks, on_gpu=True,
        measured=known,
    )
need = memory.need("full", 32768)
print(need.masters, need.optimizer, need.gradients, need.gathered, need.unsharded)
print(step.need("full", 32768).gathered, step.need("full", 32768).ending - need.ending)
print(need.activations, memory.activations(32768)[0].blocks[7], memory.cache_elements())
for policy in ("off", 4, "full"):
    peak = memory.need(policy, 32768).peak
    fits = choose(memory, peak, checkpointing="auto", tokens=0)
    less = choose(memory, peak - 1, checkpointing="auto", tokens=0)
    print(fits.checkpointing, fits.tokens, less.checkpointing, less.tokens)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert not done.returncode, done.stderr
    sizes, (whole, more_at_the_end), saved, *chosen = [line.split() for line in done.stdout.splitlines()]
    root = embedding + 4096
    assert list(map(int, sizes)) == [
        states * 4 // 8,
        states * 8 // 8,
        states * 4 // 8,
        (root + 3 * block) * 2,
        root * 2 + block * (2 + 2 * 4),
    ]
    assert int(whole) == (states + 2 * block) * 2  # all weights, and the buffers of a block
    assert int(more_at_the_end) == (states - root - embedding) * 2  # the weights of the blocks
    # 36 inputs, and what the final norm and the logprobs keep: four arrays of hidden states, one in float32
    hidden = 32768 * 4096 * 2
    assert int(saved[0]) == pytest.approx(36 * hidden + 4 * hidden, rel=0.01)
    assert int(saved[1]) / 32768 == pytest.approx(210 * 1024, rel=0.01)  # measured independently of this code
    assert float(saved[2]) == 36 * 2 * 8 * 128
    assert chosen == [
        ["off", "32768", "8", "32768"],
        ["4", "32768", "3", "32768"],
        ["full", "32768", "full", "24576"],
    ]


def test_a_critic_and_a_separate_reference_are_counted(folders: dict[str, Path], group: Ranks) -> None:
    def need(algorithm: dict[str, Any], **config: Any) -> Need:
        chosen = TrainerConfig(device="cpu", **config)
        memory = TrainerMemory(
            chosen, AlgorithmConfig.model_validate(algorithm), folders["llama"], group, on_gpu=False
        )
        return memory.need("off", TOKENS)

    alone, kl = need({}), need({"kl_in": {"kind": "loss", "kl_coefficient": 0.1}})
    assert (kl.masters, kl.optimizer) == (alone.masters, alone.optimizer)
    assert kl.frozen == pytest.approx(alone.masters, rel=0.01)
    ppo = need({"preset": "ppo"})
    head = VOCAB * 64 * 4
    assert ppo.masters == 2 * alone.masters - head + 65 * 4
    adapter, adapter_kl = (
        need({}, lora={"rank": 4}),
        need({"kl_in": {"kind": "loss", "kl_coefficient": 0.1}}, lora={"rank": 4}),
    )
    assert adapter_kl == adapter  # the adapter is switched off instead


def test_tensors_in_host_memory_are_not_counted_for_the_gpu(folders: dict[str, Path], group: Ranks) -> None:
    def need(offload: Offload) -> Need:
        config = TrainerConfig(device="cpu", offload=offload)
        return TrainerMemory(config, AlgorithmConfig(), folders["qwen3"], group, on_gpu=False).need("off", 64)

    here, away, all_away = need("none"), need("optimizer"), need("all")
    assert (away.optimizer, away.on_host) == (0, here.optimizer)
    assert 0 < away.step < here.optimizer / 2  # one block at a time
    assert (all_away.idle, all_away.gradients, all_away.step) == (0, 0, 0)
    assert all_away.on_host == here.idle + here.gradients
    assert all_away.gathered == here.gathered + 160 * 64 * 4  # the largest parameter arrives in float32


def test_settings_that_do_not_fit_are_refused_or_tried_and_the_longest_sample_fits(
    folders: dict[str, Path], group: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainerConfig(device="cpu")
    memory = TrainerMemory(config, AlgorithmConfig(), folders["qwen3"], group, on_gpu=False)
    plenty = memory.need("off", 4096).peak
    assert settled_within(config, memory, plenty, longest=0).microbatch_tokens == 4096
    assert settled_within(config, memory, plenty * 2, longest=5000).microbatch_tokens == 5000
    some = memory.need("full", 2500).peak  # enough for the longest sample, if every block is recomputed
    chosen = settled_within(config, memory, some, longest=2500)
    assert (chosen.microbatch_tokens, chosen.activation_checkpointing) == (2500, "full")
    assert not caplog.records

    assert settled_within(config, memory, some, longest=4000).microbatch_tokens < 4000
    assert "a sample may have up to 4000 tokens" in caplog.text
    with pytest.raises(TrainingError, match=r"plan shows what would help; trainer.memory_check: warn tries"):
        settled_within(config, memory, 1000, longest=0)
    warned = TrainerConfig(device="cpu", memory_check="warn")
    least = settled_within(warned, memory, 1000, longest=0)
    assert (least.microbatch_tokens, least.activation_checkpointing) == (1024, "full")
    assert "the run continues, because trainer.memory_check is warn" in caplog.text


def test_a_model_that_cannot_be_measured_is_trained_with_conservative_settings(
    folders: dict[str, Path], group: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def reads_a_value(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors\nmore")

    monkeypatch.setattr(Measurer, "measure", reads_a_value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**34))
    on_gpu = replace(group, device=torch.device("cuda"))
    for folder, reason in ((folders["qwen3"], "cannot be called on meta tensors"), (tmp_path, "cannot load")):
        caplog.clear()
        settled = settle(TrainerConfig(), AlgorithmConfig(), folder, on_gpu, longest=9000)
        assert (settled.dtype, settled.activation_checkpointing) == ("bfloat16", "full")
        assert settled.microbatch_tokens == 9000
        (record,) = caplog.records
        assert f"the memory of the model {folder} is not known" in record.getMessage()
        assert reason in record.getMessage()
    monkeypatch.setattr(Measurer, "measure", lambda *_: {}["a mistake of ours"])
    with pytest.raises(KeyError):
        settle(TrainerConfig(), AlgorithmConfig(), folders["qwen3"], on_gpu)


def test_on_a_cpu_defaults_are_used_and_given_settings_are_kept(
    folders: dict[str, Path], group: Ranks
) -> None:
    settled = settle(TrainerConfig(), AlgorithmConfig(), folders["qwen3"], group)
    assert (settled.dtype, settled.activation_checkpointing, settled.microbatch_tokens) == (
        "float32",
        "off",
        4096,
    )
    assert (
        settle(TrainerConfig(), AlgorithmConfig(), folders["qwen3"], group, longest=6000).microbatch_tokens
        == 6000
    )
    given = TrainerConfig(dtype="bfloat16", activation_checkpointing=3, microbatch_tokens=512)
    assert settle(given, AlgorithmConfig(), folders["qwen3"], group) == given
