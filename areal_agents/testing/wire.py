"""Writes a generation as SGLang's JSON: all its tokens, or only the new ones.

finish_reason is null until the generation has ended. Only its last answer has the version spans.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import TokenIds
from areal_agents.errors import RequestError
from areal_agents.testing.sampling import top_logprobs
from areal_agents.testing.session import ScriptedGeneration

ExpertsOf = Callable[[TokenIds], npt.NDArray[Any]]  # tokens [N] → experts [N, layers, k]


def answer(
    generation: ScriptedGeneration,
    body: Mapping[str, Any],
    *,
    prompt_tokens: int,
    start: int,
    vocab_size: int,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Return the JSON of the tokens that a generation has sampled.

    Args:
        generation: a running or ended generation.
        body: the request, which says whether to return logprobs, and how many.
        prompt_tokens: length of the prompt.
        start: index of the first token to return.
        vocab_size: size of the vocabulary, for the ids of made-up alternatives.
        text_of: returns the text of ids.
    """
    end = generation.sampled
    ids, logprobs = generation.plan.token_ids[start:end], generation.plan.logprobs[start:end]
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": generation.finish,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": end,
        "cached_tokens": 0,
        "weight_version": generation.versions[-1] if generation.versions else generation.gate.version,
    }
    if body.get("return_logprob"):
        meta["output_token_logprobs"] = [
            (logprob, token, None) for token, logprob in zip(ids, logprobs, strict=True)
        ]
        if k := requested_top_logprobs(body):
            meta["output_top_logprobs"] = top_logprobs(ids, logprobs, k, vocab_size)
    if generation.finish is not None:
        meta["weight_versions"] = version_spans(generation.versions)
        meta["num_retractions"] = 0
    return {"text": _text(generation, ids, text_of), "output_ids": ids, "meta_info": meta}


def requested_top_logprobs(body: Mapping[str, Any]) -> int:
    """Return the number of alternatives that a request asks for. Raise RequestError 400 if it is invalid."""
    k = body.get("top_logprobs_num") or 0
    if type(k) is not int or k < 0:
        raise RequestError(f"top_logprobs_num must be an integer of at least 0, got {k!r}")
    return k


def stream_interval_of(params: Mapping[str, Any]) -> int:
    """Return the number of tokens in each further chunk of a stream. Raise RequestError 400 if it is
    invalid."""
    interval = params.get("stream_interval")
    interval = 1 if interval is None else interval
    if type(interval) is not int or interval < 1:
        raise RequestError(f"stream_interval must be an integer of at least 1, got {interval!r}")
    return interval


def requested_experts_start(body: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """Return the first position whose experts a request asks for, or None.

    Raise RequestError 400 if the prompt has no such position.
    """
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= prompt_tokens:
        raise RequestError(f"routed_experts_start_len must be in [0, {prompt_tokens}], got {start!r}")
    return start


def routed_experts(experts_of: ExpertsOf, tokens: TokenIds, start: int) -> str:
    """Return the experts of the tokens [N] from position `start`, except the last, in SGLang's form."""
    rows = experts_of(tokens)[start : len(tokens) - 1]
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the spans of equal versions, as [{"version", "start", "end"}]."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def _text(generation: ScriptedGeneration, ids: list[int], text_of: Callable[[Sequence[int]], str]) -> str:
    """Return the text without the stop token or the stop string that ended it."""
    matched = (generation.finish or {}).get("matched")
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = text_of(ids)
    return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text
