"""Converts SGLang's JSON: a /generate body to checked requests, and a finished request to its answer."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, get_args

import numpy as np

from areal_agents.core.completion import Grammar, GrammarKind, SamplingParams, TokenIds, as_token_ids
from areal_agents.errors import RequestError
from areal_agents.inference.embedded.scheduling.grammar import TokenMatcher
from areal_agents.inference.embedded.scheduling.request import Finish, Request, RequestProgress
from areal_agents.inference.embedded.scheduling.text import Detokenizer

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SEED = 2**63 - 1
_FLAT, _FLAT_B64 = "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"
_GENERATE_FIELDS = {
    "input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len", "stream",
    "top_logprobs_num", "return_text_in_logprobs", "priority", "routed_dp_rank", "bootstrap_room",
    "lora_path", _FLAT, _FLAT_B64,
}  # fmt: skip
_SAMPLING_FIELDS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "stop", "stop_token_ids", "ignore_eos", "sampling_seed", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "n", "repetition_penalty", "min_new_tokens",
    "json_schema", "regex", "ebnf", "structural_tag", "stream_interval",
}  # fmt: skip
# Parameters of SGLang that are accepted here only with the value that has no effect.
_NEUTRAL = {"n": 1, "repetition_penalty": 1.0, "min_new_tokens": 0}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt of a /generate body, checked."""

    rid: str
    prompt: TokenIds
    sampling: SamplingParams
    logprobs: bool
    input_logprobs_from: int
    input_top: int
    flat_top: bool
    prompt_only: bool
    skip_special_tokens: bool
    trim_stop: bool
    adapter: str
    stream_interval: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_context: int
    has_tokenizer: bool


def parse_generate(body: Any, limits: RequestLimits) -> tuple[list[GenerationRequest], bool, bool]:
    """Parse a body into (prompts, is_batch, is_streamed); raises RequestError if it is invalid."""
    if not isinstance(body, dict):
        raise RequestError(f"expected a JSON object, got {type(body).__name__}")
    _check_fields(body, _GENERATE_FIELDS, "field")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise RequestError("input_ids must be a non-empty list of token ids (text prompts are not supported)")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    rids = body.get("rid")
    rids = [None] * len(prompts) if rids is None else rids if batch else [rids]
    params = body.get("sampling_params") or {}
    params = params if batch and isinstance(params, list) else [params] * len(prompts)
    if not isinstance(rids, list) or len(rids) != len(prompts) or len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts need as many rids and sampling_params")
    stream = _flag(body, "stream", default=False)
    if stream and batch:
        raise RequestError("stream takes a single prompt")
    if _flag(body, _FLAT, default=False) != _flag(body, _FLAT_B64, default=False):
        raise RequestError(f"the embedded engine supports {_FLAT} and {_FLAT_B64} only together")
    generations = [
        _generation(body, prompt, rid, sampling, limits)
        for prompt, rid, sampling in zip(prompts, rids, params, strict=True)
    ]
    if stream and any(generation.prompt_only for generation in generations):
        raise RequestError("max_new_tokens 0 computes a prompt only, which is not streamed")
    return generations, batch, stream


