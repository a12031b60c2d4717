"""Measures what a micro-batch keeps in memory between the forward and the backward pass, without the memory.

The model's own code runs on meta or fake tensors, which have shapes and types but no values, so nothing here
knows an architecture. A hook on saved tensors attributes each storage to the block that saves it first.
Beyond that, one block of each shape and the head run forward and backward under a mode that follows every
allocation, which gives their temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from areal_agents.training.memory.allocations import Allocations
from areal_agents.training.model.attention import AttentionProbe
from areal_agents.training.model.experts import router_of
from areal_agents.training.model.images import sees_images
from areal_agents.training.model.sharding import Checkpointing, blocks
from areal_agents.training.step.logprobs import CHUNK_LOGITS, CPU_ROWS, KEPT_LOGITS, token_logprobs

_OUTSIDE = -1  # in place of a block's index
_ROWS = 1024  # of the smaller of two passes from which others are extrapolated


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one rank for a micro-batch, all of whose tokens are trained.

    Attributes:
        blocks: what each block keeps for the backward pass.
        inputs: what each block keeps if it is recomputed.
        recomputed: what each block holds again while it is recomputed.
        outside: what embedding, final norm and head keep.
        work: the most temporary memory of a block in either pass, gradients of weights excluded.
        head_work: the same of the head, with its chunk of logits and the gradient of its matrix.
        cache: keys and values of all layers.
    """

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    recomputed: tuple[int, ...]
    outside: int
    work: int
    head_work: int
    cache: int

    def saved(self, setting: Checkpointing) -> int:
        """Bytes kept between the passes if blocks are recomputed as `activation_checkpointing` says."""
        every = {"off": 0, "full": 1}.get(setting, setting) if isinstance(setting, str) else setting
        assert isinstance(every, int)
        kept = (
            inputs if every and index % every == 0 else whole
            for index, (whole, inputs) in enumerate(zip(self.blocks, self.inputs, strict=True))
        )
        return sum(kept) + self.outside

    def working(self, setting: Checkpointing) -> int:
        """The most temporary bytes beside those of `saved`; a recomputed block holds its own again."""
        again = 0 if setting == "off" else max(self.recomputed)
        return max(self.work + again, self.head_work)


