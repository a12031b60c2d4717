"""Completes one model call of any dialect: find, extend, check, sample, parse, record, answer.

A turn is in the store before its reply leaves, so whatever a client has seen is recorded; and what
was recorded is never tokenised again: the next prompt is these very ids plus the new messages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Fork, Turn
from areal_agents.errors import (
    EngineError,
    EngineRejected,
    EngineUnavailable,
    PromptTooLong,
    RenderingError,
    RequestError,
    StoreError,
)
from areal_agents.inference import ModelInfo, Sampler
from areal_agents.proxy.calls.admission import Admission
from areal_agents.proxy.calls.delivery import AskedStream, as_asked
from areal_agents.proxy.calls.prompts import Prompt, Prompts
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.calls.retries import Retries
from areal_agents.proxy.calls.running import Call, Retry
from areal_agents.proxy.calls.sampling import BASE_SEED, Drawing, draw
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.proxy.episodes.sessions import Session
from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Conflict, SessionTaken, Store

_COUNTED_CONTEXTS = 2  # tokens are counted for prompts of up to this many context lengths


class Completer:
    """Samples and records turns. Shared by all episodes and dialects."""

    def __init__(self, *, store: Store, engine: Sampler, renderer: ChatRenderer, config: ProxyConfig) -> None:
        self._store = store
        self._engine = engine
        self._config = config
        self._admission = Admission(
            max_concurrent=config.max_concurrent,
            max_queued=config.max_queued,
            longest_wait_s=config.generate_timeout_s,
        )
        self._prompts = Prompts(renderer)
        self.retries = Retries(store, self._prompts)
        self._model: ModelInfo | None = None

    def close(self) -> None:
        """Stop the rendering threads."""
        self._prompts.close()

    @property
    def waiting(self) -> int:
        """Calls that wait for a place in the engine."""
        return self._admission.waiting

    @property
    def running(self) -> int:
        """Calls that hold a place in the engine."""
        return self._admission.running

    def call(self, session: Session, request: ModelRequest, *, retry: Retry, streamed: bool) -> Call:
        """Sample and record the replies to a request, or find the call that already does or did.

        The caller joins the call, and leaves it when it has been served or is gone. The task of the call
        raises RequestError for what the client did wrong or ran into, EngineError where the engine fails,
        StoreError where the store does.
        """
        if (earlier := self.retries.earlier(session, request, retry)) is not None:
            return earlier
        turn_ids = [new_turn_id() for _ in range(request.choices)]
        call = Call(turn_ids, time.time(), lambda call: self._run(call, session, request, streamed))
        self.retries.begin(session, request, retry, call)
        return call

    async def count_tokens(self, forest: Forest, request: ModelRequest) -> int:
        """Length of the prompt that a request would have after the recorded turns of `forest`.

        RequestError as for a call if the prompt is longer than `_COUNTED_CONTEXTS` context lengths.
        """
        model = await self.model_info()
        limit = min(bound for bound in (model.max_context, self._config.context_length) if bound is not None)
        try:
            most = _COUNTED_CONTEXTS * limit
            prompt = await self._prompts.prompt(forest, request, model.vocab_size, most_tokens=most)
        except PromptTooLong as error:
            raise _too_long(limit, error.at_least, exact=False) from None
        return len(prompt.ids)

    async def model_info(self) -> ModelInfo:
        """What the engine serves; asked once."""
        if self._model is None:
            self._model = await self._engine.model_info()
        return self._model

    async def _run(
        self, call: Call, session: Session, request: ModelRequest, streamed: bool
    ) -> tuple[CompletedTurn, ...]:
        await self._refuse_over_limit(session, request.choices)
        session.pending_calls += request.choices
        try:
            model = await self.model_info()
            limit = self._context_limit(session, model)
            prompt = await self._prompt(session, request, model, limit)
            drawing = await self._drawing(session, request, prompt, limit)
            draws = [
                self._draw(call, choice, session, request, prompt, drawing, streamed)
                for choice in range(request.choices)
            ]
            turns = [await draws[0]] if len(draws) == 1 else await _all(draws)
            await self._record(call, session, turns)
            await self._mark_cut_off(session, turns, room=limit - len(prompt.ids))
            session.call_answered(request)
        except RequestError:
            raise
        except Exception:  # the engine's, the store's or our own fault: not the policy's doing
            session.call_lost(request)
            raise
        finally:
            session.pending_calls -= request.choices
            session.last_used = time.monotonic()
        reused = len(prompt.ids) - len(prompt.new_ids)
        return tuple(CompletedTurn(turn, len(prompt.ids), call.created_at, reused) for turn in turns)

    async def _prompt(self, session: Session, request: ModelRequest, model: ModelInfo, limit: int) -> Prompt:
        try:
            # At the limit itself no reply would fit.
            return await self._prompts.prompt(
                session.forest, request, model.vocab_size, most_tokens=limit - 1
            )
        except PromptTooLong as error:
            await self._mark_limit(session, "context_length")
            raise _too_long(limit, error.at_least, exact=False) from None

    async def _refuse_over_limit(self, session: Session, choices: int) -> None:
        limits, calls = session.limits, len(session.forest) + session.pending_calls
        if limits.max_turns is not None and calls + choices > limits.max_turns:
            limit, text = "max_turns", f"{limits.max_turns} model calls"
        elif limits.max_tokens is not None and session.sampled_tokens >= limits.max_tokens:
            limit, text = "max_tokens", f"{limits.max_tokens} sampled tokens"
        elif limits.time_s is not None and time.monotonic() - session.opened_at > limits.time_s:
            limit, text = "time_s", f"{limits.time_s:g} s"
        else:
            return
        await self._mark_limit(session, limit)
        raise RequestError(
            f"episode {session.id} has reached its limit of {text}", status=403, code="episode_limit"
        )

    def _context_limit(self, session: Session, model: ModelInfo) -> int:
        """Most tokens of a prompt with its completion: the engine's, the config's or the episode's."""
        bounds = (model.max_context, self._config.context_length, session.limits.context_tokens)
        return min(bound for bound in bounds if bound is not None)

    async def _drawing(self, session: Session, request: ModelRequest, prompt: Prompt, limit: int) -> Drawing:
        prompt_tokens, most = len(prompt.ids), self._config.max_completion_tokens
        if prompt_tokens >= limit:
            await self._mark_limit(session, "context_length")
            raise _too_long(limit, prompt_tokens, exact=True)
        if most is not None and (request.wish.max_tokens or 0) > most:
            raise RequestError(
                f"at most {most} tokens may be requested, got {request.wish.max_tokens}", param="max_tokens"
            )
        grammar = await self._prompts.grammar(request, prompt.renderer)
        bounds = [limit - prompt_tokens, request.wish.max_tokens or self._config.default_max_tokens, most]
        bounds.append(session.limits.max_completion_tokens)
        if session.limits.max_tokens is not None:
            bounds.append(max(1, session.limits.max_tokens - session.sampled_tokens))
        return draw(
            request.wish,
            split=session.row.split,
            episode_sampling=session.row.sampling,
            lifted=self._config.lifted_pins,
            stop_token_ids=prompt.renderer.stop_token_ids,
            max_new_tokens=min(bound for bound in bounds if bound is not None),
            grammar=grammar,
        )

    async def _draw(
        self,
        call: Call,
        choice: int,
        session: Session,
        request: ModelRequest,
        prompt: Prompt,
        drawing: Drawing,
        streamed: bool,
    ) -> Turn:
        """Sample one reply and read it; streamed, its pieces go into the call as they come."""
        params, base = drawing.params, session.row.sampling.get(BASE_SEED)
        if params.seed is not None and choice:  # siblings with one seed would be one reply
            params = replace(params, seed=(params.seed + choice) % 2**63)
        elif params.seed is None and base is not None:
            params = replace(params, seed=session.draws.next_seed(base, prompt.where.parent, prompt.new_ids))
        stream = _ReplyFeed(call, choice, prompt, request, self._prompts) if streamed else None
        try:
            completion = await self._generate(session, call.turn_ids[choice], prompt, params, stream)
            if stream is not None:
                reply = stream.finish()
            else:
                whole = await self._prompts.read_reply(prompt, completion.token_ids, request)
                reply = as_asked(whole, request)
        except RenderingError as error:
            raise EngineError(f"its completion cannot be read: {error}") from error
        where, fork = prompt.where, prompt.where.fork
        if choice and where.parent is None:
            fork = Fork(call.turn_ids[0], "resampled", len(request.messages))
        return Turn(
            id=call.turn_ids[choice],
            parent=where.parent.id if where.parent is not None else None,
            new_messages=where.new_messages,
            new_prompt_ids=prompt.new_ids,
            completion=completion,
            reply=reply,
            sampling=params,
            tools_id=request.tools_id,
            label=request.label,
            session=request.session,
            forked_from=fork,
            constrained=drawing.constrained,
            overrides=drawing.overrides,
            has_instructions=request.has_instructions,
            recorded_before=prompt.recorded_before,
            special_tokens_as_text=prompt.special_tokens_as_text,
        )

    async def _generate(
        self, session: Session, rid: str, prompt: Prompt, params: SamplingParams, stream: _ReplyFeed | None
    ) -> Completion:
        feed = stream.feed if stream is not None else None
        drawing = asyncio.current_task()
        assert drawing is not None
        session.calls.add(drawing)  # the end of the episode cancels it
        try:
            async with self._admission.slot(), asyncio.timeout(self._config.generate_timeout_s):
                completion = await self._engine.generate(
                    rid, prompt.ids, self._wanted(params, prompt), feed, affinity=session.id
                )
        except TimeoutError:
            raise EngineUnavailable(f"no completion within {self._config.generate_timeout_s:g} s") from None
        except EngineRejected as error:
            if params.grammar is None:
                raise
            raise RequestError(
                f"the engine cannot constrain its output so: {error}", code="unsupported_parameter"
            ) from None
        except asyncio.CancelledError:
            session.refuse_if_sealed()
            raise
        finally:
            session.calls.discard(drawing)
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted the generation")
        return completion

    def _wanted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """`params`, and the experts of the tokens that the turn adds, where they are recorded.

        Its parent could not know those of its own last token, which comes first here.
        """
        if not self._config.routed_experts:
            return params
        known = len(prompt.ids) - len(prompt.new_ids)
        return replace(params, routed_experts_from=max(known - 1, 0))

    async def _record(self, call: Call, session: Session, turns: list[Turn]) -> None:
        """Write the turns, then remember them, in the order of the writes.

        Whatever becomes of the call, turns that are in the store are remembered. The order of a session's
        forest is thus the order of its rows in the store, which `Turn.recorded_before` counts in.
        """
        opening = session.opening
        write = self._store.add_turn(session.id, *turns, opening=opening)
        if self._config.durability == "batched" and opening is None:
            session.watch_write(write, call.turn_ids)
            _remember(session, turns)
        else:
            await self._written(call, session, turns, write)
        if opening is not None and session.limit_reached is not None:  # before the store had the episode
            await asyncio.wrap_future(self._store.mark_limit(session.id, session.limit_reached))

    async def _mark_cut_off(self, session: Session, turns: Sequence[Turn], *, room: int) -> None:
        """Note a limit that cut a completion off. `room` is what the context had left for it."""
        cut_off = [turn for turn in turns if turn.completion.finish_reason == "length"]
        most = session.limits.max_tokens
        if cut_off and most is not None and session.sampled_tokens >= most:
            await self._mark_limit(session, "max_tokens")
        elif any(len(turn.completion) >= room for turn in cut_off):
            await self._mark_limit(session, "context_length")

    async def _written(
        self, call: Call, session: Session, turns: list[Turn], write: concurrent.futures.Future[None]
    ) -> None:
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def land() -> None:
            session.pending_writes -= 1
            if write.exception() is None:
                session.opening = None
                _remember(session, turns)
            if not landed.done():
                landed.set_result(None)

        def discard() -> None:
            if write.exception() is None:
                self.retries.discard(session, call)

        session.pending_writes += 1
        _when_ended(write, land)  # not by this task, which another one may overtake
        try:
            async with asyncio.timeout(self._config.generate_timeout_s):
                await landed
        except asyncio.CancelledError:
            _when_ended(write, discard)  # runs after `land`
            raise
        except TimeoutError:
            _when_ended(write, discard)
            raise StoreError("the store did not take the turn in time") from None
        try:
            write.result()
        except SessionTaken as error:  # another worker was first to open it
            raise episode_elsewhere(str(error)) from None
        except Conflict as error:  # sealed while this call was under way
            raise RequestError(str(error), status=409, code="episode_sealed") from None

    async def _mark_limit(self, session: Session, limit: str) -> None:
        if session.limit_reached is None:
            session.limit_reached = limit
            if session.opening is None:
                await asyncio.wrap_future(self._store.mark_limit(session.id, limit))