def _generation(
    body: dict[str, Any], prompt: Any, rid: Any, params: Any, limits: RequestLimits
) -> GenerationRequest:
    if rid is not None and not isinstance(rid, str):
        raise RequestError(f"rid must be a string, got {rid!r}")
    if not isinstance(params, dict):
        raise RequestError(f"sampling_params must be an object, got {params!r}")
    _check_fields(params, _SAMPLING_FIELDS, "sampling parameter")
    ids = _prompt_ids(prompt, limits)
    count = _integer(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, low=0)
    top = _integer(body, "top_logprobs_num", 0, low=0)
    if top > limits.vocab_size:
        raise RequestError(f"top_logprobs_num {top} exceeds the vocabulary of {limits.vocab_size}")
    # A request that only computes its prompt samples nothing: its sampling parameters are only validated.
    sampling = _sampling(params, max_new_tokens=count or 1, top_logprobs=top if count else 0)
    if len(ids) + count > limits.max_context:
        raise RequestError(
            f"{len(ids)} prompt tokens and max_new_tokens {count} exceed the context of {limits.max_context}",
            code="context_length_exceeded",
        )
    if sampling.stop and not limits.has_tokenizer:
        raise RequestError("stop strings need a tokenizer.json in the model folder; use stop_token_ids")
    if sampling.grammar is not None and not limits.has_tokenizer:
        raise RequestError(f"{sampling.grammar.kind} needs a tokenizer.json in the model folder")
    logprobs = _flag(body, "return_logprob", default=False)
    start = _integer(body, "logprob_start_len", -1, low=-1)
    if logprobs and start > len(ids):
        raise RequestError(f"logprob_start_len {start} exceeds the {len(ids)} prompt tokens")
    return GenerationRequest(
        rid=rid or uuid.uuid4().hex,
        prompt=ids,
        sampling=sampling,
        logprobs=logprobs,
        input_logprobs_from=start if logprobs and start < len(ids) else -1,
        input_top=top,
        flat_top=_flag(body, _FLAT, default=False),
        prompt_only=not count,
        skip_special_tokens=_flag(params, "skip_special_tokens", default=True),
        trim_stop=not _flag(params, "no_stop_trim", default=False),
        adapter=_adapter(body),
        stream_interval=_integer(params, "stream_interval", 1, low=1),
    )


def _adapter(body: dict[str, Any]) -> str:
    name = body.get("lora_path")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"lora_path must be the name of an adapter, got {name!r}")
    return name or ""


def _prompt_ids(prompt: Any, limits: RequestLimits) -> TokenIds:
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("input_ids must be a non-empty list of token ids")
    try:
        ids = np.array(prompt)
    except ValueError as error:
        raise RequestError("input_ids must be a flat list of integers") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("input_ids must be a flat list of integers")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
        raise RequestError(f"token id {wrong} is outside the vocabulary of {limits.vocab_size}")
    return as_token_ids(ids)


def _sampling(params: dict[str, Any], *, max_new_tokens: int, top_logprobs: int) -> SamplingParams:
    stop = params.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    stop_ids = params.get("stop_token_ids") or []
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise RequestError(f"stop must be a string or a list of strings, got {params['stop']!r}")
    if not isinstance(stop_ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in stop_ids):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {params['stop_token_ids']!r}")
    top_k = _integer(params, "top_k", -1, low=-1)
    seed = params.get("sampling_seed")
    try:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=_number(params, "temperature", 1.0),
            top_p=_number(params, "top_p", 1.0),
            top_k=max(top_k, 0),
            min_p=_number(params, "min_p", 0.0),
            frequency_penalty=_number(params, "frequency_penalty", 0.0),
            presence_penalty=_number(params, "presence_penalty", 0.0),
            stop=tuple(stop),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=_flag(params, "ignore_eos", default=False),
            seed=None if seed is None else _integer(params, "sampling_seed", 0, low=0) % (MAX_SEED + 1),
            grammar=_grammar(params),
            top_logprobs=top_logprobs,
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


def _grammar(params: dict[str, Any]) -> Grammar | None:
    """Return the grammar of the request, if any; an empty string means none, as in SGLang."""
    given: list[GrammarKind] = [kind for kind in get_args(GrammarKind) if params.get(kind)]
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(f"only one of {', '.join(given)} can be set")
    text = params[given[0]]
    if not isinstance(text, str):
        raise RequestError(f"{given[0]} must be a string, got {text!r}")
    return Grammar(given[0], text)


