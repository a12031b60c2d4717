"""Continues an interrupted completion on exactly the tokens that were already sampled.

Invariant: a token keeps the logprob and the version that it was sampled with, and what the caller has been
given is never taken back. Where a completion cannot be continued (under a grammar, or under penalties,
which an engine counts over its own output), it is sampled again from its start; once a piece of it has been
given away, that is an error instead.
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

Decode = Callable[[Sequence[int]], str]  # the text of token ids


class StopString(Exception):
    """A stop string has ended a completion that the engine would continue with: `Draft.stopped` has it."""


class OldVersion(EngineError):
    """An engine samples with a version older than it served before: it was started again."""


class Draft:
    """One completion while it is sampled, in however many attempts.

    Args:
        input_ids: [P] the prompt.
        sampling: as the caller requested.
        on_tokens: the caller's, None for one that waits for the whole.
        decode: finds stop strings that lie over the seam of two attempts; without it a completion with
            stop strings cannot be continued.

    Attributes:
        kept: how many tokens earlier attempts have brought.
        newest: the latest version among them, -1 for none.
        is_aborted: the caller ended it by `abort`, so it is not continued.
        rid: under which the engine knows the running attempt.
    """

    __slots__ = (
        "is_aborted", "kept", "newest", "rid", "_chunks", "_cut", "_decode", "_handed", "_input_ids",
        "_latest", "_least", "_on_tokens", "_part", "_sampling", "_seam", "_streamed",
    )  # fmt: skip

    def __init__(
        self,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.kept = 0
        self.newest = -1
        self.is_aborted = False
        self.rid = ""
        self._input_ids = input_ids
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._decode = decode
        self._part: Completion | None = None  # what earlier attempts have brought
        self._chunks: list[TokenChunk] = []  # what this attempt has streamed
        self._streamed = 0  # tokens in them
        self._handed = 0  # tokens that the caller was given
        self._least = -1  # no version of this attempt is below
        self._latest = UNSURE  # the last version that this attempt has named
        self._seam: _Seam | None = None
        self._cut: int | None = None  # tokens of this attempt until a stop string over the seam ends

    @property
    def input_ids(self) -> TokenIds:
        """[P + kept] what the next attempt continues from."""
        if self._part is None:
            return self._input_ids
        return as_token_ids(np.concatenate([self._input_ids, self._part.token_ids]))

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the rest."""
        if not self.kept:
            return self._sampling
        # With the same seed: engines sample a token with the number of its position in the whole sequence.
        return replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - self.kept)

    @property
    def reached(self) -> int:
        """How many tokens there are, those of the running attempt among them as far as they were streamed."""
        return self.kept + self._streamed

    @property
    def streams(self) -> bool:
        """Whether the caller wants pieces."""
        return self._on_tokens is not None

    def begin(self, rid: str, *, least_version: int = -1) -> None:
        """An attempt starts; a token of a version below `least_version` raises OldVersion."""
        self.rid, self._least, self._cut, self._latest = rid, least_version, None, UNSURE
        self._chunks.clear()
        self._streamed = 0

    def take(self, chunk: TokenChunk) -> None:
        """The `on_tokens` of an attempt; EngineError for what cannot be, before the caller sees it."""
        check_logprobs(chunk.logprobs)
        for version in chunk.versions:
            if version == UNSURE:
                continue
            if version < self._latest:
                raise EngineError(f"the engine streamed version {version} after version {self._latest}")
            if version < self._least:
                raise OldVersion(f"tokens of version {version} came after version {self._least}")
            self._latest = version
        self._chunks.append(chunk)
        before, self._streamed = self._streamed, self._streamed + len(chunk.token_ids)
        if self._seam is not None:
            self._take_behind(self._seam, chunk, before)
        elif self._on_tokens is not None:
            self._handed += len(chunk.token_ids)
            self._on_tokens(chunk)

    def _take_behind(self, seam: _Seam, chunk: TokenChunk, before: int) -> None:
        """Take a chunk of a later attempt, `before` tokens after the seam.

        StopString once a stop string over the seam is whole.
        """
        if self._cut is None:
            self._cut = seam.feed(before, chunk.token_ids)
            given = chunk if self._cut is None else _first(chunk, self._cut - before)
            if self._on_tokens is not None and given.token_ids:
                self._handed += len(given.token_ids)
                self._on_tokens(given)
        if self._cut is not None and self._received(self._cut) is not None:
            raise StopString

    @property
    def latest(self) -> int:
        """The last version that the running attempt has streamed a token of; UNSURE if it named none."""
        return self._latest

    @property
    def is_handed(self) -> bool:
        """Whether the caller was given tokens of the running attempt."""
        return self._handed > self.kept

    def discard(self) -> None:
        """Keep nothing of this attempt: what it brought cannot be trusted."""
        self._chunks.clear()
        self._streamed, self._cut, self._latest = 0, None, UNSURE

    def finished(self, last: Completion) -> Completion:
        """All of it, after an attempt that ended it."""
        if self._cut is None and self._seam is not None:
            self._cut = self._seam.feed(0, last.token_ids.tolist())
        if self._cut is not None:
            last = _until(last, self._cut, "stop")
        return last if self._part is None else _joined(self._part, last)

    def stopped(self) -> Completion:
        """All of it, after StopString."""
        last = None if self._cut is None else self._received(self._cut)
        assert last is not None, "a stop string was found"
        return self.finished(last)

    def broken_off(self, attempt: Completion | None) -> Completion | None:
        """Keep what an attempt brought that did not end by itself: what it answered, or None if it was lost.

        Returns the completion if nothing is left to sample. EngineUnavailable if it cannot continue; what the
        caller was given of it then stays unfinished.
        """
        found = self._sure() if attempt is None else attempt
        if self._cut is None and self._seam is not None:
            self._cut = self._seam.feed(0, found.token_ids.tolist())
        if self._cut is not None and len(found) >= self._cut:
            return self.finished(found)
        if not self._goes_on and self.kept + len(found):
            self._from_the_start()
            return None
        if self._handed > self.kept + len(found):
            raise EngineUnavailable(
                "the engine was lost, and of tokens that had been streamed already it is not certain which "
                "version had sampled them"
            )
        self._keep(found)
        return self._if_whole()

    @property
    def _goes_on(self) -> bool:
        sampling = self._sampling
        return (
            sampling.grammar is None
            and not sampling.frequency_penalty
            and not sampling.presence_penalty
            and (self._decode is not None or not sampling.stop)
        )

    def _from_the_start(self) -> None:
        if self._handed:
            raise EngineUnavailable(
                "the engine was lost in the middle of a completion that had been streamed in part, and one "
                "under a grammar or penalties cannot continue elsewhere"
            )
        self._part, self._seam, self.kept, self.newest = None, None, 0, -1

    def _sure(self) -> Completion:
        """What this attempt has streamed, up to the first token whose version is not certain."""
        sure = 0
        for chunk in self._chunks:
            if not chunk.versions or UNSURE in chunk.versions:
                break
            sure += len(chunk.token_ids)
        received = self._received(sure)
        assert received is not None
        return received

    def _received(self, count: int) -> Completion | None:
        """The first `count` tokens that this attempt has streamed; None while a version is not certain."""
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
            self._seam = _Seam(self._sampling.stop, self._decode, self._part.token_ids.tolist())

    def _if_whole(self) -> Completion | None:
        """The completion, if what was kept is all that may be sampled: the engine died before its end."""
        part, sampling = self._part, self._sampling
        if part is None:
            return None
        if not sampling.ignore_eos and int(part.token_ids[-1]) in sampling.stop_token_ids:
            return _until(part, len(part), "stop")
        return _until(part, len(part), "length") if self.kept >= sampling.max_new_tokens else None


class _Seam:
    """Where one attempt ends and the next begins: an engine does not see a stop string that lies over it."""

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
        """How many tokens after the seam until a stop string is complete, None if that is not among these.

        `start` is how many of them came before `token_ids`.
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
            logprobs=np.concatenate([first.logprobs, second.logprobs]),
            versions=np.concatenate([first.versions, second.versions]),
            finish_reason=second.finish_reason,
            top_logprobs=first.top_logprobs + second.top_logprobs,
            routed_experts=joined_routing(first, second),
        )
    except ValueError as error:
        raise EngineError(f"the parts of a completion do not fit together: {error}") from error


def _until(completion: Completion, count: int, reason: FinishReason) -> Completion:
    """Its first `count` tokens."""
    routed, beyond = completion.routed_experts, len(completion) - count
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
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
