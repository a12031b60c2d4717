"""Decides from the structure of a model, before any weight is read, whether it can be trained.

Packed samples are independent and log-probabilities are correct only if rows interact solely through
attention calls that packed attention computes exactly, and if the logits are the output matrix applied to the
decoder's last hidden states, times a constant. Both are observed instead of being looked up by model name:
the decoder runs once on the meta device with an attention that records its calls, and the code around the
output matrix runs once on random hidden states and logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from areal_agents.errors import TrainingError
from areal_agents.training.model.attention import AttentionCall, AttentionProbe
from areal_agents.training.model.images import sees_images

ROWS = 4  # number of rows in the probing forward passes
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def check_layers(model: PreTrainedModel) -> None:
    """Check that rows interact only through attention that packed attention computes.

    Args:
        model: on the meta device, with the packed attention implementation.

    Raises:
        TrainingError: the model has recurrent or convolutional layers, attention outside transformers'
            interface or with arguments that packed attention does not support, a sliding window about which
            configuration and layers disagree, a decoder that does not accept positions, or a forward pass
            that fails.
    """
    name = type(model).__name__
    text = model.config.get_text_config()
    decoder = model.get_decoder()
    kinds: set[str] = set(getattr(text, "layer_types", None) or ())
    convolves = any(isinstance(module, nn.Conv1d) for module in decoder.modules())
    if kinds - SUPPORTED_LAYERS or convolves or not model._supports_attention_backend:
        raise TrainingError(
            f"packed samples would influence each other in the layers of {name} "
            f"({', '.join(sorted(kinds)) or 'with their own attention implementation'}); only "
            "models with full or "
            "sliding-window attention, through transformers' attention interface, can be trained"
        )
    rotary = _rope_types(getattr(text, "rope_parameters", None) or {}) & {"dynamic", "longrope"}
    if rotary:
        raise TrainingError(
            f"rotary frequencies of type {', '.join(rotary)} depend on the longest sample of a micro-batch, "
            "so one sample would depend on another; choose a fixed type, such as yarn"
        )
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TrainingError(
            f"the decoder of {name} ({type(decoder).__name__}) has no list of blocks named `layers`, which "
            "sharding needs; choose a model of a newer family, such as Qwen3 or Llama"
        )
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise TrainingError(
            f"the decoder of {name} takes no position_ids, so the positions of packed samples would be "
            "wrong; choose a model of another family"
        )
    calls = attention_calls(model)
    for index, block in enumerate(blocks):
        own = [call for call in calls if any(call.module is module for module in block.modules())]
        _check_block(text, index, own, name)


def _rope_types(parameters: Mapping[str, Any]) -> set[str]:
    """The types of rotary frequencies; a model may have one per layer type."""
    by_layer = [value for value in parameters.values() if isinstance(value, Mapping)]
    return {str(entry["rope_type"]) for entry in (parameters, *by_layer) if "rope_type" in entry}


def attention_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """The attention calls of one forward pass of the decoder, in order; the model is on the meta device.

    Raises:
        TrainingError: packed attention does not support a call, or the forward pass fails.
    """
    probe = AttentionProbe()
    rows = torch.arange(ROWS, device="meta")[None]
    decoder: Any = model.get_decoder()
    inputs = {"input_ids": rows, "position_ids": rows}
    if sees_images(model.config):  # as images.vision_inputs
        width = model.config.get_text_config().hidden_size
        inputs = {
            "inputs_embeds": torch.zeros(1, ROWS, width, device="meta"),
            "position_ids": rows.expand(3, 1, ROWS),
        }
    try:
        with torch.no_grad(), without_experts(decoder):
            decoder(**inputs, use_cache=False, segments=probe)
    except TrainingError:
        raise
    except Exception as error:  # model code raises various exceptions for unsupported inputs
        raise TrainingError(
            f"the forward pass of {type(decoder).__name__} failed without weights "
            f"({type(error).__name__}: {error}), so it is not known whether packed samples stay independent; "
            "choose a model of another family"
        ) from error
    return probe.calls


@contextmanager
def without_experts(decoder: nn.Module) -> Iterator[None]:
    """Make expert layers, whose control flow depends on values, return their input inside the block."""
    experts = [
        module
        for name, module in decoder.named_modules()
        if name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters())
    ]
    with _replaced(
        [(module, lambda hidden, *args, **kwargs: torch.zeros_like(hidden)) for module in experts]
    ):
        yield


def _check_block(text: Any, index: int, calls: list[AttentionCall], name: str) -> None:
    """Check that a decoder block attends as the configuration says."""
    if not calls:
        raise TrainingError(
            f"block {index} of {name} does not call transformers' attention interface: the rows of packed "
            "samples would influence each other in another kind of layer, such as a recurrent one; choose a "
            "model with attention in every block"
        )
    kinds = getattr(text, "layer_types", None)
    size = getattr(text, "sliding_window", None)
    slides = kinds[index] == "sliding_attention" if kinds else bool(size)
    expected: set[int | None] = {size if slides else None}
    windows = {call.window for call in calls}
    if windows != expected:
        raise TrainingError(
            f"block {index} of {name} passes the sliding window {_named(windows)} to attention, and the "
            f"configuration says {_named(expected)}: rows would attend to other rows than in the model"
        )


def _named(windows: set[int | None]) -> str:
    return " and ".join("none" if window is None else str(window) for window in windows)


def logit_scale(model: PreTrainedModel) -> float:
    """The factor c with logits = c · head(last hidden states), which differs from 1 in many families.

    Raises:
        TrainingError: the output layer is not a plain matrix, or the logits are another function of its
            result, such as softcapped logits.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if type(head).__name__.removeprefix("FSDP") != "Linear" or not isinstance(head, nn.Linear):
        raise TrainingError(f"the output layer of {name} is {type(head).__name__}, expected nn.Linear")
    if sees_images(model.config):
        return 1.0  # the families of `images.SUPPORTED` return what the head computes
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, ROWS, head.in_features, generator=generator, device="cpu")
    scores = 8 * torch.randn(1, ROWS, head.out_features, generator=generator, device="cpu")
    received: list[Tensor] = []

    def decode(*args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return _Decoded(last_hidden_state=hidden.clone())

    def project(states: Tensor) -> Tensor:
        received.append(states)
        return scores.clone()

    ids = torch.zeros(1, ROWS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _replaced([(model.get_decoder(), decode), (head, project)]):
            logits = model(input_ids=ids, use_cache=False).logits
        before, after = _factor(received[0], hidden), _factor(logits, scores)
    except Exception as error:  # model code raises various exceptions
        raise TrainingError(
            f"cannot find out how {name} computes its logits ({type(error).__name__}: {error})"
        ) from error
    if len(received) != 1 or before is None or after is None or (head.bias is not None and before != 1):
        raise TrainingError(
            f"the logits of {name} are not a constant multiple of its output layer's result for the last "
            "hidden states (for example because they are softcapped), which is not supported; "
            "choose another model"
        )
    return before * after


class _Decoded(MoeModelOutputWithPast):
    """A decoder's output in which every other field, whatever the family, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _factor(got: Tensor, given: Tensor) -> float | None:
    """The factor c > 0 with got = c · given; None if there is none."""
    if got.device.type == "meta" or got.shape != given.shape:
        return None
    factor = float((got.double() * given).sum() / (given.double() ** 2).sum())
    close = torch.allclose(got.double(), factor * given.double(), rtol=1e-5, atol=0)
    if not close or factor <= 0:
        return None
    return 1.0 if torch.equal(got, given) else factor


@contextmanager
def _replaced(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward of modules inside the block."""
    before = [vars(module).get("forward") for module, _ in forwards]
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
