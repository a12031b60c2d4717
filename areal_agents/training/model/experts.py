"""Mixture-of-experts models: the routers of the blocks, and replay of the routing that the engine chose.

If the engine routed a token to other experts than the trainer does, the token's behavior policy differs from
the one that the trainer computes. If the engine returned its choice, the policy uses it, with the policy's
current weights for those experts (rollout routing replay, arXiv 2510.11370), so that gradients still reach
the router.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_agents.errors import TrainingError

Weigh = Callable[[Tensor, Tensor], Tensor]  # logits [T, E], a choice [T, k] → weights [T, k]


def router_of(block: nn.Module) -> nn.Module | None:
    """The module of a decoder block that scores the experts; None if the block is dense."""
    for module in block.modules():
        if type(module).__name__.removeprefix("FSDP").endswith(("TopKRouter", "TopkRouter")):
            return module
    return None


def has_experts(model: PreTrainedModel) -> bool:
    """Whether any block chooses among experts."""
    return any(router_of(block) is not None for block in model.get_decoder().layers)


def prepare_replay(model: PreTrainedModel) -> None:
    """Make the decoder accept `routed_experts=` [T, layers, k], in place.

    An entry below 0 leaves the choice to the router. The choice is bound within the block's forward pass, so
    that a block that is recomputed in the backward pass makes the same choice.
    """
    for index, block in enumerate(model.get_decoder().layers):
        router: Any = router_of(block)
        if router is not None:
            router.recorded = router.rerouted = None
            router.forward = _replaying(router)
        block.forward = _binding(block, router, index)


def rerouted_share(model: PreTrainedModel) -> Tensor | None:
    """After a pass with recorded routing: [T], the share of layers in which the router itself would have
    chosen other experts for a row. None if none was recorded."""
    layers = [router_of(block) for block in model.get_decoder().layers]
    found: list[Tensor | None] = [getattr(router, "rerouted", None) for router in layers]
    known = [rerouted for rerouted in found if rerouted is not None]
    return torch.stack(known).float().mean(0) if known else None


def _binding(block: nn.Module, router: Any, index: int) -> Any:
    forward = block.forward

    def bound(*args: Any, routed_experts: Tensor | None = None, **kwargs: Any) -> Any:
        if router is not None:
            router.recorded = None if routed_experts is None else routed_experts[:, index]
        return forward(*args, **kwargs)

    return bound


def _replaying(router: Any) -> Any:
    forward = router.forward
    weigh: Weigh | None = None

    def route(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits [T, E], weights [T, k] of the chosen experts, and the choice [T, k].

        The arguments are the router's own: the hidden states and, in some families (MiniMax-M2), a bias per
        expert that affects the choice but not the weights.
        """
        nonlocal weigh
        logits, weights, chosen = forward(*args, **kwargs)
        if router.recorded is None:
            router.rerouted = None
            return logits, weights, chosen
        if router.recorded.shape != chosen.shape:
            raise TrainingError(
                f"recorded routing of shape {tuple(router.recorded.shape)}, expected {tuple(chosen.shape)}: "
                "the engine serves a different model"
            )
        weigh = weigh or _weighing(router, logits, weights, chosen)
        own = chosen
        chosen = torch.where(router.recorded >= 0, router.recorded, own)
        router.rerouted = (chosen.sort(1).values != own.sort(1).values).any(1)
        return logits, weigh(logits, chosen).to(weights.dtype), chosen

    return route


def _weighing(router: Any, logits: Tensor, weights: Tensor, chosen: Tensor) -> Weigh:
    """Find the formula by which a router weights the experts that it chooses, as the one that reproduces
    `weights`.

    Whatever else affects the choice (a bias, groups of experts), the weights of the chosen experts are their
    scores, possibly divided by their sum and scaled.
    """
    errors: dict[Weigh, float] = {}
    scales = {1.0, *_scales(router)}
    if weights.shape == chosen.shape:
        with torch.no_grad():
            scores: tuple[Callable[[Tensor], Tensor], ...] = (_softmax, torch.sigmoid)
            for score, normed, scale in product(scores, (False, True), sorted(scales)):
                weigh = partial(_weights, score=score, normed=normed, scale=scale)
                errors[weigh] = float((weigh(logits, chosen) - weights).abs().max())
    best = min(errors, key=errors.__getitem__, default=None)
    rounding = max(1e-5, 2 * torch.finfo(weights.dtype).eps) * max(scales)
    if best is None or not errors[best] <= rounding:
        raise TrainingError(
            f"{type(router).__name__}: recorded routing cannot be replayed, because this model weights its "
            "experts by an unknown formula; leave engine.routed_experts off"
        )
    return best


def _scales(router: Any) -> set[float]:
    """Constants by which the router may multiply its weights; families name the attribute differently."""
    settings = vars(router).items()
    return {float(value) for name, value in settings if "scal" in name and isinstance(value, int | float)}


def _weights(
    logits: Tensor, chosen: Tensor, *, score: Callable[[Tensor], Tensor], normed: bool, scale: float
) -> Tensor:
    weights = score(logits.float()).gather(1, chosen)
    if normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)
