"""The sampling parameters of a turn: the agent's request under the pins of its episode, with a seed.

Training episodes are sampled from the bare policy (temperature 1, nothing cut off, penalised or
biased): the engine's logprobs are taken after all of that, and a temperature or a seed that an agent
fixes would make the rollouts of a group alike.

Samples without a seed of their own get one, so that an episode can be sampled again.

An episode may be opened with a `base_seed`. The seed of a sample then follows from it and what is sampled
after: the turn that it continues, by that turn's own seed, and the tokens that are added. So it depends
neither on the order in which calls arrive nor on what else the engine does; and a second sample after the
same tokens gets another seed than the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_agents.core.completion import MAX_SEED, Grammar, SamplingParams, TokenIds
from areal_agents.core.rollout import Split
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RenderingError, RequestError
from areal_agents.proxy.calls.request import ModelRequest, SamplingWish
from areal_agents.rendering import ChatRenderer

# The value of each parameter in a training episode, and if neither agent nor episode sets it.
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
class TurnSampling:
    """The sampling parameters of a turn, and how they differ from the request.

    Attributes:
        params: for the engine.
        overrides: the parameters of the request that were replaced.
        constrained: a pin was lifted or there is a grammar, so that the turn is not trained by default.
    """

    params: SamplingParams
    overrides: tuple[str, ...]
    constrained: bool


def turn_sampling(
    wish: SamplingWish,
    *,
    split: Split,
    episode_sampling: Mapping[str, Any],
    lifted: Collection[str],
    stop_token_ids: tuple[int, ...],
    max_new_tokens: int,
    grammar: Grammar | None = None,
) -> TurnSampling:
    """Decide the sampling parameters of a turn.

    Args:
        wish: what the agent requests.
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
    return TurnSampling(params, tuple(overrides), constrained or grammar is not None)


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


BASE_SEED = "base_seed"  # among the sampling parameters of an episode


class SampleSeeds:
    """Seeds for the samples of one episode. Counts those after equal tokens, including running ones."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._counts = Counter(_key(turn.parent, turn.new_prompt_ids) for turn in turns)

    def next_seed(self, base: int, parent: Turn | None, new_ids: TokenIds) -> int:
        """The seed of one more sample after the tokens of `parent` and `new_ids`."""
        key = _key(parent.id if parent is not None else None, new_ids)
        earlier = self._counts[key]
        self._counts[key] += 1
        before = parent.sampling.seed if parent is not None else None
        digest = hashlib.blake2b(f"{base}/{before}/{earlier}/".encode() + key[1], digest_size=8)
        return int.from_bytes(digest.digest(), "little") & MAX_SEED


def _key(parent: str | None, new_ids: TokenIds) -> tuple[str | None, bytes]:
    return parent, hashlib.blake2b(np.ascontiguousarray(new_ids, "<i4").data, digest_size=16).digest()
