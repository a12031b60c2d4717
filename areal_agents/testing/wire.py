"""Writes a generation as SGLang's JSON, in full or only what is new.

finish_reason is null until the generation has ended; the version spans come with its last answer only.
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
from areal_agents.testing.session import Generation

ExpertsOf = Callable[[TokenIds], npt.NDArray[Any]]  # tokens [N] → experts [N, layers, k]


def answer(
    generation: Generation,
    body: Mapping[str, Any],
    *,
    prompt_tokens: int,
    start: int,
    vocab_size: int,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """What `generation` has sampled from its token `start` on.

    Args:
        generation: running or ended.
        body: the request, which says whether logprobs are wanted and how many.
        prompt_tokens: length of the prompt.
        start: the first token that is answered: 0 for all of them.
        vocab_size: for the ids of the made-up alternatives.
        text_of: the text of ids.
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
        if k := top_logprobs_asked(body):
            meta["output_top_logprobs"] = top_logprobs(ids, logprobs, k, vocab_size)
    if generation.finish is not None:
        meta["weight_versions"] = version_spans(generation.versions)
        meta["num_retractions"] = 0
    return {"text": _text(generation, ids, text_of), "output_ids": ids, "meta_info": meta}


def top_logprobs_asked(body: Mapping[str, Any]) -> int:
    """How many alternatives a request wants. RequestError 400 if that is no count."""
    k = body.get("top_logprobs_num") or 0
    if type(k) is not int or k < 0:
        raise RequestError(f"top_logprobs_num must be a count, got {k!r}")
    return k


def routed_experts_asked(body: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """The first position whose experts a request wants, if any. RequestError 400 if it has no such one."""
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= prompt_tokens:
        raise RequestError(f"routed_experts_start_len must be in [0, {prompt_tokens}], got {start!r}")
    return start


def routed_experts(experts_of: ExpertsOf, tokens: TokenIds, start: int) -> str:
    """The experts of the tokens [N] from position `start` on but for the last, in SGLang's form."""
    rows = experts_of(tokens)[start : len(tokens) - 1]
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of equal versions, as [{"version", "start", "end"}]."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def _text(generation: Generation, ids: list[int], text_of: Callable[[Sequence[int]], str]) -> str:
    """The text without the stop token or the stop string that ended it."""
    matched = (generation.finish or {}).get("matched")
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = text_of(ids)
    return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text
