"""The policy as the trainer holds it: float32 master weights of a Hugging Face folder, sharded.

Everything that uses weights, the chunked head included, runs inside the forward pass of the root module,
where the weights of the blocks are gathered one block at a time; no rank ever holds all weights, except in
`full_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.errors import TrainingError
from areal_agents.training.config import Fused, Reshard
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import attention
from areal_agents.training.model.compatibility import attention_calls, logit_scale
from areal_agents.training.model.context_parallel import check_heads
from areal_agents.training.model.experts import has_experts, prepare_replay
from areal_agents.training.model.fused import fuse_blocks
from areal_agents.training.model.gathering import whole_adapter, whole_weights
from areal_agents.training.model.images import sees_images, vision_inputs
from areal_agents.training.model.loading import build_model, load_weights
from areal_agents.training.model.lora import LoraOptions, add_adapters, reset_adapters
from areal_agents.training.model.sharding import (
    Checkpointing,
    Placement,
    checkpoint_blocks,
    materialize,
    shard,
)
from areal_agents.training.step.divergence import FullTargets, TopTargets, reverse_kl, top_logprobs
from areal_agents.training.step.logprobs import CHUNK_LOGITS, token_logprobs

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options with which a model is loaded and sharded.

    Attributes:
        dtype: compute type; master weights are float32, and so is the reduction of gradients.
        activation_checkpointing: which blocks keep only their input for the backward pass: none, all, or
            every n-th.
        lora: the adapter to train instead of the weights.
        router_dtype: the type in which the routers of experts compute; None: `dtype`, in which engines hold
            them. With another one near ties are decided otherwise than in the engine.
        frozen: whether no weight is trained.
        placement: where the shards are, see `sharding.Placement`.
        fused: how blocks are computed, see `fused.fuse_blocks`.
        reshard: `block`: each block's weights are resharded after its forward pass; `step`: they stay
            gathered until the caller reshards them, see `Learner.backward`.
    """

    dtype: torch.dtype = torch.float32
    activation_checkpointing: Checkpointing = "off"
    lora: LoraOptions | None = None
    router_dtype: torch.dtype | None = None
    frozen: bool = False
    placement: Placement = "device"
    fused: Fused = "none"
    reshard: Reshard = "block"


class PolicyOutput(NamedTuple):
    """The policy's results for the N scored tokens of a micro-batch, each [N].

    Attributes:
        logprobs: differentiable.
        entropies: detached unless `entropy_gradient`.
        divergence: the divergence from a teacher, differentiable; None without a teacher.
    """

    logprobs: Tensor
    entropies: Tensor
    divergence: Tensor | None = None


class Policy(nn.Module):
    """A causal language model that returns logprobs of trained tokens instead of logits.

    It stays in evaluation mode, because dropout would make the ratio differ from 1 under the weights that
    sampled.
    """

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        saved_dtype: torch.dtype = torch.float32,
        chunk_logits: int = CHUNK_LOGITS,
        lora: LoraOptions | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.logit_scale = logit_scale  # logits = scale · head(hidden), see `compatibility.logit_scale`
        # the type of the initial folder's weights, which published versions keep
        self.saved_dtype = saved_dtype
        self.chunk_logits = chunk_logits
        self.lora = lora
        self.eval()

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, for counting FLOPs."""
        return ModelShape.from_config(self.model.config.get_text_config().to_dict())

    def backbone(self, batch: MicroBatch) -> Tensor:
        """The last hidden states [N, d] at the rows that predict the trained tokens."""
        return hidden_rows(self.model, batch)

    def forward(
        self,
        batch: MicroBatch,
        *,
        entropy_gradient: bool = False,
        teacher: TopTargets | FullTargets | None = None,
    ) -> PolicyOutput:
        """Compute the results for the micro-batch's scored tokens.

        Args:
            entropy_gradient: whether the entropies are differentiable.
            teacher: the teacher's distributions at the same tokens, for the divergence; its logits are
                divided by the same temperatures as the policy's.
        """
        hidden, head = hidden_rows(self.model, batch), self.model.get_output_embeddings()
        temperatures = batch.temperatures / self.logit_scale
        logprobs, entropies = token_logprobs(
            hidden,
            batch.target_ids,
            temperatures,
            head,
            chunk_logits=self.chunk_logits,
            entropy_gradient=entropy_gradient,
        )
        divergence = None
        if teacher is not None:
            divergence = reverse_kl(hidden, temperatures, head, teacher, chunk_logits=self.chunk_logits)
        return PolicyOutput(logprobs, entropies, divergence)

    def top_logprobs(self, batch: MicroBatch, k: int) -> tuple[Tensor, Tensor]:
        """The k most likely tokens at each scored token: ids [N, k] int64, logprobs [N, k]. No gradient."""
        hidden, head = hidden_rows(self.model, batch), self.model.get_output_embeddings()
        temperatures = batch.temperatures / self.logit_scale
        return top_logprobs(hidden, temperatures, head, k, chunk_logits=self.chunk_logits)

    def full_state_dict(self, *, keep: bool = True) -> dict[str, Tensor]:
        """All weights, whole, in float32 on the CPU, under the names of published checkpoints.

        Collective: every rank calls it. Tied weights appear once. An adapter is merged:
        W + (alpha / rank) · B A.

        Args:
            keep: whether this rank keeps the weights. On other ranks the result is empty, and their memory
                never holds more than one whole weight.
        """
        return _kept(whole_weights(self.model, self.lora), keep)

    def adapter_state_dict(self, *, keep: bool = True) -> dict[str, Tensor] | None:
        """The adapter's weights, whole, in float32 on the CPU, under peft's names; None without an adapter.

        Collective. `lora.write_adapter` writes them to a folder.
        """
        if self.lora is None:
            return None
        return _kept(whole_adapter(self.model), keep)


def hidden_rows(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The model's last hidden states [N, d] at the rows that predict the trained tokens.

    Raises:
        ValueError: images are given for a model that takes none, or images or recorded routing for rows that
            several ranks share.
        TrainingError: routing was recorded, but the model has no routers that can replay it.
    """
    vision = sees_images(model.config)
    if batch.images is not None and not vision:
        raise ValueError(f"{type(model).__name__} takes no images, got a micro-batch with images")
    if batch.context_group is not None and (vision or batch.routed_experts is not None):
        raise ValueError("context_parallel supports neither vision models nor recorded routing")
    inputs: dict[str, Any]
    if vision:
        inputs = vision_inputs(model, batch)
    else:
        inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    if batch.routed_experts is not None:
        if not has_experts(model):
            raise TrainingError(
                f"{type(model).__name__} has no router that can replay the recorded routing; leave "
                "engine.routed_experts off"
            )
        inputs["routed_experts"] = batch.routed_experts
    output: Any = model.get_decoder()(use_cache=False, segments=attention.plan(batch), **inputs)
    hidden: Tensor = output.last_hidden_state
    return hidden[0].index_select(0, batch.predictor_rows)


