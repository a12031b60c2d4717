"""Converts between SGLang's /generate JSON and the types of `core`.

Invariant: whatever its form, an answer becomes a Completion only if its ids, logprobs and versions agree with
each other and with the request; see `answers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from areal_agents.core.completion import (
    UNSURE,
    Completion,
    FinishReason,
    SamplingParams,
    TokenChunk,
    TopLogprobs,
)
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.answers import SentRequest, check_logprobs, checked_spans
from areal_agents.inference.engine import version_from_wire
from areal_agents.inference.expert_routing import RequestedRouting, routing_from_wire
from areal_agents.secret_variables import ENGINE_KEY, TEACHER_KEY

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
MESSAGE_LIMIT = 300  # characters of a server's error text that are kept in messages
_FAILED = (400, 500, 503)  # statuses of an aborted stream; without streaming they are HTTP errors
_EXCLUDED = -1e30
UNREADABLE = (KeyError, TypeError, IndexError, ValueError, OverflowError)


def sampling_to_wire(sampling: SamplingParams) -> dict[str, Any]:
    """Return SGLang's sampling_params, without values equal to a default that both sides share."""
    wire: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.frequency_penalty:
        wire["frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        wire["presence_penalty"] = sampling.presence_penalty
    if sampling.stop:
        wire["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        wire["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        wire["sampling_seed"] = sampling.seed
    if sampling.grammar is not None:
        wire[sampling.grammar.kind] = sampling.grammar.text
    return wire


def completion_from_wire(
    answer: Any, routing: RequestedRouting | None = None, asked: SentRequest | None = None
) -> Completion:
    """Convert a /generate answer to a Completion; `routing` describes the requested routed experts.

    Raises EngineError if ids, logprobs and versions do not agree with each other or with `asked`, and
    EngineRejected or EngineUnavailable if the answer reports that the request was refused or failed.
    """
    meta = meta_of(answer)
    reason = finish_reason_of(meta)
    try:
        ids = list(answer["output_ids"])
        triples = meta["output_token_logprobs"] if ids else []
        logprobs, sampled = _columns(triples)
        if sampled != ids:
            raise EngineError(
                f"/generate returned {len(ids)} ids and logprobs of {len(triples)} other tokens"
            )
        if reason != "abort" and meta.get("completion_tokens", len(ids)) != len(ids):
            raise EngineError(f"/generate returned {len(ids)} ids and counts {meta['completion_tokens']!r}")
        check_logprobs(logprobs)
        if asked is not None:
            asked.check_meta(meta, reason)
            asked.check_tokens(None, ids, len(ids))
            asked.check_end(ids, reason, _matched(meta))
        versions = _versions(meta, len(ids), aborted=reason == "abort")
        return Completion(
            token_ids=ids,  # type: ignore[arg-type]
            logprobs=logprobs,  # type: ignore[arg-type]
            versions=versions,
            finish_reason=reason,
            top_logprobs=_top_logprobs(meta.get("output_top_logprobs")),
            routed_experts=None if routing is None else routing_from_wire(meta, routing, versions),
        )
    except UNREADABLE as error:
        raise EngineError(f"/generate returned an answer that cannot be read: {error!r}") from error


class StreamedCompletion:
    """A completion that arrives in chunks, each with all tokens so far (SGLang's default) or only the new
    ones.

    The token count in every chunk shows which form the server uses.
    """

    def __init__(self, served: int | None = None, asked: SentRequest | None = None) -> None:
        """`served` is the version that was served before the request was sent, if known."""
        self._asked = asked
        self.cumulative = False  # whether chunks are known to repeat earlier tokens
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._named: list[int] = []  # versions from the spans of chunks; UNSURE without spans
        self._sent: list[Any] = []  # (logprob, id, text) of the last cumulative chunk
        self._last: Mapping[str, Any] | None = None
        self._label = served  # version of the latest chunk
        self._reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the chunk with the finish reason has arrived."""
        return self._reason is not None

    @property
    def weight_version(self) -> object:
        """The weight version in the last chunk; None if it has none."""
        return None if self._last is None else self._last.get("weight_version")

    def feed(self, event: bytes) -> TokenChunk | None:
        """Process the data of one event and return its new tokens, None if there are none.

        Raises EngineError if it does not continue the earlier chunks or does not agree with the request, and
        EngineRejected or EngineUnavailable if it reports an error.
        """
        if self.finished:
            raise EngineError("/generate streamed a chunk after the one that ended the completion")
        try:
            chunk = orjson.loads(event)
        except ValueError as error:
            raise EngineError(f"/generate streamed an event that is not JSON: {error}") from error
        if isinstance(chunk, dict) and chunk.get("error"):
            raise _streamed_error(chunk["error"])
        meta = meta_of(chunk)
        # Checked first, because the tokens of a refused request may be inconsistent.
        reason = None if meta.get("finish_reason") is None else finish_reason_of(meta)
        try:
            if self._asked is not None:
                self._asked.check_meta(meta, reason)
            new = self._new_tokens(chunk, meta, aborted=reason == "abort")
            if self._asked is not None and reason is not None:
                self._asked.check_end(self._ids, reason, _matched(meta))
        except UNREADABLE as error:
            raise EngineError(f"/generate streamed a chunk that cannot be read: {error!r}") from error
        self._last, self._reason = meta, reason
        return new

    def completion(self, routing: RequestedRouting | None = None) -> Completion:
        """Return the whole completion, once `finished`; `routing` describes the requested routed experts."""
        assert self._last is not None and self._reason is not None, "the stream has not finished"
        try:
            versions = _versions(self._last, len(self._ids), aborted=self._reason == "abort")
            for named, version in zip(self._named, versions.tolist(), strict=True):
                if named not in (UNSURE, version):
                    raise EngineError(
                        f"/generate streamed a token of version {named}, which the last chunk calls {version}"
                    )
            return Completion(
                token_ids=self._ids,  # type: ignore[arg-type]
                logprobs=self._logprobs,  # type: ignore[arg-type]
                versions=versions,
                finish_reason=self._reason,
                top_logprobs=tuple(self._top),
                routed_experts=None if routing is None else routing_from_wire(self._last, routing, versions),
            )
        except UNREADABLE as error:
            raise EngineError(f"/generate streamed an answer that cannot be read: {error!r}") from error

    def _new_tokens(
        self, chunk: Mapping[str, Any], meta: Mapping[str, Any], *, aborted: bool
    ) -> TokenChunk | None:
        triples = meta.get("output_token_logprobs") or []
        known, count = len(self._ids), len(triples)
        total = meta.get("completion_tokens", count)
        output_ids = chunk["output_ids"]
        if known <= count and (count == total or (aborted and count > total)):
            first = known
            self.cumulative = self.cumulative or 0 < known < count
            self._check_repeated(triples, output_ids if not aborted else None)
        elif known + count == total and not self.cumulative:
            first = 0
            self._sent = []
        else:
            raise EngineError(f"/generate streamed {count} tokens after {known} and counts {total}")
        if first == count == len(output_ids):
            return None
        logprobs, ids = _columns(triples[first:])
        check_logprobs(logprobs)
        # A request that is aborted while it waits to be scheduled again returns only its last id.
        if list(output_ids[first:]) != ids and not aborted:
            raise EngineError(
                f"/generate streamed {len(output_ids)} ids and logprobs of {count} other tokens"
            )
        if not ids:
            return None
        if self._asked is not None:
            self._asked.check_tokens(self._ids[-1] if known else None, ids, known + len(ids))
        rows = meta.get("output_top_logprobs")
        new = TokenChunk(
            tuple(ids),
            tuple(map(float, logprobs)),
            _top_logprobs(rows[first:] if rows else None),
            self._new_versions(meta, known, len(ids), aborted=aborted),
        )
        self._ids += new.token_ids
        self._logprobs += new.logprobs
        self._top += new.top_logprobs
        self._named += new.versions if meta.get("weight_versions") else (UNSURE,) * len(ids)
        return new

    def _check_repeated(self, triples: list[Any], output_ids: Sequence[int] | None) -> None:
        """Raise EngineError if a cumulative chunk changes tokens or logprobs that were sent before."""
        known = len(self._ids)
        repeated = self._sent if self._sent else list(zip(self._logprobs, self._ids, strict=True))
        before = triples[:known] if self._sent else [(triple[0], triple[1]) for triple in triples[:known]]
        if before != repeated or (output_ids is not None and list(output_ids[:known]) != self._ids):
            raise EngineError(
                f"/generate changed some of the {known} tokens or logprobs that it had streamed"
            )
        self._sent = triples

    def _new_versions(
        self, meta: Mapping[str, Any], known: int, count: int, *, aborted: bool
    ) -> tuple[int, ...]:
        """[count] versions of the tokens after the `known` ones.

        Spans are exact. A chunk without spans has the version at the time it was written; if that is newer
        than that of the previous chunk, some of its tokens may still have been sampled by the old weights.
        """
        if meta.get("weight_versions"):
            new: list[int] = []
            for version, end in checked_spans(meta["weight_versions"], known + count, aborted=aborted):
                new += [version] * (end - known - len(new))  # empty for a span that ends before `known`
            return tuple(new)
        label = version_from_wire(meta.get("weight_version", "default"))
        before, self._label = self._label, label
        return (label if before is not None and label <= before else UNSURE,) * count


def error_of(url: str, status: int, raw: bytes) -> EngineError | None:
    """Return the error that an HTTP answer represents, None for 200."""
    if status == 200:
        return None
    if status in (401, 403):
        return EngineUnavailable(
            f"{url} refused the request, which had another key than the engine or none ({status}); give the "
            f"key of engines that are running already as {ENGINE_KEY}, and that of a teacher as {TEACHER_KEY}"
        )
    if 400 <= status < 500:
        return EngineRejected(f"{url} refused the request ({status}): {_message(raw)}")
    return EngineUnavailable(f"{url} answered {status}: {_message(raw)}")


def as_object(value: Any, what: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object; raises EngineError otherwise."""
    if not isinstance(value, dict):
        raise EngineError(f"{what} is not a JSON object: {shorten(str(value))}")
    return value


def shorten(text: str) -> str:
    """Return `text` on one line of at most MESSAGE_LIMIT characters."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 1] + "…"


def meta_of(answer: Any) -> dict[str, Any]:
    return as_object(as_object(answer, "/generate").get("meta_info"), "/generate meta_info")


def finish_reason_of(meta: Mapping[str, Any]) -> FinishReason:
    """Return the finish reason; an abort with an HTTP status raises the corresponding error."""
    reason = meta.get("finish_reason")
    details: Mapping[str, Any] = reason if isinstance(reason, dict) else {"type": reason}
    kind = details.get("type")
    if not isinstance(kind, str) or kind not in FINISH_REASONS:
        raise EngineError(
            f"/generate ended with finish_reason {reason!r}; expected one of {sorted(FINISH_REASONS)}"
        )
    if kind == "abort" and details.get("status_code") in _FAILED:
        raise _failure(details["status_code"], str(details.get("message", "")))
    return FINISH_REASONS[kind]


def _streamed_error(error: Any) -> EngineError:
    """Return the error of an `error` event; one without a status was not caused by the request."""
    if not isinstance(error, dict):
        return _failure(500, str(error))
    code = error.get("code")
    return _failure(code if isinstance(code, int) else 500, str(error.get("message", error)))


def _failure(status: int, message: str) -> EngineError:
    if 400 <= status < 500:
        return EngineRejected(f"/generate refused the request ({status}): {shorten(message)}")
    return EngineUnavailable(f"/generate failed ({status}): {shorten(message)}")


def _columns(triples: Sequence[Sequence[Any]]) -> tuple[list[Any], list[int]]:
    """Return logprobs [N] and ids [N] of N triples [logprob, id, text]. TypeError if an id is not an int."""
    ids = [triple[1] for triple in triples]
    for id in ids:
        if type(id) is not int:
            raise TypeError(f"{id!r} is not a token id")
    return [triple[0] for triple in triples], ids


def _top_logprobs(rows: Sequence[Sequence[Sequence[Any]] | None] | None) -> TopLogprobs:
    """Return each token's best (id, logprob) pairs, best first, without tokens that a grammar excludes."""
    if not rows:
        return ()
    return tuple(
        tuple(
            sorted(
                ((int(item[1]), float(item[0])) for item in row or () if _is_possible(item[0])),
                key=lambda pair: -pair[1],
            )
        )
        for row in rows
    )


def _is_possible(logprob: float | None) -> bool:
    """Whether the token is possible: excluded tokens have null, or from SGLang the lowest float32."""
    return logprob is not None and logprob > _EXCLUDED


def _versions(meta: Mapping[str, Any], count: int, *, aborted: bool = False) -> np.ndarray:
    """Return [count] versions of the tokens, from the spans, or from weight_version without spans."""
    spans = meta.get("weight_versions")
    if not spans:
        return np.full(count, version_from_wire(meta.get("weight_version", "default")), np.int32)
    versions, start = np.empty(count, np.int32), 0
    for version, end in checked_spans(spans, count, aborted=aborted):
        versions[start:end] = version
        start = end
    return versions


def _matched(meta: Mapping[str, Any]) -> Any:
    """Return the stop token or stop string that an answer reports; None if it reports none."""
    reason = meta.get("finish_reason")
    return reason.get("matched") if isinstance(reason, dict) else None


def _message(raw: bytes) -> str:
    """Return the error text of an answer in any of SGLang's forms."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        return shorten(raw.decode(errors="replace"))
    if not isinstance(body, dict):
        return shorten(str(body))
    known = ("error", "message", "error_message", "detail")
    error = next((body[name] for name in known if name in body), body)
    return shorten(str(error.get("message", error) if isinstance(error, dict) else error))
