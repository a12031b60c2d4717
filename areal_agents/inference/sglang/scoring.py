"""Scores given tokens through SGLang's /generate: builds the request and checks the answer.

SGLang returns the logprob of each prompt token after position `logprob_start_len`, computed from the logits
of the position before; the entry of `logprob_start_len` itself is null. To score positions from s on, the
client therefore sends s - 1. A server reuses no cached prefix beyond `logprob_start_len`, so that the
logits of position s - 1 and of all later ones are computed again. `max_new_tokens` 0 samples nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_agents.core.completion import TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.engine import PromptScores, version_from_wire
from areal_agents.inference.sglang.wire import UNREADABLE, finish_reason_of, meta_of, shorten

# tolerance between two logprobs of one token in one answer, which servers may round differently
_MOST_DIFFERENCE = 0.05


def check_range(prompt_tokens: int, start: int, top: int, vocab_size: int) -> None:
    """Raise EngineRejected unless positions `start`.. of a prompt can be scored with the `top` best tokens.

    This is checked before the request is sent, because some versions of SGLang crash if `top` exceeds the
    vocabulary.
    """
    if not 1 <= start < prompt_tokens:
        raise EngineRejected(
            f"start must be at least 1, since nothing comes before position 0, and below the {prompt_tokens} "
            f"positions of input_ids, got {start}"
        )
    if not 0 <= top <= vocab_size:
        raise EngineRejected(f"top must be from 0 to the vocabulary size, {vocab_size}, got {top}")


def scoring_to_wire(input_ids: TokenIds, start: int, top: int) -> dict[str, Any]:
    """Return the /generate body that scores positions `start`.. of `input_ids` [P], without its rid."""
    body: dict[str, Any] = {
        "input_ids": np.ascontiguousarray(input_ids),
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "stream": False,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    if top:
        # Requests base64 arrays instead of lists; a server without this option answers with lists.
        flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
        body |= {"top_logprobs_num": top, **flat}
    return body


def scores_from_wire(
    answer: Any, input_ids: TokenIds, *, start: int, top: int, vocab_size: int
) -> PromptScores:
    """Return the scores in an answer to `scoring_to_wire(input_ids, start, top)`.

    Raises EngineError if they belong to other tokens or cannot be logprobs of one distribution at each
    position, EngineRejected or EngineUnavailable if the answer reports that the request was refused or
    failed, and EngineUnavailable if it was aborted.
    """
    meta = meta_of(answer)
    if finish_reason_of(meta) == "abort":
        raise EngineUnavailable(f"the engine aborted the scoring: {shorten(str(meta['finish_reason']))}")
    try:
        token_logprobs = _token_logprobs(meta, input_ids, start, vocab_size)
        top_ids, top_logprobs = _top(meta, (len(token_logprobs), top), vocab_size)
        version = version_from_wire(meta.get("weight_version", "default"))
        scores = PromptScores(token_logprobs, top_ids, top_logprobs, version)
    except UNREADABLE as error:
        raise EngineError(f"/generate returned scores that cannot be read: {error!r}") from error
    check_agreement(scores, input_ids[start:])
    return scores


def _token_logprobs(meta: Mapping[str, Any], input_ids: TokenIds, start: int, vocab_size: int) -> np.ndarray:
    """Return [N] float32 logprobs of the tokens at `start`..; EngineError if the answer is for other
    tokens."""
    triples = meta.get("input_token_logprobs")
    expected = input_ids[start - 1 :]
    if not isinstance(triples, list) or len(triples) != len(expected):
        found = len(triples) if isinstance(triples, list) else "no"
        raise EngineError(
            f"/generate returned {found} logprobs of prompt tokens, expected {len(expected)}: the server "
            "does not score given tokens, or has cut the prompt"
        )
    ids = [triple[1] for triple in triples]
    if any(type(id) is not int for id in ids):
        raise EngineError("/generate returned logprobs of prompt tokens whose ids are no integers")
    # SGLang reports the last id of the vocabulary as 0, with the logprob of the real token.
    same = (np.array(ids) == expected) | ((np.array(ids) == 0) & (expected == vocab_size - 1))
    if not same.all():
        at = int(np.argmin(same))
        raise EngineError(
            f"/generate scored the token {ids[at]} at position {start - 1 + at}, expected {expected[at]}"
        )
    return np.array([triple[0] for triple in triples[1:]], np.float32)


def _top(
    meta: Mapping[str, Any], expected: tuple[int, int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs of shape `expected`, [N, k], from either form of the answer."""
    if not expected[1]:
        return np.zeros(expected, np.int32), np.zeros(expected, np.float32)
    if "input_top_logprobs_shape" in meta:
        shape = tuple(meta["input_top_logprobs_shape"])
        empty = meta["input_top_logprobs_null_prefix"]
        ids = _flat_array(meta, "idx", "int32").reshape(shape)
        logprobs = _flat_array(meta, "val", "float32").reshape(shape)
    else:
        rows = meta.get("input_top_logprobs")
        if not isinstance(rows, list) or not rows:
            raise EngineError(
                "/generate returned no top logprobs of the prompt, although they were requested"
            )
        empty, rows = int(not rows[0]), rows[1:]
        if any(type(item[1]) is not int for row in rows for item in row):
            raise EngineError("/generate returned top logprobs whose ids are no integers")
        ids = np.array([[item[1] for item in row] for row in rows])
        logprobs = np.array([[item[0] for item in row] for row in rows], np.float32)
    if empty != 1 or ids.shape != expected or logprobs.shape != expected:
        raise EngineError(
            f"/generate returned top logprobs of shape {ids.shape} after {empty} empty positions, expected "
            f"{expected} after 1"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise EngineError(
            f"/generate returned top logprobs of ids from {ids.min()} to {ids.max()}, outside its vocabulary "
            f"of {vocab_size}"
        )
    return ids, logprobs


def _flat_array(meta: Mapping[str, Any], kind: str, dtype: str) -> np.ndarray:
    name = f"input_top_logprobs_{kind}_flat_b64"
    if meta[f"{name}_dtype"] != dtype:
        raise EngineError(f"/generate returned {name} as {meta[f'{name}_dtype']}, expected {dtype}")
    return np.frombuffer(base64.b64decode(meta[name], validate=True), np.dtype(dtype).newbyteorder("<"))


def check_agreement(scores: PromptScores, tokens: TokenIds) -> None:
    """Raise EngineError unless the scores of `tokens` [N] agree with the best tokens of their positions.

    A token among the best must have the same logprob in both lists; any other token must not have a greater
    logprob than the last of the best.
    """
    if not scores.top_ids.size:
        return
    given = scores.token_logprobs[:, None]  # [N, 1]
    is_token = scores.top_ids == tokens[:, None]  # [N, k]
    differs = is_token & (np.abs(scores.top_logprobs - given) > _MOST_DIFFERENCE)
    is_left_out = ~is_token.any(axis=1) & (given > scores.top_logprobs[:, -1:] + _MOST_DIFFERENCE)[:, 0]
    wrong = differs.any(axis=1) | is_left_out
    if wrong.any():
        at = int(np.argmax(wrong))
        pairs = zip(scores.top_ids[at].tolist(), scores.top_logprobs[at].tolist(), strict=True)
        best = ", ".join(f"{token}: {logprob:.4f}" for token, logprob in pairs)
        raise EngineError(
            f"/generate gives the token {tokens[at]} the logprob {scores.token_logprobs[at]:.4f}, which "
            f"contradicts the best tokens of its position: {shorten(best)}"
        )