def load_policy(path: str | Path, ranks: Ranks, *, options: ModelOptions = ModelOptions()) -> Policy:
    """Load a Hugging Face folder in float32 and shard it over the ranks.

    Raises:
        TrainingError: the folder cannot be loaded, lacks weights, has layers or logits that packed samples
            do not support (see `compatibility`), or cannot be shared by the ranks of a context.
    """

    policy = load_sharded(path, ranks, policy_around(options), options=options)
    register_fsdp_forward_method(policy, "backbone")
    register_fsdp_forward_method(policy, "top_logprobs")
    return policy


def policy_around(options: ModelOptions) -> Callable[[PreTrainedModel, torch.dtype], Policy]:
    """Return the function that `load_sharded` creates a policy with."""

    def root(model: PreTrainedModel, saved_dtype: torch.dtype) -> Policy:
        return Policy(model, saved_dtype=saved_dtype, lora=options.lora, logit_scale=logit_scale(model))

    return root


def load_sharded(
    path: str | Path,
    ranks: Ranks,
    root: Callable[[PreTrainedModel, torch.dtype], M],
    *,
    options: ModelOptions,
    head: bool = True,
) -> M:
    """Create a sharded module around a Hugging Face model and read the weights from the files into the
    shards.

    Args:
        root: creates the module, on the meta device, from the model and the type of its saved weights.
            Parameters that it adds have no value until the caller sets one.
        head: whether the model includes its output matrix.

    Raises:
        TrainingError: as for `load_policy`; raised on every rank if one rank fails.
    """
    disable_progress_bar()  # the process logs to a file
    folder = Path(path)
    module, model = build_without_weights(folder, root, options=options, head=head)
    if ranks.context_count > 1:
        _check_context(model, folder, ranks.context_count)
    fuse_blocks(model, options.fused, ranks.device)
    checkpoint_blocks(model, options.activation_checkpointing)
    shard(
        module,
        model,
        ranks,
        dtype=options.dtype,
        router_dtype=options.router_dtype,
        placement=options.placement,
        reshard=options.reshard,
    )
    materialize(module, model, ranks.device, options.placement)
    error: TrainingError | None = None
    try:
        load_weights(model, folder)
    # raised below, after all ranks know of it, so that none waits for this rank
    except TrainingError as caught:
        error = caught
    if ranks.any(error is not None):
        raise error or TrainingError(f"{folder}: another rank could not load the model")
    if options.lora is not None:
        reset_adapters(model, ranks)
    return module


def build_without_weights(
    folder: Path,
    root: Callable[[PreTrainedModel, torch.dtype], M],
    *,
    options: ModelOptions,
    head: bool = True,
) -> tuple[M, PreTrainedModel]:
    """Create a module around a Hugging Face model on the meta device, as it is before it is sharded.

    Trained parameters are float32. Frozen ones have the compute type: they are converted to it for every
    computation anyway, and no optimizer adds small updates to them.

    Raises:
        TrainingError: as for `build_model` and `add_adapters`.
    """
    model, saved_dtype = build_model(folder, head=head)
    if options.lora is not None:
        add_adapters(model, options.lora)
    if has_experts(model):
        prepare_replay(model)
    with torch.device("meta"):
        module = root(model, saved_dtype)
    if options.frozen:
        module.requires_grad_(False)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(options.dtype)
    return module, model


def _check_context(model: PreTrainedModel, folder: Path, count: int) -> None:
    """Check, before the first batch, that the ranks of a context can share the model."""
    if sees_images(model.config):
        raise TrainingError(f"{folder}: context_parallel does not support vision models; set it to 1")
    for call in attention_calls(model):  # the number of heads may differ between layers, as in Laguna
        try:
            check_heads(call.heads, call.kv_heads, count)
        except ValueError as error:
            raise TrainingError(f"{folder}: {error}") from error


def _kept(weights: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Return copies of all weights on the CPU, or nothing; every weight is gathered in both cases."""
    copies = {}
    for name, tensor in weights:
        if keep:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
    return copies
