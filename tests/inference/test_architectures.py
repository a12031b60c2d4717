"""Both runners compute the same logits as transformers, for each architecture, in one pass or in chunks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_support import MAX_CONTEXT, load_reference, prompt_of
from safetensors.torch import load_file, save_file

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.errors import ConfigError
from areal_agents.inference import EmbeddedEngineConfig
from areal_agents.inference.embedded.model import kernels
from areal_agents.inference.embedded.model.architecture import read_architecture
from areal_agents.inference.embedded.model.numba_runner import NumbaRunner
from areal_agents.inference.embedded.model.runner import ModelRunner, Rows
from areal_agents.inference.embedded.model.torch_runner import TorchRunner
from areal_agents.inference.embedded.model.weights import load_weights, random_weights
from areal_agents.inference.embedded.server import make_runner as choose_runner
from areal_agents.inference.embedded.updates.checksum import hash_weights

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-odd-groups": ("qwen3", {"num_attention_heads": 6}),
    "qwen3-sharded": ("qwen3", {"shard": "60KB"}),
    "qwen3-yarn": (
        "qwen3",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }},
    ),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    ),
}  # fmt: skip


def make_runner(kind: str, folder: Path, *, threads: int = 1, slots: int = 3) -> ModelRunner:
    arch = read_architecture(folder)
    runner: ModelRunner
    if kind == "numba":
        runner = NumbaRunner(arch, slots=slots, max_context=MAX_CONTEXT, max_rows=256, threads=threads)
    else:
        cpu = torch.device("cpu")
        runner = TorchRunner(arch, slots=slots, max_context=MAX_CONTEXT, device=cpu, dtype=torch.float32)
    runner.load(load_weights(folder, arch))
    return runner


def rows_of(*segments: tuple[int, int, TokenIds]) -> Rows:
    """Return rows for segments (slot, first position, tokens) that request the logits of every row."""
    lengths = [len(tokens) for _, _, tokens in segments]
    return Rows(
        tokens=np.concatenate([tokens for _, _, tokens in segments]).astype(np.int32),
        slots=np.repeat([slot for slot, _, _ in segments], lengths).astype(np.int32),
        positions=np.concatenate([first + np.arange(len(t)) for _, first, t in segments]).astype(np.int32),
        prefix_slots=np.zeros(sum(lengths), np.int32),
        prefix_lengths=np.zeros(sum(lengths), np.int32),
        segment_starts=np.cumsum([0, *lengths]).astype(np.int32),
        outputs=np.arange(sum(lengths), dtype=np.int32),
    )


@torch.inference_mode()
def reference_logits(folder: Path, ids: TokenIds) -> np.ndarray:
    return load_reference(folder)(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, kind: str, make_model: Callable[..., Path]) -> None:
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    ids = prompt_of(150)
    logits = make_runner(kind, folder).forward(rows_of((1, 0, ids))).numpy()
    np.testing.assert_allclose(logits, reference_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_rows_of_several_slots_do_not_mix(kind: str, model_folder: Path) -> None:
    a, b = prompt_of(40, seed=1), prompt_of(23, seed=2)
    runner = make_runner(kind, model_folder)
    runner.forward(rows_of((0, 0, a[:17]), (2, 0, b[:22])))
    logits = runner.forward(rows_of((0, 17, a[17:]), (2, 22, b[22:]))).numpy()
    np.testing.assert_allclose(logits[:23], reference_logits(model_folder, a)[17:], atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[23:], reference_logits(model_folder, b)[22:], atol=1e-4, rtol=0)


def test_a_row_is_bitwise_the_same_alone_chunked_copied_and_on_two_threads(model_folder: Path) -> None:
    """The numba kernel guarantees this, so that seeded sampling does not depend on the rest of the batch."""
    ids, other = prompt_of(61, seed=3), prompt_of(30, seed=4)
    whole = make_runner("numba", model_folder).forward(rows_of((0, 0, ids))).numpy()[-1].copy()

    runner = make_runner("numba", model_folder, threads=2)
    for first in range(0, 60, 7):
        runner.forward(rows_of((0, first, ids[first : min(first + 7, 60)]), (1, first, other[:3])))
    runner.copy_prefix(0, 2, 60)
    together = runner.forward(rows_of((2, 60, ids[60:]), (1, 63, other), (0, 60, ids[60:]))).numpy()
    assert np.array_equal(together[0], whole)
    assert np.array_equal(together[-1], whole)


def test_a_token_with_an_infinite_embedding_changes_no_row_before_it(model_folder: Path) -> None:
    """Rows of one slot are computed together, but no row depends on later ones."""
    ids = prompt_of(80, seed=5)
    broken = int(np.setdiff1d(np.arange(8, 200), ids)[0])
    sound = make_runner("numba", model_folder).forward(rows_of((0, 0, ids))).numpy().copy()
    runner = make_runner("numba", model_folder)
    assert isinstance(runner, NumbaRunner)
    embedding, *others = runner._weights
    embedding = embedding.copy()
    embedding[broken] = np.inf
    runner._weights = (embedding, *others)
    logits = runner.forward(rows_of((0, 0, as_token_ids([*ids, broken])))).numpy()
    assert np.array_equal(logits[:80], sound)
    assert not np.isfinite(logits[80]).any()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000])
def test_a_token_sampled_from_logits_with_a_nan_of_either_sign_has_a_nan_logprob(bits: int) -> None:
    logits = np.zeros((1, 50), np.float32)
    logits.view(np.uint32)[0, 7] = bits
    tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    kernels.sample(
        logits, np.ones(1, np.float32), np.array([0.5]), tokens, logprobs, np.zeros(50, np.float32)
    )
    assert np.isnan(logprobs[0])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "sliding-window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_an_unsupported_setting_is_named_in_the_error(
    overrides: dict, named: str, make_model: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_architecture(make_model("qwen3", **overrides))


def test_an_unknown_model_type_is_refused(model_folder: Path, tmp_path: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text()) | {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="Qwen2, Qwen3, Llama"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors, the first is model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \(3,\), expected \(64,\)"),
        (lambda t: t.update({"model.extra": torch.ones(3)}), "model.extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable, message: str, model_folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(model_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_weights(tmp_path, read_architecture(model_folder))


def test_a_folder_without_weights_or_with_a_broken_file_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    arch = read_architecture(model_folder)
    with pytest.raises(ConfigError, match=r"no .safetensors"):
        load_weights(tmp_path, arch)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(tmp_path, arch)


def test_dummy_weights_depend_on_the_seed_alone(model_folder: Path) -> None:
    arch = read_architecture(model_folder)
    sums = [hash_weights(random_weights(arch, seed), arch) for seed in (1, 1, 2)]
    assert sums[0] == sums[1] != sums[2]


def test_bfloat16_is_close_to_float32(model_folder: Path) -> None:
    arch = read_architecture(model_folder)
    runner = TorchRunner(arch, slots=1, max_context=256, device=torch.device("cpu"), dtype=torch.bfloat16)
    runner.load(load_weights(model_folder, arch))
    ids = prompt_of(60)
    logits = runner.forward(rows_of((0, 0, ids)))
    assert (logits != logits.bfloat16()).float().mean() > 0.9  # logits are summed and stored in float32
    logprobs = torch.log_softmax(logits, dim=-1).numpy()
    expected = torch.log_softmax(torch.from_numpy(reference_logits(model_folder, ids)), dim=-1).numpy()
    assert 1e-4 < np.abs(logprobs - expected).mean() < 0.05


@pytest.mark.parametrize(
    ("options", "installed", "kind"),
    [
        ({}, True, "numba"),
        ({"kernel": "torch"}, True, "torch"),
        ({"dtype": "bfloat16"}, True, "torch"),
        ({}, False, "torch"),
    ],
)
def test_the_kernel_depends_on_the_settings_and_on_whether_numba_is_installed(
    options: dict, installed: bool, kind: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "numba", None)  # an import fails as if the package were missing
    config = EmbeddedEngineConfig(model=str(model_folder), slots=2, **options)
    runner = choose_runner(config, read_architecture(model_folder), max_context=64, threads=1)
    assert runner.kind == kind


def test_kernel_numba_is_refused_where_it_cannot_compute(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="float32 on a CPU"):
        EmbeddedEngineConfig(model="m", kernel="numba", dtype="bfloat16")
    monkeypatch.setitem(sys.modules, "numba", None)
    config = EmbeddedEngineConfig(model=str(model_folder), kernel="numba")
    with pytest.raises(ConfigError, match="numba is not installed"):
        choose_runner(config, read_architecture(model_folder), max_context=64, threads=1)


def test_tied_embeddings_are_placed_once_and_memory_of_a_gpu_is_returned(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("qwen3", tie_word_embeddings=True)
    arch = read_architecture(folder)
    runner = TorchRunner(arch, slots=1, max_context=256, device=torch.device("cpu"), dtype=torch.bfloat16)
    placed = runner.place(load_weights(folder, arch))
    assert placed.embedding.dtype == torch.bfloat16 and placed.lm_head is placed.embedding
    returned: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append("once"))
    runner.return_memory()
    assert not returned
    monkeypatch.setattr(runner, "_device", torch.device("cuda"))
    runner.return_memory()
    assert returned == ["once"]
