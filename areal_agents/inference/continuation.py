"""Continues an interrupted completion on exactly the tokens that were already sampled.

Invariant: a token keeps the logprob and the version that it was sampled with, and tokens that were delivered
to the caller are never revoked. Where a completion cannot be continued (under a grammar, or under penalties,
which an engine counts over its own output), it is sampled again from its start; if part of it was already
delivered, this is an error instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from areal_agents.core.completion import (
    UNSURE,
    Completion,
    FinishReason,
    SamplingParams,
    TokenChunk,
    TokenIds,
    as_token_ids,
    joined_routing,
)
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.answers import check_logprobs
from areal_agents.inference.engine import OnTokens

Decode = Callable[[Sequence[int]], str]  # decodes token ids


class StopString(Exception):
    """A stop string ended the completion, which `PartialCompletion.stopped` returns; the engine was still
    sampling."""


class OldVersion(EngineError):
    """An engine sampled with an older version than it served before, so it was restarted."""


class PartialCompletion:
    """A completion that is being sampled, possibly in several attempts on different engines.

    Args:
        input_ids: [P] the prompt.
        sampling: the parameters that the caller requested.
        on_tokens: receives tokens as they arrive; None if the caller waits for the whole completion.
        decode: decodes token ids, to find stop strings that span two attempts; without it a completion with
            stop strings cannot be continued.
        stream_interval: see Sampler.generate.

    Attributes:
        kept: the number of tokens kept from earlier attempts.
        newest: the version of the last of these tokens; -1 if there are none.
        is_aborted: whether the caller aborted the completion, so that it is not continued.
        rid: the request id of the running attempt.
    """

    __slots__ = (
        "is_aborted", "kept", "newest", "rid", "stream_interval", "_boundary", "_chunks", "_cut", "_decode",
        "_delivered", "_input_ids", "_latest", "_min_version", "_on_tokens", "_part", "_sampling",
        "_streamed",
    )  # fmt: skip

    def __init__(
        self,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        decode: Decode | None = None,
        *,
        stream_interval: int = 1,
    ) -> None:
        self.stream_interval = stream_interval
        self.kept = 0
        self.newest = -1
        self.is_aborted = False
        self.rid = ""
        self._input_ids = input_ids
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._decode = decode
        self._part: Completion | None = None  # kept from earlier attempts
        self._chunks: list[TokenChunk] = []  # streamed by this attempt
        self._streamed = 0  # number of tokens in _chunks
        self._delivered = 0  # tokens delivered to the caller
        self._min_version = -1  # lowest version allowed in this attempt
        self._latest = UNSURE  # the version of the last token of this attempt
        self._boundary: _Boundary | None = None
        # tokens of this attempt up to the end of a stop string that spans the boundary
        self._cut: int | None = None

    @property
    def input_ids(self) -> TokenIds:
        """[P + kept] the prompt of the next attempt."""
        if self._part is None:
            return self._input_ids
        return as_token_ids(np.concatenate([self._input_ids, self._part.token_ids]))

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the next attempt."""
        if not self.kept:
            return self._sampling
        # The seed is unchanged: engines derive each random number from the seed and the position in the
        # sequence.
        return replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - self.kept)

    @property
    def reached(self) -> int:
        """The number of tokens so far, including those that the running attempt has streamed."""
        return self.kept + self._streamed

    @property
    def streams(self) -> bool:
        """Whether the caller receives tokens as they arrive."""
        return self._on_tokens is not None

    def begin(self, rid: str, *, least_version: int = -1) -> None:
        """Start an attempt; a token of a version below `least_version` raises OldVersion."""
        self.rid, self._min_version, self._cut, self._latest = rid, least_version, None, UNSURE
        self._chunks.clear()
        self._streamed = 0

    def take(self, chunk: TokenChunk) -> None:
        """Receive streamed tokens. Raises EngineError for invalid tokens before they are delivered."""
        check_logprobs(chunk.logprobs)
        for version in chunk.versions:
            if version == UNSURE:
                continue
            if version < self._latest:
                raise EngineError(f"the engine streamed version {version} after version {self._latest}")
            if version < self._min_version:
                raise OldVersion(f"tokens of version {version} came after version {self._min_version}")
            self._latest = version
        self._chunks.append(chunk)
        before, self._streamed = self._streamed, self._streamed + len(chunk.token_ids)
        if self._boundary is not None:
            self._take_after_boundary(self._boundary, chunk, before)
        elif self._on_tokens is not None:
            self._delivered += len(chunk.token_ids)
            self._on_tokens(chunk)

    def _take_after_boundary(self, boundary: _Boundary, chunk: TokenChunk, before: int) -> None:
        """Receive a chunk of a later attempt, `before` tokens after the boundary.

        Raises StopString once a stop string that spans the boundary is complete.
        """
        if self._cut is None:
            self._cut = boundary.feed(before, chunk.token_ids)
            given = chunk if self._cut is None else _first(chunk, self._cut - before)
            if self._on_tokens is not None and given.token_ids:
                self._delivered += len(given.token_ids)
                self._on_tokens(given)
        if self._cut is not None and self._received(self._cut) is not None:
            raise StopString

    @property
    def latest(self) -> int:
        """The version of the last token that the running attempt has streamed; UNSURE if not known."""
        return self._latest

    @property
    def has_delivered(self) -> bool:
        """Whether tokens of the running attempt were delivered to the caller."""
        return self._delivered > self.kept

    def discard(self) -> None:
        """Discard the tokens of this attempt, which cannot be trusted."""
        self._chunks.clear()
        self._streamed, self._cut, self._latest = 0, None, UNSURE

    def finished(self, last: Completion) -> Completion:
        """Return the whole completion after its last attempt."""
        if self._cut is None and self._boundary is not None:
            self._cut = self._boundary.feed(0, last.token_ids.tolist())
        if self._cut is not None:
            last = _until(last, self._cut, "stop")
        return last if self._part is None else _joined(self._part, last)

    def stopped(self) -> Completion:
        """Return the whole completion after StopString."""
        last = None if self._cut is None else self._received(self._cut)
        assert last is not None, "a stop string was found"
        return self.finished(last)

    def interrupted(self, attempt: Completion | None) -> Completion | None:
        """Keep the tokens of an interrupted attempt: of its answer, or, if None, those that it streamed.

        Returns the completion if nothing is left to sample. Raises EngineUnavailable if it cannot be
        continued; the caller then has an incomplete completion.
        """
        found = self._certain_part() if attempt is None else attempt
        if self._cut is None and self._boundary is not None:
            self._cut = self._boundary.feed(0, found.token_ids.tolist())
        if self._cut is not None and len(found) >= self._cut:
            return self.finished(found)
        if not self._can_continue and self.kept + len(found):
            self._restart()
            return None
        if self._delivered > self.kept + len(found):
            raise EngineUnavailable(
                "the engine was lost, and the policy version of tokens that were already streamed is not "
                "known; send the request again"
            )
        self._keep(found)
        return self._complete_if_finished()

    @property
    def _can_continue(self) -> bool:
        sampling = self._sampling
        return (
            sampling.grammar is None
            and not sampling.frequency_penalty
            and not sampling.presence_penalty
            and (self._decode is not None or not sampling.stop)
        )

    def _restart(self) -> None:
        if self._delivered:
            raise EngineUnavailable(
                "the engine was lost while it streamed a completion with a grammar, penalties or stop "
                "strings, which cannot be continued on another engine; send the request again"
            )
        self._part, self._boundary, self.kept, self.newest = None, None, 0, -1

    def _certain_part(self) -> Completion:
        """Return the streamed tokens of this attempt up to the first whose version is not known."""
        sure = 0
        for chunk in self._chunks:
            if not chunk.versions or UNSURE in chunk.versions:
                break
            sure += len(chunk.token_ids)
        received = self._received(sure)
        assert received is not None
        return received

    def _received(self, count: int) -> Completion | None:
        """Return the first `count` streamed tokens of this attempt; None if a version is not known."""
        ids = [token for chunk in self._chunks for token in chunk.token_ids][:count]
        versions = [version for chunk in self._chunks for version in chunk.versions][:count]
        if len(versions) < len(ids) or UNSURE in versions:
            return None
        logprobs = [value for chunk in self._chunks for value in chunk.logprobs][:count]
        top = tuple(best for chunk in self._chunks for best in chunk.top_logprobs)[:count]
        return Completion(ids, logprobs, versions, "abort", top)  # type: ignore[arg-type]

    def _keep(self, found: Completion) -> None:
        if not len(found):
            return
        self._part = found if self._part is None else _joined(self._part, found)
        self.kept = len(self._part)
        self.newest = int(self._part.versions[-1])
        if self._sampling.stop and self._decode is not None:
            self._boundary = _Boundary(self._sampling.stop, self._decode, self._part.token_ids.tolist())

    def _complete_if_finished(self) -> Completion | None:
        """Return the completion if the kept tokens already end it: the engine died before it reported the
        end."""
        part, sampling = self._part, self._sampling
        if part is None:
            return None
        if not sampling.ignore_eos and int(part.token_ids[-1]) in sampling.stop_token_ids:
            return _until(part, len(part), "stop")
        return _until(part, len(part), "length") if self.kept >= sampling.max_new_tokens else None


