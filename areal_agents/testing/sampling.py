"""Converts a scripted reply to sampled tokens, cut at the request's limits, with a logprob for each token.

Logprobs depend only on the seed, the prompt and the position: equal calls get equal logprobs, whether they
are streamed or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import TokenIds
from areal_agents.errors import RequestError
from areal_agents.testing.script import ScriptedReply

DEFAULT_MAX_NEW_TOKENS = 128
_LOWEST_LOGPROB = 4.0
TopLogprobs = list[list[tuple[float, int, None]]]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Everything that one call will sample.

    Attributes:
        token_ids: [C] the sampled ids.
        logprobs: [C] their logprobs, finite and at most 0.
        finish: SGLang's finish_reason.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """The conditions under which a request ends a reply, whatever the script says."""

    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]


def ending_of(params: Mapping[str, Any], stop_token_id: int) -> Ending:
    """Read `sampling_params`. Raise RequestError 400, which names the invalid parameter."""
    limit = params.get("max_new_tokens")
    limit = DEFAULT_MAX_NEW_TOKENS if limit is None else limit
    if type(limit) is not int or limit < 1:
        raise RequestError(f"max_new_tokens must be an integer of at least 1, got {limit!r}")
    if params.get("n") not in (None, 1):
        raise RequestError(f"n must be 1, because the scripted engine has no batches, got {params['n']!r}")
    stop = params.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"stop must be a string or a list of strings, got {params['stop']!r}")
    ids = params.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    ends = frozenset() if params.get("ignore_eos") else frozenset((*ids, stop_token_id))
    return Ending(limit, ends, tuple(stop))


def plan(
    reply: ScriptedReply,
    token_ids: Sequence[int],
    ending: Ending,
    *,
    seed: int,
    decode: Callable[[Sequence[int]], str],
) -> SamplingPlan:
    """Cut a reply's `token_ids`, which include its stop token, at the first end that the request names.

    `decode` returns the text of ids; it is called only if stop strings are requested.
    """
    ids, finish = _cut(list(token_ids), ending, decode)
    return SamplingPlan(ids, logprobs(seed, len(ids)).tolist(), finish or _as_scripted(reply, ids))


def _as_scripted(reply: ScriptedReply, ids: list[int]) -> dict[str, Any]:
    match reply.finish:
        case "stop":
            return {"type": "stop", "matched": ids[-1] if ids else None}
        case "length":
            return {"type": "length", "length": len(ids)}
        case _:
            return {"type": "abort", "message": "aborted by the script"}


def _cut(
    ids: list[int], ending: Ending, decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], dict[str, Any] | None]:
    stops = ending.stop_strings
    for index, token in enumerate(ids[: ending.max_new_tokens]):
        if token in ending.stop_token_ids:
            return ids[: index + 1], {"type": "stop", "matched": token}
        if stops and (text := _stop_string(ids[: index + 1], stops, decode)):
            return ids[: index + 1], {"type": "stop", "matched": text}
    if len(ids) > ending.max_new_tokens:
        kept = ids[: ending.max_new_tokens]
        return kept, {"type": "length", "length": len(kept)}
    return ids, None


def _stop_string(ids: list[int], stops: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> str:
    # Called after each token, so a match ends in the last token. A character may consist of four tokens.
    text = decode(ids[-(4 * max(map(len, stops)) + 16) :])
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else ""


def seed_of(seed: int, input_ids: TokenIds) -> int:
    """Return the seed of one call's logprobs."""
    return (seed << 32) | zlib.crc32(np.ascontiguousarray(input_ids, np.int32).tobytes())


def logprobs(seed: int, count: int) -> npt.NDArray[np.float32]:
    """Return [count] pseudo-random logprobs; a longer array begins with the shorter one."""
    return -_LOWEST_LOGPROB * np.random.default_rng(seed).random(count, dtype=np.float32)


def top_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], k: int, vocab_size: int) -> TopLogprobs:
    """Return SGLang's triples [C][k] of the best tokens per position: the sampled one, then made-up ones."""
    return [
        [(logprob - rank, (token + rank) % vocab_size, None) for rank in range(k)]
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