class Measurer:
    """Measures one model, for any size of micro-batches.

    Args:
        model: on the meta device, not sharded; it is used up.
        dtype: the compute type.
        router_dtype: the type in which routers of experts compute; None: `dtype`.
        on_cpu: whether the head computes in the smaller chunks of a CPU.
        head: whether the model has an output matrix and computes logprobs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        router_dtype: torch.dtype | None = None,
        on_cpu: bool,
        head: bool = True,
    ) -> None:
        self._model, self._dtype, self._on_cpu, self._has_head = model, dtype, on_cpu, head
        self._run: dict[int, Activations] = {}
        _convert(model, dtype, router_dtype)
        # Some operations on meta tensors are those of a GPU, and refuse float32. A fake tensor on the CPU has
        # no memory either.
        self._mode: Any = nullcontext()
        self._device = torch.device("meta")
        if on_cpu or dtype == torch.float32:
            self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
            with self._mode:
                model.to_empty(device=self._device)

    def measure(self, tokens: int) -> Activations:
        """Measure a micro-batch of this many rows on one rank.

        Everything but the head grows linearly with the rows, so two sizes are run for all larger ones.
        """
        if tokens <= 2 * _ROWS:
            blocks_only = self._at(tokens)
        else:
            blocks_only = _extrapolated(self._at(_ROWS), self._at(2 * _ROWS), tokens / _ROWS)
        if not self._has_head:
            return blocks_only
        with self._mode, self._device:
            saved, work = self._head(tokens)
        return replace(blocks_only, outside=blocks_only.outside + saved, head_work=work)

    def _at(self, tokens: int) -> Activations:
        if tokens not in self._run:
            with self._mode, self._device, _ExpertsOfAnyType():
                self._run[tokens] = self._measure(tokens)
        return self._run[tokens]

    def _measure(self, tokens: int) -> Activations:
        """Run the decoder, without the head."""
        decoder: Any = self._model.get_decoder()
        layers = blocks(self._model)
        probe = AttentionProbe()
        calls: dict[int, tuple[Any, Any]] = {}
        saved = _Saved(self._model)
        shapes = [_shape_of(block) for block in layers]
        example = {shape: index for index, shape in enumerate(shapes)}  # the last: its input has a gradient
        inputs = _inputs(self._model, tokens, self._dtype)
        with _followed(layers, saved, calls, only=set(example.values())), saved.hooks():
            decoder(**inputs, use_cache=False, segments=probe)
        cache = sum(probe.cache_bytes)  # now, because the blocks that run alone call the probe too
        alone = {index: _alone(layers[index], *calls[index]) for index in example.values()}
        of_shape = [alone[example[shape]] for shape in shapes]
        return Activations(
            blocks=tuple(saved.bytes_of(index) for index in range(len(layers))),
            inputs=tuple(one.inputs for one in of_shape),
            recomputed=tuple(one.saved for one in of_shape),
            outside=saved.bytes_of(_OUTSIDE),
            work=max(one.work for one in of_shape),
            head_work=0,
            cache=cache,
        )

    def _head(self, tokens: int) -> tuple[int, int]:
        """Return what the head saves, and its temporary memory, which includes the gradient of its matrix.

        Both grow linearly from the second chunk of logits on, so no more than three chunks are run.
        """
        head: Any = self._model.get_output_embeddings()
        vocab = len(head.weight)
        rows = max(1, CHUNK_LOGITS // vocab)
        rows = min(rows, CPU_ROWS) if self._on_cpu else rows
        fixed = (head.weight.shape[1], vocab, head.bias is not None, head.weight.requires_grad, self._dtype)
        device = "cpu" if self._on_cpu else "meta"
        if tokens <= 3 * rows or tokens * vocab <= KEPT_LOGITS:
            return _run_head(*fixed, tokens, device)
        saved, work = _run_head(*fixed, 2 * rows, device)
        more_saved, more_work = _run_head(*fixed, 3 * rows, device)
        further = tokens / rows - 3
        return (
            round(more_saved + further * (more_saved - saved)),
            round(more_work + further * max(0, more_work - work)),
        )


def _extrapolated(one: Activations, two: Activations, times: float) -> Activations:
    """What `times` as many rows need as `one`, given what twice as many need."""

    def line(at_one: int, at_two: int) -> int:
        return round(at_one + (times - 1) * (at_two - at_one))

    def lines(at_one: tuple[int, ...], at_two: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(line, at_one, at_two))

    return Activations(
        blocks=lines(one.blocks, two.blocks),
        inputs=lines(one.inputs, two.inputs),
        recomputed=lines(one.recomputed, two.recomputed),
        outside=line(one.outside, two.outside),
        work=line(one.work, two.work),
        head_work=0,
        cache=line(one.cache, two.cache),
    )


class _ExpertsOfAnyType(TorchFunctionMode):
    """Replaces the product of all experts, which has no shapes for float32, by transformers' own form of it,
    which saves the same tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and args[0].dtype == torch.float32:
            offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
            return torch.ops.transformers.grouped_mm_fallback(args[0], args[1], offsets)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Alone:
    """What one block holds when it runs alone: its input, what it saves, and its temporary memory."""

    inputs: int
    saved: int
    work: int


def _convert(model: PreTrainedModel, dtype: torch.dtype, router_dtype: torch.dtype | None) -> None:
    """Give the parameters the type in which FSDP gathers them."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if router_dtype in (None, dtype):
        return
    for block in blocks(model):
        router = router_of(block)
        if router is not None:
            for parameter in router.parameters():
                parameter.data = parameter.data.to(router_dtype)
            router.register_forward_pre_hook(
                lambda module, given: tuple(
                    one.to(router_dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
                    for one in given
                )
            )


def _inputs(model: PreTrainedModel, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The decoder's inputs, as `model.hidden_rows` gives them; images are not counted."""
    rows = torch.zeros(1, tokens, dtype=torch.int64)
    if sees_images(model.config):
        width = model.config.get_text_config().hidden_size
        embedded = torch.empty(1, tokens, width, dtype=dtype, requires_grad=True)
        return {"inputs_embeds": embedded, "position_ids": rows.expand(3, 1, tokens)}
    return {"input_ids": rows, "position_ids": rows}