class _Boundary:
    """The boundary of two attempts: finds stop strings that span it, which no engine sees."""

    def __init__(self, stops: tuple[str, ...], decode: Decode, kept: Sequence[int]) -> None:
        self._stops = stops
        self._decode = decode
        # Four tokens may make one character; some of the first may be the end of another.
        self._reach = 4 * max(map(len, stops)) + 16
        self._tail = list(kept[-self._reach :])
        before = decode(self._tail)
        self._known = [before.count(stop) for stop in stops]
        self._fed: list[int] = []

    def feed(self, start: int, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens after the boundary up to the end of a stop string; None without one.

        `start` is the number of tokens after the boundary that precede `token_ids`.
        """
        del self._fed[start:]
        for token in token_ids:
            if len(self._fed) >= self._reach:
                return None
            self._fed.append(int(token))
            text = self._decode(self._tail + self._fed)
            if any(text.count(stop) > known for stop, known in zip(self._stops, self._known, strict=True)):
                return len(self._fed)
        return None


def _joined(first: Completion, second: Completion) -> Completion:
    try:
        return Completion(
            token_ids=np.concatenate([first.token_ids, second.token_ids]),
            logprobs=np.concatenate([first.behavior_logprobs, second.behavior_logprobs]),
            versions=np.concatenate([first.versions, second.versions]),
            finish_reason=second.finish_reason,
            top_logprobs=first.top_logprobs + second.top_logprobs,
            routed_experts=joined_routing(first, second),
        )
    except ValueError as error:
        raise EngineError(f"the parts of a completion do not fit together: {error}") from error


def _until(completion: Completion, count: int, reason: FinishReason) -> Completion:
    """Return the first `count` tokens of a completion."""
    routed, beyond = completion.routed_experts, len(completion) - count
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.behavior_logprobs[:count],
        versions=completion.versions[:count],
        finish_reason=reason,
        top_logprobs=completion.top_logprobs[:count],
        routed_experts=routed if routed is None else routed[: len(routed) - beyond],
    )


def _first(chunk: TokenChunk, count: int) -> TokenChunk:
    return TokenChunk(
        chunk.token_ids[:count],
        chunk.logprobs[:count],
        chunk.top_logprobs[:count],
        chunk.versions[:count],
    )
