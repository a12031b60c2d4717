"""The sampling parameters of a turn: the agent's request under the pins of its episode, with a seed.

Training episodes are sampled from the unmodified policy (temperature 1, no truncation, penalty or bias),
because the engine computes logprobs after these modifications, and because a temperature or a seed set by an
agent would make the rollouts of a group alike.

An episode may be opened with a `base_seed`, so that it can be sampled again. The seed of a sample is then a
function of the base seed, of the seed of the turn that it continues, and of the new prompt tokens. It depends
neither on the order in which calls arrive nor on other requests in the engine; a second sample after the same
tokens gets a different seed.
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

# The value of each parameter in training episodes, and its default in other episodes.
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
        params: the parameters that the engine gets.
        overrides: names of the parameters of the request that were replaced.
        constrained: whether a pin was lifted or there is a grammar; by default such turns are not trained on.
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
        wish: the parameters that the agent requests.
        split: "train" pins all parameters except `lifted`; "eval" uses the requested values.
        episode_sampling: parameters set when the episode was opened; they override the request.
        lifted: parameters whose pins the configuration lifts.
        stop_token_ids: the tokens that end the model's turn.
        max_new_tokens: maximum length of the completion, at least 1.
        grammar: the grammar that the reply must match, or None.

    Raises:
        RequestError: 400 if a value is out of range, or if a logit bias is requested and not pinned.
    """
    chosen: dict[str, Any] = {}
    overrides, constrained = [], False
    for name, pin in PINS.items():
        requested = getattr(wish, name)
        value = episode_sampling.get(name, requested)
        if value is None:
            value = pin
        if split == "train" and value != pin:
            constrained |= name in lifted
            value = value if name in lifted else pin
        if requested is not None and requested != value:
            overrides.append(name)
        chosen[name] = value
    if chosen.pop("logit_bias"):
        raise RequestError(
            "logit_bias is not supported; remove it from the request",
            code="unsupported_parameter",
            param="logit_bias",
        )
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
    """Return the grammar that the reply must match, or None.

    Raise RequestError 400 if the replies of this model cannot be constrained as requested.
    """
    if request.raw_prompt is not None:
        return request.output
    try:
        return renderer.reply_grammar(
            request.tools,
            calls=request.calls,
            callable_tools=request.callable_tools,
            parallel=request.parallel_calls,
            output=request.output,
        )
    except RenderingError as error:
        param = "tool_choice" if request.calls == "required" else "response_format"
        raise RequestError(str(error), code="unsupported_parameter", param=param) from None


BASE_SEED = "base_seed"  # name of a sampling parameter of episodes


class SampleSeeds:
    """Computes the seeds of one episode's samples.

    It counts the samples after equal tokens, including those that are still running.
    """

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._counts = Counter(_key(turn.parent, turn.new_prompt_ids) for turn in turns)

    def next_seed(self, base: int, parent: Turn | None, new_ids: TokenIds) -> int:
        """Return the seed of the next sample after the tokens of `parent` and `new_ids`."""
        key = _key(parent.id if parent is not None else None, new_ids)
        earlier = self._counts[key]
        self._counts[key] += 1
        before = parent.sampling.seed if parent is not None else None
        digest = hashlib.blake2b(f"{base}/{before}/{earlier}/".encode() + key[1], digest_size=8)
        return int.from_bytes(digest.digest(), "little") & MAX_SEED


def _key(parent: str | None, new_ids: TokenIds) -> tuple[str | None, bytes]:
    return parent, hashlib.blake2b(np.ascontiguousarray(new_ids, "<i4").data, digest_size=16).digest()
