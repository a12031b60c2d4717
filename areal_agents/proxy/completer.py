"""One call of the model, whatever its dialect: find, extend, check, sample, parse, record, answer.

A turn is in the store before its reply leaves, so whatever a client has seen is recorded; and what
was recorded is never tokenised again: the next prompt is these very ids plus the new messages.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Continuation, ForkReason, Turn
from areal_agents.errors import (
    EngineError,
    EngineUnavailable,
    RenderingError,
    RequestError,
    StoreError,
)
from areal_agents.inference import Engine, ModelInfo
from areal_agents.proxy.admission import Admission
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.errors import ClientGone
from areal_agents.proxy.request import CompletedTurn, ModelRequest
from areal_agents.proxy.sampling import Drawing, draw
from areal_agents.proxy.sessions import Session
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Conflict, Store

T = TypeVar("T")
HangUp = Callable[[], Awaitable[None]]  # returns when the client has closed the connection

# Costs of rendering and parsing, roughly, to decide what leaves the event loop.
_MS_PER_CHARACTER, _MS_PER_HISTORY_TOKEN, _MS_PER_SAMPLED_TOKEN = 5e-4, 1e-4, 6e-3
_INLINE_MS = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a turn: `ids` [P] is all of it, `new_ids` what its parent does not have."""

    where: Continuation
    ids: TokenIds
    new_ids: TokenIds