def _shape_of(block: nn.Module) -> tuple[object, ...]:
    """Blocks with the same parameters need the same memory."""
    return tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())


class _Saved:
    """The storages that are saved for the backward pass, each counted once, by the block that saves it."""

    def __init__(self, module: nn.Module) -> None:
        self.block = _OUTSIDE
        self._ignored = {p.untyped_storage()._cdata for p in module.parameters()}
        self._found: dict[int, tuple[int, torch.UntypedStorage]] = {}  # kept, so that no id is used again

    def ignore(self, values: Any) -> None:
        """Do not count tensors that exist anyway."""
        self._ignored |= {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Count what is saved within a with-block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def bytes_of(self, block: int) -> int:
        """Bytes that a block has saved first."""
        return sum(storage.nbytes() for owner, storage in self._found.values() if owner == block)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            self._found.setdefault(storage._cdata, (self.block, storage))
        return tensor


@contextmanager
def _followed(
    layers: Sequence[nn.Module], saved: _Saved, calls: dict[int, tuple[Any, Any]], *, only: set[int]
) -> Iterator[None]:
    """Tell `saved` which block runs, and keep the arguments of some blocks in `calls`."""

    def entering(index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            saved.block = index
            if index in only:
                calls[index] = args, kwargs

        return enter

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        saved.block = _OUTSIDE

    handles = [b.register_forward_pre_hook(entering(i), with_kwargs=True) for i, b in enumerate(layers)]
    handles += [block.register_forward_hook(leave) for block in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _alone(block: nn.Module, args: Any, kwargs: Any) -> _Alone:
    """Run a block forward and backward with the arguments of a call."""
    args, kwargs = _leaves(args), _leaves(kwargs)
    # the other arguments are shared by all blocks
    given = (args, kwargs.get("hidden_states"))
    inputs = sum(t.nbytes for t in tree_leaves(given) if isinstance(t, Tensor) and t.is_floating_point())
    saved = _Saved(block)
    saved.ignore((args, kwargs))
    with Allocations() as memory, _dropped_gradients(block):
        with saved.hooks():
            output = block(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.backward(torch.empty_like(hidden))
    kept = saved.bytes_of(_OUTSIDE)
    return _Alone(inputs, kept, max(0, memory.peak - kept))


@cache
def _run_head(
    width: int, vocab: int, bias: bool, trained: bool, dtype: torch.dtype, tokens: int, device: str
) -> tuple[int, int]:
    with FakeTensorMode(), torch.device(device):
        head = nn.Linear(width, vocab, bias=bias, dtype=dtype).requires_grad_(trained)
        hidden = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        targets, temperatures = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
        saved = _Saved(head)
        with Allocations() as memory, _dropped_gradients(head):
            with saved.hooks():
                logprobs, _ = token_logprobs(hidden, targets, temperatures, head)
            logprobs.backward(torch.empty_like(logprobs))
    kept = saved.bytes_of(_OUTSIDE)
    return kept, max(0, memory.peak - (kept - hidden.nbytes))


def _leaves(values: Any) -> Any:
    """Return the arguments with new leaves of the graph in place of tensors that require a gradient."""
    if isinstance(values, Tensor):
        return values.detach().requires_grad_() if values.requires_grad else values
    if isinstance(values, tuple | list):
        return type(values)(_leaves(value) for value in values)
    if isinstance(values, dict):
        return {key: _leaves(value) for key, value in values.items()}
    return values


@contextmanager
def _dropped_gradients(module: nn.Module) -> Iterator[None]:
    """Free the gradient of each parameter at once: the estimate counts them with FSDP's units."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
