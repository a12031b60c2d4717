"""Models that are supported compute what transformers computes, and the others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families_support import WINDOW, build_family, build_tiny, tiny_config
from model_support import packed, reference, samples
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import attention
from areal_agents.training.model.compatibility import check_layers, logit_scale
from areal_agents.training.model.model import ModelOptions, load_policy

SINKS = ["gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash"]


def assert_as_transformers(folder: Path, group: Ranks, **options: Any) -> None:
    """Assert that logprobs and gradients with shared prefixes equal those of transformers by sequence."""
    got = packed(load_policy(folder, group, options=ModelOptions(**options)), samples())
    want = reference(folder, samples())
    for got_logprobs, want_logprobs in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(got_logprobs, want_logprobs, atol=1e-5, rtol=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        error = (got[1][name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 5e-5, (name, float(error))


@pytest.mark.parametrize("family", SINKS)
def test_attention_sinks_are_computed_as_in_transformers(family: str, tmp_path: Path, group: Ranks) -> None:
    folder = build_family(family, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert max(len(sample) for sample in samples()) > 2 * WINDOW == 2 * config.sliding_window
    assert "sliding_attention" in config.layer_types
    assert_as_transformers(folder, group)


def test_sinks_change_the_logprobs_and_are_trained(tmp_path: Path, group: Ranks) -> None:
    folder = build_family("gpt_oss", tmp_path)

    def without(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-torch.inf)

    logprobs, gradients = packed(load_policy(folder, group), samples())
    plain = torch.cat(reference(folder, samples(), change=without)[0])
    assert (torch.cat(logprobs) - plain).abs().max() > 0.1
    sinks = [gradient for name, gradient in gradients.items() if name.endswith("sinks")]
    assert len(sinks) == 2 and all((gradient != 0).all() for gradient in sinks)


def test_activation_checkpointing_changes_nothing_with_sinks_and_windows(
    tmp_path: Path, group: Ranks
) -> None:
    assert_as_transformers(build_family("gpt_oss", tmp_path), group, activation_checkpointing="full")


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text", "cohere2", "exaone4"])
def test_sliding_windows_are_computed_as_in_transformers(family: str, tmp_path: Path, group: Ranks) -> None:
    config = tiny_config(family)
    if family == "qwen2":
        config.layer_types = ["full_attention", "sliding_attention"]
        config.use_sliding_window, config.sliding_window = True, WINDOW
    assert config.sliding_window == WINDOW
    assert_as_transformers(build_tiny(config, tmp_path), group)


@pytest.mark.parametrize(
    ("family", "settings", "scale"),
    [
        ("cohere", {"logit_scale": 0.25}, 0.25),
        ("granite", {"logits_scaling": 8.0}, 0.125),
        ("granite", {"logits_scaling": 1.0}, 1.0),
        ("minicpm3", {"dim_model_base": 8}, 0.25),  # it divides the hidden states before the head
    ],
)
def test_scaled_logits_are_computed_as_in_transformers(
    family: str, settings: dict[str, Any], scale: float, tmp_path: Path, group: Ranks
) -> None:
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    folder = build_tiny(config, tmp_path)
    assert load_policy(folder, group).logit_scale == pytest.approx(scale, rel=1e-6)
    assert_as_transformers(folder, group)


@pytest.mark.parametrize("family", ["afmoe", "minimax_m2", "hy_v3", "cohere2_moe", "mixtral"])
def test_experts_are_computed_as_in_transformers(family: str, tmp_path: Path, group: Ranks) -> None:
    assert_as_transformers(build_family(family, tmp_path), group)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", r"GPT2Model\) has no list of blocks named `layers`"),
        ("doge", "DogeAttention passes attention_mask to attention, which packed attention does not support"),
        ("nemotron", "NemotronAttention receives no keyword arguments from its model"),
        ("gemma2", "Gemma2Attention passes softcap to attention"),
        ("nanochat", "the logits of NanoChatForCausalLM are not a constant multiple"),
        ("falcon", "does not go through transformers' attention interface"),
        ("gpt_neo", "does not go through transformers' attention interface"),
        ("llama4_text", "chunked_attention"),
        ("jetmoe", "failed without weights"),
    ],
)
def test_families_that_cannot_train_are_refused_before_any_weight_is_read(
    family: str, reason: str, tmp_path: Path, group: Ranks
) -> None:
    config = tiny_config(family)
    config.architectures = None
    config.save_pretrained(tmp_path)  # there are no weights beside it
    with pytest.raises(TrainingError, match=reason) as caught:
        load_policy(tmp_path, group)
    assert str(tmp_path) in str(caught.value)


def on_meta(family: str) -> PreTrainedModel:
    """Return a tiny model as the trainer builds it, without weights."""
    attention.register()
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            tiny_config(family), attn_implementation=attention.NAME
        )
    return model


def test_a_window_that_a_layer_does_not_pass_on_is_refused() -> None:
    model = on_meta("gpt_oss")
    check_layers(model)
    model.get_decoder().layers[0].self_attn.sliding_window = None
    with pytest.raises(TrainingError, match=f"block 0 .* window none .* configuration says {WINDOW}"):
        check_layers(model)


def test_a_block_without_attention_is_refused() -> None:
    model = on_meta("llama")
    attend = model.get_decoder().layers[1].self_attn
    attend.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(TrainingError, match="block 1 of LlamaForCausalLM does not call"):
        check_layers(model)


def test_an_output_layer_that_is_not_a_matrix_is_refused() -> None:
    model = on_meta("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TrainingError, match=r"is Sequential, expected nn\.Linear"):
        logit_scale(model)


def test_softcapped_logits_are_refused_and_the_model_is_left_unchanged() -> None:
    model = on_meta("gemma2")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(TrainingError, match="not a constant multiple"):
        logit_scale(model)
    assert "forward" not in vars(model.get_decoder()) and "forward" not in vars(model.lm_head)
    model.config.final_logit_softcapping = None
    assert logit_scale(model) == 1.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("softcap", 30.0),
        ("position_bias", torch.zeros(1)),
        ("is_causal", False),
        ("indices", torch.zeros(1)),
        ("an_argument_of_the_future", 1),
        ("dropout", 0.1),
        ("attention_mask", torch.zeros(1)),
        ("s_aux", torch.zeros(3)),
    ],
)
def test_an_argument_that_changes_attention_is_refused(argument: str, value: Any, tmp_path: Path) -> None:
    attend: Any = attention._attention_forward
    module = torch.nn.Identity()
    tensors = [torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)]
    (batch,) = pack(samples()[:1], token_budget=4096)
    given = {"attention_mask": None, "segments": attention.plan(batch), argument: value}
    with pytest.raises(TrainingError, match=f"Identity passes .*{argument}"):
        attend(module, *tensors, **given)


def test_arguments_that_have_no_effect_are_accepted() -> None:
    attend: Any = attention._attention_forward
    tensors = [torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)]
    probe = attention.AttentionProbe()
    given = {"softcap": None, "is_causal": True, "position_ids": torch.arange(6), "output_attentions": False}
    out, _ = attend(torch.nn.Identity(), *tensors, None, segments=probe, dropout=0.0, **given)
    assert out.shape == (1, 6, 4, 8) and [call.window for call in probe.calls] == [None]
    with pytest.raises(TrainingError, match="one key per row"):
        attend(torch.nn.Identity(), tensors[0], *(t[:, :, :3] for t in tensors[1:]), None, segments=probe)