class Completer:
    """Draws and records turns. Shared by all episodes and dialects."""

    def __init__(self, *, store: Store, engine: Engine, renderer: ChatRenderer, config: ProxyConfig) -> None:
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._config = config
        self._admission = Admission(max_concurrent=config.max_concurrent, max_queued=config.max_queued)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rendering")
        self._model: ModelInfo | None = None

    def close(self) -> None:
        """Stop the rendering threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def complete(self, session: Session, request: ModelRequest, hang_up: HangUp) -> CompletedTurn:
        """Draw the reply to a request, record it, and return it.

        Raises RequestError for what the client did wrong or ran into, EngineError where the engine
        fails, StoreError where the store does; ClientGone if the client hung up before the recording,
        whose generation is aborted and not recorded.
        """
        await self._refuse_over_limit(session)
        session.pending_calls += 1
        watch: asyncio.Future[None] | None = None  # done when the client has hung up
        try:
            model = await self.model_info()
            prompt = await self._prompt(session, request, min(model.vocab_size, self._renderer.vocab_size))
            drawing = await self._drawing(session, request, len(prompt.ids), model.max_context)
            turn_id = f"chatcmpl-{secrets.token_hex(12)}"
            async with self._admission.slot():
                watch = asyncio.ensure_future(hang_up())
                completion = await self._generate(session, turn_id, prompt.ids, drawing.params, watch)
            turn = await self._turn(turn_id, request, prompt, drawing, completion)
            if watch.done():
                raise ClientGone
            # From here on nothing may come between store and memory, not even a shutdown.
            await asyncio.shield(asyncio.ensure_future(self._record(session, turn, prompt.ids)))
            session.call_answered(request)
        except (EngineError, StoreError):
            session.call_lost(request)
            raise
        finally:
            if watch is not None:
                watch.cancel()
            session.pending_calls -= 1
            session.last_used = time.monotonic()
        return CompletedTurn(turn, len(prompt.ids), time.time())

    async def model_info(self) -> ModelInfo:
        """What the engine serves; asked once."""
        if self._model is None:
            self._model = await self._engine.model_info()
        return self._model

    async def _refuse_over_limit(self, session: Session) -> None:
        limits, calls = session.limits, len(session.forest) + session.pending_calls
        if limits.max_turns is not None and calls >= limits.max_turns:
            limit, text = "max_turns", f"{limits.max_turns} model calls"
        elif limits.max_tokens is not None and session.sampled_tokens >= limits.max_tokens:
            limit, text = "max_tokens", f"{limits.max_tokens} sampled tokens"
        elif limits.time_s is not None and time.time() - session.row.created_at > limits.time_s:
            limit, text = "time_s", f"{limits.time_s:g} s"
        else:
            return
        await self._mark_limit(session, limit)
        raise RequestError(
            f"episode {session.id} has reached its limit of {text}", status=403, code="episode_limit"
        )

    async def _prompt(self, session: Session, request: ModelRequest, vocab_size: int) -> Prompt:
        """The recorded ids plus the new messages; a full rendering where there is nothing to extend."""
        forest, tools = session.forest, request.tools
        where = forest.continuation(request.messages, request.tools_id)
        if where.parent is not None:
            context = session.context_after(where.parent)
            split = len(context) - len(where.parent.completion)
            new_ids = await self._off_loop(
                _characters(where.new_messages) * _MS_PER_CHARACTER + len(context) * _MS_PER_HISTORY_TOKEN,
                lambda: self._renderer.bridge(context[:split], context[split:], where.new_messages, tools),
            )
            if new_ids is not None:
                _check_vocabulary(new_ids, vocab_size)
                return Prompt(where, np.concatenate([context, new_ids]), new_ids)
            reason = _why_not_extended(where.new_messages)
            where = forest.fork(where.parent, request.messages, where.new_messages, reason)
        ids = await self._off_loop(
            _characters(request.messages) * _MS_PER_CHARACTER,
            lambda: self._renderer.render(request.messages, tools),
        )
        _check_vocabulary(ids, vocab_size)
        return Prompt(where, ids, ids)

    async def _drawing(
        self, session: Session, request: ModelRequest, prompt_tokens: int, limit: int
    ) -> Drawing:
        if self._config.context_length is not None:
            limit = min(limit, self._config.context_length)
        if prompt_tokens >= limit:
            await self._mark_limit(session, "context_length")
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{prompt_tokens} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
                param="messages",
            )
        bounds = [limit - prompt_tokens, request.wish.max_tokens or self._config.default_max_tokens]
        bounds.append(session.limits.max_completion_tokens)
        if session.limits.max_tokens is not None:
            bounds.append(max(1, session.limits.max_tokens - session.sampled_tokens))
        return draw(
            request.wish,
            split=session.row.split,
            episode_sampling=session.row.sampling,
            lifted=self._config.lifted_pins,
            stop_token_ids=self._renderer.stop_token_ids,
            max_new_tokens=min(bound for bound in bounds if bound is not None),
        )

    async def _generate(
        self,
        session: Session,
        rid: str,
        input_ids: TokenIds,
        params: SamplingParams,
        watch: asyncio.Future[None],
    ) -> Completion:
        session.refuse_if_sealed()  # it may have been while this call waited for its slot
        call = asyncio.ensure_future(self._engine.generate(rid, input_ids, params))
        watch.add_done_callback(lambda _: call.cancel())  # which aborts it in the engine
        session.calls.add(call)
        try:
            async with asyncio.timeout(self._config.generate_timeout_s):
                completion = await call
        except TimeoutError:
            raise EngineUnavailable(f"no completion within {self._config.generate_timeout_s:g} s") from None
        except asyncio.CancelledError:
            if watch.done():
                raise ClientGone from None
            session.refuse_if_sealed()
            raise
        finally:
            session.calls.discard(call)
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted the generation")
        return completion

    async def _turn(
        self, turn_id: str, request: ModelRequest, prompt: Prompt, drawing: Drawing, completion: Completion
    ) -> Turn:
        try:
            reply = await self._off_loop(
                len(completion) * _MS_PER_SAMPLED_TOKEN,
                lambda: self._renderer.parse(prompt.ids, completion.token_ids, request.tools),
            )
        except RenderingError as error:
            raise EngineError(f"its completion cannot be read: {error}") from error
        where = prompt.where
        return Turn(
            id=turn_id,
            parent=where.parent.id if where.parent is not None else None,
            new_messages=where.new_messages,
            new_prompt_ids=prompt.new_ids,
            completion=completion,
            reply=_as_asked(reply, request),
            sampling=drawing.params,
            tools_id=request.tools_id,
            label=request.label,
            forked_from=where.fork,
            constrained=drawing.constrained,
            overrides=drawing.overrides,
        )

    async def _record(self, session: Session, turn: Turn, prompt_ids: TokenIds) -> None:
        try:
            await asyncio.wrap_future(self._store.add_turn(session.id, turn))
        except Conflict as error:  # sealed while this call was under way
            raise RequestError(str(error), status=409, code="episode_sealed") from None
        session.record(turn, prompt_ids)
        limit = session.limits.max_tokens
        if (
            limit is not None
            and turn.completion.finish_reason == "length"
            and session.sampled_tokens >= limit
        ):
            await self._mark_limit(session, "max_tokens")

    async def _mark_limit(self, session: Session, limit: str) -> None:
        if session.limit_reached is None:
            session.limit_reached = limit
            await asyncio.wrap_future(self._store.mark_limit(session.id, limit))

    async def _off_loop(self, estimate_ms: float, work: Callable[[], T]) -> T:
        """Do CPU-bound work here if it is short, else in a thread, so that no other call waits for it."""
        if estimate_ms < _INLINE_MS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_vocabulary(ids: TokenIds, vocab_size: int) -> None:
    """An id outside the vocabulary kills a whole SGLang server."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        outside = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise RequestError(
            f"the prompt has token id {outside}, outside the model's vocabulary of {vocab_size}",
            code="token_out_of_vocabulary",
        )


def _characters(messages: Sequence[Message]) -> int:
    return sum(
        len(m.content) + len(m.reasoning) + sum(len(c.arguments) for c in m.tool_calls) for m in messages
    )


def _why_not_extended(new_messages: Sequence[Message]) -> ForkReason:
    if any(message.role == "assistant" for message in new_messages):
        return "edited"  # the client puts words into the model's mouth
    # Templates rewrite the past at a new user turn, where they drop earlier reasoning.
    if any(message.role == "user" for message in new_messages):
        return "template strips reasoning"
    return "template cannot extend"


def _as_asked(reply: Message, request: ModelRequest) -> Message:
    """The reply as the client gets it: cut before a stop string, and only the calls that it takes."""
    for stop in request.wish.stop:
        reasoning, found, _ = reply.reasoning.partition(stop)
        content = "" if found else reply.content.partition(stop)[0]
        reply = replace(reply, reasoning=reasoning, content=content)
    if request.calls == "none":
        return replace(reply, tool_calls=())
    return reply if request.parallel_calls else replace(reply, tool_calls=reply.tool_calls[:1])
