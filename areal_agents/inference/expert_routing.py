"""The experts to which an engine routed tokens, as SGLang returns them with an answer.

A server started with --enable-return-routed-experts keeps them beside the keys and values, so that tokens
of a cached prefix are covered too, and returns them with the end of a request that asks: int32 in base64,
[rows, layers, k] without its shape, from the position requested to the last token but one. The last token has
only been sampled and has not passed through the model.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_agents.core.completion import Routing
from areal_agents.errors import EngineError

_WIRE = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The number of decoder layers of a mixture-of-experts model, including dense ones, and of experts per
    token."""

    layers: int
    per_token: int


@dataclass(frozen=True, slots=True)
class RequestedRouting:
    """A request for the experts of all tokens from position `start` of a prompt of `prompt_tokens` tokens."""

    layout: ExpertLayout
    start: int
    prompt_tokens: int


def expert_layout(config: Mapping[str, Any]) -> ExpertLayout | None:
    """Read a model's config.json; None for a model without experts."""
    text = config.get("text_config") or config
    layers, per_token = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if not isinstance(layers, int) or not isinstance(per_token, int):
        return None
    return ExpertLayout(layers, per_token)


def routing_from_wire(
    meta: Mapping[str, Any], asked: RequestedRouting, versions: Sequence[int] | np.ndarray
) -> Routing | None:
    """Return the routed experts of an answer in the form of `Completion`; `versions` [C] are those of its
    tokens.

    If a swap retracted the request, its tokens were computed again, and only the routing of the last version
    is known. Rows from which an earlier version sampled are therefore -1.

    Returns None for an answer without sampled tokens, or one aborted before it started. Raises EngineError if
    the experts are missing or their number does not match the tokens.
    """
    encoded, count = meta.get("routed_experts"), len(versions)
    if encoded is None and (not count or _is_abort(meta)):
        return None
    if not isinstance(encoded, str):
        raise EngineError(
            "/generate returned no routed_experts although they were requested: start SGLang with "
            "--enable-return-routed-experts, or leave engine.routed_experts off"
        )
    layout, rows = asked.layout, asked.prompt_tokens + count - 1 - asked.start
    try:
        values = np.frombuffer(base64.b64decode(encoded, validate=True), _WIRE)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"/generate returned routed_experts that cannot be read: {error}") from error
    if values.size != rows * layout.layers * layout.per_token:
        raise EngineError(
            f"/generate returned {values.size} routed experts for {rows} tokens, {layout.layers} layers and "
            f"{layout.per_token} experts per token: it serves a different model"
        )
    if values.size and not -1 <= values.min() <= values.max() <= np.iinfo(np.int16).max:
        raise EngineError(
            f"/generate returned routed experts from {values.min()} to {values.max()}; "
            "expected numbers from -1 to 32767"
        )
    routing = values.astype(np.int16).reshape(rows, layout.layers, layout.per_token)
    if meta.get("num_retractions"):
        sampled = routing[rows - count :]  # the rows that the sampled tokens were predicted from
        older = np.flatnonzero(np.asarray(versions) != versions[-1])
        sampled[: older[-1] + 1 if len(older) else 0] = -1
    return routing


def _is_abort(meta: Mapping[str, Any]) -> bool:
    reason = meta.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type") == "abort"
