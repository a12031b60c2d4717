"""Sampling parameters, grammars and completions: the request to an engine and what the engine sampled.

A completion's three arrays always have the same length: one behavior logprob and one policy
version for every sampled token. The experts of a mixture-of-experts model are known for one token
fewer, because the last sampled token has not been through a layer yet. Imported tokens, which no policy
sampled, have no logprobs and no version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Versions = npt.NDArray[np.int32]
Routing = npt.NDArray[np.int16]  # [R, layers, k] experts per token, -1 if unknown

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]  # per token: (token id, logprob), best first

MAX_SEED = 2**63 - 1
UNSURE = -1  # the version of a token in a TokenChunk while it is unknown
NO_VERSION = -1  # the version of an imported token
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
    """A grammar that a completion must match.

    `kind` says whether `text` is a JSON schema, a regular expression, an EBNF grammar, or xgrammar's
    structural tag as JSON.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"kind must be one of {get_args(GrammarKind)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled. `temperature` 0 is greedy; `top_k` 0 means no top-k.

    `top_logprobs` requests that many best tokens at each position; they are returned, not recorded.
    `routed_experts_from` requests the experts of the prompt's tokens from that position on, and of the
    sampled tokens; None requests none.
    Raises ValueError for a value that an engine refuses, or that does not fit its tensors.
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
            raise ValueError(
                f"routed_experts_from must be a position of at least 0, got {self.routed_experts_from}"
            )

    @property
    def changes_the_policy(self) -> bool:
        """Whether samples have another distribution than that of the model at temperature 1."""
        defaults = (1.0, 1.0, 0, 0.0, 0.0, 0.0, None)
        return defaults != (
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.frequency_penalty,
            self.presence_penalty,
            self.grammar,
        )


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of a completion that is being sampled: `token_ids` and `logprobs` are [N], N ≥ 1.

    `top_logprobs` is [N] if they were requested, else empty. `versions` [N] are as in Completion, and UNSURE
    for a token whose version the engine reports only at the end; empty if it reports all of them at the end.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: TopLogprobs = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Tokens sampled by the behavior policy, or imported from a file.

    Attributes:
        token_ids: [C] sampled ids, including the stop token if one was sampled.
        logprobs: [C] behavior logprobs, after temperature; None for imported tokens.
        versions: [C] policy version of the forward pass that sampled each token; NO_VERSION for imported
            tokens.
        finish_reason: "stop" (a stop token or string), "length", or "abort".
        top_logprobs: [C] the best tokens at each position if they were requested, else empty; for the
            response only, the store does not keep them.
        routed_experts: [R, layers, k] the experts that processed each token when the engine computed it; None
            if they were not requested. The rows are those of R consecutive tokens of prompt and completion
            that end with the last but one: row R - C + j belongs to the token before sampled token j. -1 is
            unknown.
    """

    token_ids: TokenIds
    logprobs: Logprobs | None
    versions: Versions
    finish_reason: FinishReason
    top_logprobs: TopLogprobs = ()
    routed_experts: Routing | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        object.__setattr__(self, "versions", as_token_ids(self.versions))
        if self.logprobs is None:
            self._check_imported()
        else:
            object.__setattr__(self, "logprobs", as_logprobs(self.logprobs))
        logprobs = self.versions if self.logprobs is None else self.logprobs
        if not len(self.token_ids) == len(logprobs) == len(self.versions):
            raise ValueError(
                f"a completion must have one logprob and one version per token, got {len(self.token_ids)} "
                f"token ids, {len(logprobs)} logprobs and {len(self.versions)} versions"
            )
        if self.top_logprobs and len(self.top_logprobs) != len(self.token_ids):
            raise ValueError(
                "a completion must have one list of top logprobs per token, got "
                f"{len(self.top_logprobs)} for {len(self.token_ids)} tokens"
            )
        routed = self.routed_experts
        if routed is not None and (routed.ndim != 3 or len(routed) < len(self.token_ids)):
            raise ValueError(
                "routed experts must have the shape [R, layers, k] with a row for the token before each "
                f"sampled token, got {routed.shape} for {len(self.token_ids)} sampled tokens"
            )
        if self.finish_reason not in get_args(FinishReason):
            raise ValueError(
                f"finish_reason must be one of {get_args(FinishReason)}, got {self.finish_reason!r}"
            )
        if self.logprobs is not None and (
            not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any()
        ):
            raise ValueError("behavior logprobs must be finite and at most 0")

    @classmethod
    def imported(cls, token_ids: npt.ArrayLike) -> Completion:
        """Return the completion of an imported reply."""
        ids = as_token_ids(token_ids)
        return cls(ids, None, np.full(len(ids), NO_VERSION), "stop")

    @property
    def is_imported(self) -> bool:
        """Whether the tokens are imported: no policy of this store sampled them."""
        return self.logprobs is None

    @property
    def behavior_logprobs(self) -> Logprobs:
        """[C] the behavior logprobs; the tokens must not be imported."""
        assert self.logprobs is not None, "imported tokens have no behavior logprobs"
        return self.logprobs

    def __len__(self) -> int:
        return len(self.token_ids)

    def _check_imported(self) -> None:
        if (self.versions != NO_VERSION).any() or self.routed_experts is not None or self.top_logprobs:
            raise ValueError(
                "imported tokens have no policy version, no routed experts and no top logprobs, because no "
                "policy sampled them"
            )


def joined_routing(first: Completion, second: Completion) -> Routing | None:
    """The routed experts of a completion in two parts; the second was sampled after prompt and first part.

    The experts recorded for the first part are kept, although the second part computed those tokens again;
    they are unknown if only the second part recorded any. The request of `second` must have included the
    token before its own first one.
    """
    if second.routed_experts is None:
        return first.routed_experts if not len(second) else None
    before = len(second.routed_experts) - len(second)  # rows of tokens that the first part ends with or has
    rows = second.routed_experts.copy()
    rows[max(0, before - len(first)) : before] = -1
    if first.routed_experts is None:
        return rows
    return np.concatenate([first.routed_experts, rows[before:]])