def _too_long(limit: int, tokens: int, *, exact: bool) -> RequestError:
    """The refusal of a prompt of `tokens` tokens or, unless `exact`, of at least that many."""
    count = f"{tokens} tokens" if exact else f"at least {tokens} tokens"
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {count}. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
        details={"tokens": tokens, "limit": limit},
    )


def _when_ended(write: concurrent.futures.Future[None], act: Callable[[], None]) -> None:
    """Call `act` on this event loop once a write has ended, in the order of the writes and of these calls."""
    loop = asyncio.get_running_loop()
    write.add_done_callback(lambda _: loop.call_soon_threadsafe(act))


def _remember(session: Session, turns: Sequence[Turn]) -> None:
    for turn in turns:
        if turn.completion.routed_experts is not None:  # large, and only the trainer wants it, from the store
            turn = replace(turn, completion=replace(turn.completion, routed_experts=None))
        session.record(turn)


class _ReplyFeed:
    """Turns the tokens of one choice into pieces of its reply, for the clients of the call."""

    def __init__(
        self, call: Call, choice: int, prompt: Prompt, request: ModelRequest, prompts: Prompts
    ) -> None:
        self._call, self._choice, self._request = call, choice, request
        self._stream = prompts.reply_stream(prompt, request)
        self._asked = AskedStream(request)

    def feed(self, chunk: TokenChunk) -> None:
        """Pass on what the next tokens mean."""
        self._call.put(self._choice, self._asked.feed(self._stream.feed(chunk.token_ids)))

    def finish(self) -> Message:
        """Pass on the rest; the whole reply. RenderingError if it cannot be read."""
        rest = self._stream.finish()
        self._call.put(self._choice, [*self._asked.feed(rest), *self._asked.finish()])
        return as_asked(self._stream.message, self._request)


async def _all(draws: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """The results of all samples; if one fails, the others are ended."""
    tasks = [asyncio.ensure_future(one) for one in draws]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