def _check_fields(given: dict[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(given.keys() - known):
        raise RequestError(
            f"unknown {what} {unknown[0]!r}; the embedded engine knows {', '.join(sorted(known))}"
        )
    for name, neutral in _NEUTRAL.items():
        if given.get(name) not in (None, neutral):
            raise RequestError(
                f"{name} {given[name]!r} is not supported by the embedded engine, only {neutral}"
            )


def _flag(given: dict[str, Any], name: str, *, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return value


def _integer(given: dict[str, Any], name: str, default: int, *, low: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value < 2**63:
        raise RequestError(f"{name} must be an integer of at least {low}, got {value!r}")
    return value


def _number(given: dict[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise RequestError(f"{name} must be a number, got {value!r}")
    return float(value)


def make_request(
    generation: GenerationRequest,
    *,
    seed: int,
    streaming: bool,
    matcher: TokenMatcher | None,
    notify: Callable[[Request], None],
) -> Request:
    """Make the scheduler's request for a parsed generation; `seed` is used if it has none."""
    sampling = generation.sampling
    return Request(
        rid=generation.rid,
        prompt=generation.prompt,
        sampling=sampling,
        seed=seed if sampling.seed is None else sampling.seed,
        notify=notify,
        input_logprobs_from=generation.input_logprobs_from,
        input_top=generation.input_top,
        prompt_only=generation.prompt_only,
        streaming=streaming,
        matcher=matcher,
        adapter=generation.adapter,
    )


def answer(
    request: Request,
    generation: GenerationRequest,
    progress: RequestProgress,
    text: str,
    *,
    latency_s: float,
    first: int = 0,
) -> dict[str, Any]:
    """Return the JSON answer with the tokens so far; finish_reason is null until the request has finished.

    The first `first` tokens are omitted because they were already sent; `text` is the text of the others.
    """
    ids = progress.ids[first:].tolist()
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(progress.ids),
        "cached_tokens": request.cached_tokens,
        "weight_version": progress.version,
        "weight_versions": progress.version_spans(),
        "num_retractions": request.retractions,
        "e2e_latency": latency_s,
    }
    if generation.logprobs:
        meta["output_token_logprobs"] = list(zip(progress.logprobs[first:].tolist(), ids, repeat(None)))  # noqa: B905
        if generation.sampling.top_logprobs:
            meta["output_top_logprobs"] = [
                [(logprob, token, None) for logprob, token in best] for best in progress.ranked[first:]
            ]
        if request.input_logprobs is not None:
            meta["input_token_logprobs"] = _input_logprobs(request)
            if request.input_top:
                meta |= _flat_input_top(request) if generation.flat_top else _input_top(request)
    if progress.finish is not None:
        meta["finish_reason"] = _finish_reason(progress.finish, len(progress.ids))
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _finish_reason(finish: Finish, count: int) -> dict[str, Any]:
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reason == "length":
        return {"type": "length", "length": count}
    return {"type": "abort", "message": finish.message}


def _input_logprobs(request: Request) -> list[tuple[float | None, int, None]]:
    """Return the prompt's tokens from position `input_logprobs_from` on; the first logprob is null, as in
    SGLang."""
    start = request.input_logprobs_from
    assert request.input_logprobs is not None
    values: list[float | None] = [None, *request.input_logprobs[start + 1 :].tolist()]
    return list(zip(values, request.prompt[start:].tolist(), repeat(None)))  # noqa: B905


def _input_top(request: Request) -> dict[str, Any]:
    """Return the most likely tokens at the same positions, as [logprob, id, null]."""
    ids, logprobs = _input_top_arrays(request)
    rows: list[list[tuple[float, int, None]] | None] = [
        list(zip(values, tokens, repeat(None)))  # noqa: B905
        for values, tokens in zip(logprobs.tolist(), ids.tolist(), strict=True)
    ]
    return {"input_top_logprobs": [None, *rows]}


def _flat_input_top(request: Request) -> dict[str, Any]:
    """Return the same as little-endian arrays in base64, which is many times faster to write and to parse."""
    ids, logprobs = _input_top_arrays(request)
    return {
        "input_top_logprobs_val_flat_b64": base64.b64encode(logprobs.astype("<f4").tobytes()).decode(),
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": list(ids.shape),
        "input_top_logprobs_null_prefix": 1,
    }


def _input_top_arrays(request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs [N, input_top] at the N positions after `input_logprobs_from`."""
    assert request.input_top_ids is not None and request.input_top_logprobs is not None
    start = request.input_logprobs_from + 1
    return request.input_top_ids[start:], request.input_top_logprobs[start:]


def text_of(progress: RequestProgress, generation: GenerationRequest, detokenizer: Detokenizer) -> str:
    """Return the completion's text, without the stop token or string that ended it."""
    ids, finish = progress.ids, progress.finish
    matched = finish.matched if finish is not None and generation.trim_stop else None
    if isinstance(matched, int):
        ids = ids[:-1]
    text = detokenizer.text(ids, skip_special_tokens=generation.skip_special_tokens)
    return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text
