"""Finds the earlier call that a request repeats: a running one, or a recorded one whose response was lost.

An equal request that is not marked as a retry gets a new sample. So does the retry of an attempt that was
refused, because that attempt has no sample, even if an equal call has one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from enum import IntEnum

from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.ledger import KnownKey
from areal_agents.proxy.calls.prompts import Prompts
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.calls.sampling import grammar_of
from areal_agents.proxy.calls.shared_reply import RecordedReply, SharedReply
from areal_agents.proxy.calls.stop_strings import delivered_reply
from areal_agents.proxy.episodes.sessions import Session
from areal_agents.proxy.errors import as_request_error
from areal_agents.store import Store

_logger = logging.getLogger(__name__)

_DISCONNECTED = "the client disconnected"
_LEAST_RETRIED = 429  # lowest status after which clients retry a request


class Repeated(IntEnum):
    """The kind of call that a request repeats in an episode. Among episodes, the greatest value is chosen."""

    RECORDED = 1  # a recorded call of an episode that has no other turns
    RUNNING = 2  # a call that is still running
    UNDELIVERED = 3  # a call that was recorded after its client had disconnected
    NAMED = 4  # a call with the same Idempotency-Key


class Retries:
    """Finds the calls that requests repeat. The state is in the sessions' ledgers and in the store."""

    def __init__(self, store: Store, prompts: Prompts) -> None:
        self._store = store
        self._prompts = prompts

    def begin(self, session: Session, request: ModelRequest, call: SharedReply) -> None:
        """Add a running call to the ledger of its session."""
        session.ledger.begin(request, call)

        def ended(_: object) -> None:
            session.ledger.end(request, call)
            failure = None if call.is_abandoned else call.failure
            if failure is not None and as_request_error(failure).status >= _LEAST_RETRIED:
                session.ledger.refuse(request)

        call.task.add_done_callback(ended)

    def discard(self, session: Session, call: SharedReply) -> None:
        """Mark the turns of a recorded call as undelivered; a retry can still receive them."""
        for turn_id in call.turn_ids:
            if turn_id in session.forest and session.ledger.mark_undelivered(turn_id):
                writing = self._store.discard_turn(turn_id, _DISCONNECTED, owner=session.owner)
                _log_failure(writing, turn_id)

    def repeated(self, session: Session, request: ModelRequest) -> Repeated | None:
        """Return the kind of call that a request repeats in an episode that began with the same messages.

        Unlike `earlier`, this method changes nothing. In an episode that has continued after a delivered
        call, only an Idempotency-Key repeats that call, because its client has the response.
        """
        key, retry = request.key(), request.retry
        name, ledger = retry.idempotency_key, session.ledger
        known = ledger.key_of(name) if name else None
        if known is not None and known.request == key and _has_sample(session, name, known):
            return Repeated.NAMED
        if retry.count and ledger.running(key) is not None:
            return Repeated.RUNNING
        turns = self._answers(session, request)
        if turns and all(ledger.is_undelivered(turn.id) for turn in turns):
            return Repeated.UNDELIVERED
        has_continued = turns and len(session.forest) > len(self._prompts.answers(session.forest, request))
        return Repeated.RECORDED if turns and not has_continued else None

    def earlier(self, session: Session, request: ModelRequest) -> SharedReply | None:
        """Return the call that a request repeats, or None if it repeats none.

        Raise RequestError 409 if its Idempotency-Key was used for another request.
        """
        retry, ledger = request.retry, session.ledger
        if retry.idempotency_key and (named := self._named(session, request, retry.idempotency_key)):
            return named
        if retry.count and ledger.take_refused(request):
            return None
        if retry.count and (running := ledger.running(request.key())) is not None:
            return running
        turns = self._answers(session, request)
        if not turns:
            return None
        ledger.answer(request)
        return self._answered(session, turns)

    def _answers(self, session: Session, request: ModelRequest) -> list[Turn]:
        """Return the latest recorded turns that answer a request, one per choice; [] if there are too few."""
        is_retry, ledger = request.retry.count > 0, session.ledger
        if not is_retry and not ledger.has_undelivered:
            return []
        turns = [
            turn
            for turn in self._prompts.answers(session.forest, request)
            if (is_retry or ledger.is_undelivered(turn.id)) and self._satisfies(turn, request)
        ]
        return turns[-request.choices :] if len(turns) >= request.choices else []

    def _named(self, session: Session, request: ModelRequest, name: str) -> SharedReply | None:
        """Return the call with an Idempotency-Key, or None."""
        known = session.ledger.key_of(name)
        if known is not None and known.request != request.key():
            raise RequestError(
                f"the Idempotency-Key {name!r} was used for another request; use a new key for a new request",
                status=409,
                code="idempotency_key_reused",
            )
        if (running := session.ledger.running(name)) is not None:
            return running
        if known is None or any(turn_id not in session.forest for turn_id in known.turn_ids):
            return None
        return self._answered(session, [session.forest[turn_id] for turn_id in known.turn_ids])

    def _satisfies(self, turn: Turn, request: ModelRequest) -> bool:
        """Whether a reply satisfies a request that may differ from the one that it was sampled for."""
        limit, sampling = request.wish.max_tokens, turn.sampling
        return (
            (limit is None or len(turn.completion) <= limit)
            and sampling.stop == request.wish.stop
            and sampling.grammar == grammar_of(request, self._prompts.cached_renderer(request))
            and delivered_reply(turn.reply, request) == turn.reply
        )

    def _answered(self, session: Session, turns: list[Turn]) -> RecordedReply:
        for turn in turns:
            if session.ledger.mark_delivered(turn.id):
                _log_failure(self._store.discard_turn(turn.id, None, owner=session.owner), turn.id)
        return recorded_reply(session, turns)


def _has_sample(session: Session, name: str, known: KnownKey) -> bool:
    """Whether the call with an Idempotency-Key is running or recorded."""
    return session.ledger.running(name) is not None or all(id in session.forest for id in known.turn_ids)


def recorded_reply(session: Session, turns: Iterable[Turn]) -> RecordedReply:
    """Return the reply that recorded turns of a session are, one for each choice."""
    return RecordedReply([_completed(session, turn) for turn in turns])


def _completed(session: Session, turn: Turn) -> CompletedTurn:
    prompt_tokens = len(session.forest.prompt_ids(turn.id))
    reused = prompt_tokens - len(turn.new_prompt_ids)
    return CompletedTurn(turn, prompt_tokens, session.row.created_at, reused)


def _log_failure(write: Future[None], turn_id: str) -> None:
    def check(done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            _logger.error("turn %s could not be marked as delivered or undelivered: %s", turn_id, error)

    write.add_done_callback(check)
