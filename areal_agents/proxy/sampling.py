"""How a turn is drawn: the agent's wish under the pins of its episode.

Training episodes are drawn from the bare policy (temperature 1, nothing cut off, penalised or
biased): the engine's logprobs are taken after all of that, and a temperature or a seed that an agent
fixes would make the rollouts of a group alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from areal_agents.core.completion import Grammar, SamplingParams
from areal_agents.core.rollout import Split
from areal_agents.errors import RenderingError, RequestError
from areal_agents.proxy.request import ModelRequest, SamplingWish
from areal_agents.rendering import ChatRenderer

# What each parameter is in a training episode, and where nobody names one.
PINS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": False,
    "seed": None,
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a turn is drawn.

    Attributes:
        params: for the engine.
        overrides: the parameters of the request that were replaced.
        constrained: a pin was lifted or there is a grammar, so that the turn is not trained by default.
    """

    params: SamplingParams
    overrides: tuple[str, ...]
    constrained: bool


def draw(
    wish: SamplingWish,
    *,
    split: Split,
    episode_sampling: Mapping[str, Any],
    lifted: Collection[str],
    stop_token_ids: tuple[int, ...],
    max_new_tokens: int,
    grammar: Grammar | None = None,
) -> Drawing:
    """Decide how a turn is drawn.

    Args:
        wish: what the agent asks.
        split: "train" pins everything but `lifted`; "eval" grants the wish.
        episode_sampling: parameters set when the episode was opened; they go before the wish.
        lifted: pins that the configuration lifts.
        stop_token_ids: the tokens that end the model's turn.
        max_new_tokens: what fits, at least 1.
        grammar: what the reply must match.

    Raises:
        RequestError: a value out of range, or a logit bias that would be granted.
    """
    chosen: dict[str, Any] = {}
    overrides, constrained = [], False
    for name, pin in PINS.items():
        wished = getattr(wish, name)
        asked = episode_sampling.get(name, wished)
        if asked is None:
            asked = pin
        if split == "train" and asked != pin:
            constrained |= name in lifted
            asked = asked if name in lifted else pin
        if wished is not None and wished != asked:
            overrides.append(name)
        chosen[name] = asked
    if chosen.pop("logit_bias"):
        raise RequestError("logit_bias is not supported", code="unsupported_parameter", param="logit_bias")
    try:
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            stop=wish.stop,
            stop_token_ids=stop_token_ids,
            grammar=grammar,
            top_logprobs=wish.top_logprobs,
            **chosen,
        )
    except ValueError as error:
        raise RequestError(str(error), code="invalid_value") from None
    return Drawing(params, tuple(overrides), constrained or grammar is not None)


def grammar_of(request: ModelRequest, renderer: ChatRenderer) -> Grammar | None:
    """What the reply must match. RequestError 400 if this model's replies cannot be held to it."""
    if request.raw_prompt is not None:
        return request.output
    try:
        return renderer.reply_grammar(
            request.tools,
            calls=request.calls,
            named=request.named_tool,
            parallel=request.parallel_calls,
            output=request.output,
        )
    except RenderingError as error:
        param = "tool_choice" if request.calls == "required" else "response_format"
        raise RequestError(str(error), code="unsupported_parameter", param=param) from None
