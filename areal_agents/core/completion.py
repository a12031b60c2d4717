"""What an engine is requested to sample, and what it sampled.

A completion's three arrays always have the same length: one behavior logprob and one policy
version for every sampled token. The experts of a mixture-of-experts model are known for one token
fewer: the last sampled token has been through no layer yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Versions = npt.NDArray[np.int32]
Routing = npt.NDArray[np.int16]  # [R, layers, k] experts per token, -1 where they are not known

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]  # per token: (token id, logprob), best first

MAX_SEED = 2**63 - 1
UNSURE = -1  # the version of a token of a TokenChunk that is not known yet
MAX_TOP_K = 2**31 - 1


def as_token_ids(values: npt.ArrayLike) -> TokenIds:
    """Copy `values` into a read-only int32 array of token ids, shape [N]; ValueError if not 1-D."""
    return _frozen(values, np.int32)


def as_logprobs(values: npt.ArrayLike) -> Logprobs:
    """Copy `values` into a read-only float32 array, shape [N]; ValueError if not 1-D."""
    return _frozen(values, np.float32)


def _frozen(values: npt.ArrayLike, dtype: type) -> npt.NDArray:
    array: npt.NDArray = np.array(values, dtype=dtype)
    if array.ndim != 1:
        raise ValueError(f"expected a one-dimensional array, got shape {array.shape}")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must match: `text` is a JSON schema, a regular expression, an EBNF grammar, or
    xgrammar's structural tag as JSON, as `kind` says."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"kind must be one of {get_args(GrammarKind)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled. `temperature` 0 is greedy; `top_k` 0 means no top-k.

    `top_logprobs` asks for that many best tokens at each position; they are answered, not recorded.
    `routed_experts_from` asks for the experts of the prompt's tokens from that position on, and of what is
    sampled after them; None asks for none.
    ValueError for a value that an engine refuses, or that does not fit its tensors.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    grammar: Grammar | None = None
    top_logprobs: int = 0
    routed_experts_from: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be 0 (off) or from 1 to {MAX_TOP_K}, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be from 0 to {MAX_SEED}, got {self.seed}")
        if not 0 <= self.top_logprobs <= 20:
            raise ValueError(f"top_logprobs must be in [0, 20], got {self.top_logprobs}")
        if self.routed_experts_from is not None and self.routed_experts_from < 0:
            raise ValueError(f"routed_experts_from must be a position, got {self.routed_experts_from}")


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of a completion that is being sampled: `token_ids` and `logprobs` are [N], N ≥ 1.

    `top_logprobs` is [N] where they were requested, else empty. `versions` [N] are as in Completion, and
    UNSURE where the engine will tell only at the end; empty if it tells of none before that.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: TopLogprobs = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Tokens sampled by the behavior policy.

    Attributes:
        token_ids: [C] sampled ids, the stop token included where one was sampled.
        logprobs: [C] behavior logprobs, after temperature.
        versions: [C] policy version of the forward pass that sampled each token.
        finish_reason: "stop" (a stop token or string), "length", or "abort".
        top_logprobs: [C] the best tokens at each position where they were requested, else empty; for the
            answer only, the store does not keep them.
        routed_experts: [R, layers, k] what each token was sent through when the engine computed it, None
            where nobody asked. Of R tokens in a row, prompt and completion taken together, that end with
            the last but one: row R - C + j is of the token that sampled token j comes after. -1 is
            unknown.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    versions: Versions
    finish_reason: FinishReason
    top_logprobs: TopLogprobs = ()
    routed_experts: Routing | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        object.__setattr__(self, "logprobs", as_logprobs(self.logprobs))
        object.__setattr__(self, "versions", as_token_ids(self.versions))
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.token_ids)} token ids, {len(self.logprobs)} logprobs and "
                f"{len(self.versions)} versions: a completion has one of each per token"
            )
        if self.top_logprobs and len(self.top_logprobs) != len(self.token_ids):
            raise ValueError(
                f"{len(self.top_logprobs)} top logprobs for {len(self.token_ids)} tokens: one list per token"
            )
        routed = self.routed_experts
        if routed is not None and (routed.ndim != 3 or len(routed) < len(self.token_ids)):
            raise ValueError(
                f"routed experts of shape {routed.shape} for {len(self.token_ids)} sampled tokens: expected "
                "[R, layers, k] with a row for the token before each"
            )
        if self.finish_reason not in get_args(FinishReason):
            raise ValueError(
                f"finish_reason must be one of {get_args(FinishReason)}, got {self.finish_reason!r}"
            )
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise ValueError("behavior logprobs must be finite and at most 0")

    def __len__(self) -> int:
        return len(self.token_ids)


def joined_routing(first: Completion, second: Completion) -> Routing | None:
    """The routed experts of a completion in two parts, the second sampled after prompt and first part.

    What the first part was sampled with stands, although the second computed those tokens again; it is
    unknown where only the second recorded something. `second` must have been requested from the token that
    comes before its own first one.
    """
    if second.routed_experts is None:
        return first.routed_experts if not len(second) else None
    before = len(second.routed_experts) - len(second)  # rows of tokens that the first part ends with or has
    rows = second.routed_experts.copy()
    rows[max(0, before - len(first)) : before] = -1
    if first.routed_experts is None:
        return rows
    return np.concatenate([first.routed_experts, rows[before:]])
