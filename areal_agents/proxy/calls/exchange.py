"""Processes one model call, from a canonical request to its recorded turns.

`Exchange._run` performs the steps in order: check the episode's limits, find the recorded turn that the
conversation continues and build the prompt, fix the sampling parameters, sample and parse each choice, and
record the turns.

With `durability: turn`, a turn is in the store before its reply is sent, so everything a client received is
recorded. Recorded tokens are never tokenised again: the next prompt consists of their ids and the rendering
of the new messages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk
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
from areal_agents.proxy.calls.prompts import Prompt, Prompts
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.calls.retries import Retries
from areal_agents.proxy.calls.sampling import BASE_SEED, TurnSampling, turn_sampling
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.calls.stop_strings import DeliveredStream, delivered_reply
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.proxy.episodes.sessions import Session
from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.store import Conflict, OwnedElsewhere, SessionTaken, Store


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that all exchanges of a proxy share."""

    store: Store
    engine: Sampler
    config: ProxyConfig
    admission: Admission
    prompts: Prompts
    retries: Retries


class Exchange(SharedReply):
    """One model call that is sampled: its request, its prompt and sampling, and its waiting clients.

    The task raises RequestError for an invalid request or a limit that is reached, EngineError if the engine
    fails, and StoreError if the store fails.

    Attributes:
        session: the episode.
        request: the canonical request.
        model: the model that the engine serves; set, like the following attributes, by the task.
        limit: maximum number of tokens of a prompt with its completion.
        prompt: the exact prompt.
        sampling: the sampling parameters of all choices, without the seeds of the choices.
    """

    model: ModelInfo
    limit: int
    prompt: Prompt
    sampling: TurnSampling

    def __init__(
        self,
        services: Services,
        session: Session,
        request: ModelRequest,
        *,
        streamed: bool,
        model_info: Callable[[], Coroutine[Any, Any, ModelInfo]],
        resampled: Turn | None = None,
    ) -> None:
        self._services = services
        self._streamed = streamed
        self._model_info = model_info
        self._resampled = resampled  # the recorded turn whose prompt this call has; None for most calls
        self.session = session
        self.request = request
        super().__init__([new_turn_id() for _ in range(request.choices)], time.time(), self._run)

    async def _run(self) -> tuple[CompletedTurn, ...]:
        session, request = self.session, self.request
        await self._refuse_over_limit()
        with session.admitted(request.choices):
            try:
                self.model = await self._model_info()
                self.limit = self._context_limit()
                self.prompt = await self._build_prompt()
                self.sampling = await self._fix_sampling()
                session.refuse_if_sealed()  # nothing cancels a call that is not generating yet
                choices = [self._sample(choice) for choice in range(request.choices)]
                turns = [await choices[0]] if len(choices) == 1 else await _gather(choices)
                await self._record(turns)
                await self._note_cut_off(turns)
                session.ledger.answer(request)
            except RequestError:
                raise
            except Exception:  # caused by the engine, the store or the proxy, not by the policy
                session.ledger.lose(request.key())
                raise
        prompt_tokens = len(self.prompt.ids)
        reused = prompt_tokens - len(self.prompt.new_ids)
        return tuple(CompletedTurn(turn, prompt_tokens, self.created_at, reused) for turn in turns)

    # Limits

    async def _refuse_over_limit(self) -> None:
        """Raise RequestError 403 if the episode has used up one of its limits."""
        session = self.session
        limits, calls = session.limits, len(session.forest) + session.pending_calls
        if limits.max_turns is not None and calls + self.request.choices > limits.max_turns:
            limit, text = "max_turns", f"{limits.max_turns} model calls"
        elif limits.max_tokens is not None and session.sampled_tokens >= limits.max_tokens:
            limit, text = "max_tokens", f"{limits.max_tokens} sampled tokens"
        elif limits.time_s is not None and time.monotonic() - session.opened_at > limits.time_s:
            limit, text = "time_s", f"{limits.time_s:g} s"
        else:
            return
        await self._reach_limit(limit)
        raise RequestError(
            f"episode {session.id} has reached its limit of {text} ({limit})",
            status=403,
            code="episode_limit",
        )

    def _context_limit(self) -> int:
        """Return the maximum number of tokens of a prompt with its completion: the lowest limit set."""
        bounds = (
            self.model.max_context,
            self._services.config.context_length,
            self.session.limits.context_tokens,
        )
        return min(bound for bound in bounds if bound is not None)

    async def _reach_limit(self, limit: str) -> None:
        """Mark the episode as having reached a limit, also in the store unless it is not there yet."""
        if self.session.reach_limit(limit) and self.session.opening is None:
            marking = self._services.store.mark_limit(self.session.id, limit, owner=self.session.owner)
            await asyncio.wrap_future(marking)

    async def _note_cut_off(self, turns: Sequence[Turn]) -> None:
        """Mark the episode with the limit that cut off a completion, if one did."""
        cut_off = [turn for turn in turns if turn.completion.finish_reason == "length"]
        most, room = self.session.limits.max_tokens, self.limit - len(self.prompt.ids)
        if cut_off and most is not None and self.session.sampled_tokens >= most:
            await self._reach_limit("max_tokens")
        elif any(len(turn.completion) >= room for turn in cut_off):
            await self._reach_limit("context_length")

    # Prompt and sampling parameters

    async def _build_prompt(self) -> Prompt:
        prompts, forest, vocab_size = self._services.prompts, self.session.forest, self.model.vocab_size
        if self._resampled is not None:
            return await prompts.recorded_prompt(forest, self.request, self._resampled, vocab_size)
        try:
            # A prompt as long as the limit leaves no room for a reply.
            return await prompts.prompt(forest, self.request, vocab_size, most_tokens=self.limit - 1)
        except PromptTooLong as error:
            await self._reach_limit("context_length")
            raise too_long(self.limit, error.at_least, exact=False) from None

    async def _fix_sampling(self) -> TurnSampling:
        config, session, wish = self._services.config, self.session, self.request.wish
        prompt_tokens, most = len(self.prompt.ids), config.max_completion_tokens
        if prompt_tokens >= self.limit:
            await self._reach_limit("context_length")
            raise too_long(self.limit, prompt_tokens, exact=True)
        if most is not None and (wish.max_tokens or 0) > most:
            raise RequestError(
                f"a completion may have at most {most} tokens, the proxy's max_completion_tokens; "
                f"got {wish.max_tokens}",
                param="max_tokens",
            )
        grammar = await self._services.prompts.grammar(self.request, self.prompt.renderer)
        bounds = [self.limit - prompt_tokens, wish.max_tokens or config.default_max_tokens, most]
        bounds.append(session.limits.max_completion_tokens)
        if session.limits.max_tokens is not None:
            bounds.append(max(1, session.limits.max_tokens - session.sampled_tokens))
        return turn_sampling(
            wish,
            split=session.row.split,
            episode_sampling=session.row.sampling,
            lifted=config.lifted_pins,
            stop_token_ids=self.prompt.renderer.stop_token_ids,
            max_new_tokens=min(bound for bound in bounds if bound is not None),
            grammar=grammar,
        )

    # Samples

    async def _sample(self, choice: int) -> Turn:
        """Sample one reply and parse it. If the call is streamed, pass on its pieces as they arrive."""
        prompt, request, prompts = self.prompt, self.request, self._services.prompts
        params = self._with_seed(choice)
        stream = _ReplyFeed(self, choice, prompts) if self._streamed else None
        try:
            completion = await self._generate(self.turn_ids[choice], params, stream)
            if stream is not None:
                reply = stream.finish()
            else:
                reply = delivered_reply(
                    await prompts.read_reply(prompt, completion.token_ids, request), request
                )
        except RenderingError as error:
            raise EngineError(f"the completion cannot be parsed: {error}") from error
        where, fork = prompt.where, prompt.where.fork
        if choice and where.parent is None:
            fork = Fork(self.turn_ids[0], "resampled", len(request.messages))
        return Turn(
            id=self.turn_ids[choice],
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
            constrained=self.sampling.constrained,
            overrides=self.sampling.overrides,
            has_instructions=request.has_instructions,
            recorded_before=prompt.recorded_before,
            special_tokens_as_text=prompt.special_tokens_as_text,
            volatile_as_first_seen=prompt.volatile_as_first_seen,
        )

    def _with_seed(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of a choice; each choice gets a seed of its own."""
        params, base = self.sampling.params, self.session.row.sampling.get(BASE_SEED)
        if params.seed is not None:
            return replace(params, seed=(params.seed + choice) % 2**63) if choice else params
        if base is None:
            return params
        seed = self.session.seeds.next_seed(base, self.prompt.where.parent, self.prompt.new_ids)
        return replace(params, seed=seed)

    async def _generate(self, rid: str, params: SamplingParams, stream: _ReplyFeed | None) -> Completion:
        """Wait for a slot, then generate within `generate_timeout_s`."""
        services, session = self._services, self.session
        timeout_s = services.config.generate_timeout_s
        try:
            with session.generating():
                async with services.admission.slot(), asyncio.timeout(timeout_s):
                    completion = await services.engine.generate(
                        rid,
                        self.prompt.ids,
                        self._with_routing(params),
                        stream.feed if stream is not None else None,
                        affinity=session.id,
                    )
        except TimeoutError:
            raise EngineUnavailable(
                f"no completion within {timeout_s:g} s, the proxy's generate_timeout_s"
            ) from None
        except EngineRejected as error:
            if params.grammar is None:
                raise
            raise RequestError(
                f"the engine cannot constrain its output to the requested schema or tools: {error}",
                code="unsupported_parameter",
            ) from None
        except asyncio.CancelledError:
            session.refuse_if_sealed()
            raise
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted the generation")
        return completion

    def _with_routing(self, params: SamplingParams) -> SamplingParams:
        """Return `params`, which if experts are recorded request those of the tokens that the turn adds.

        They begin with the parent's last token, whose experts were unknown when the parent was recorded.
        """
        if not self._services.config.routed_experts:
            return params
        known = len(self.prompt.ids) - len(self.prompt.new_ids)
        return replace(params, routed_experts_from=max(known - 1, 0))

    # Recording

    async def _record(self, turns: list[Turn]) -> None:
        """Write the turns to the store, then record them in the session, in the order of the writes.

        Turns that are in the store are recorded in the session even if the call is cancelled. The forest
        therefore has the order of the rows in the store, which `Turn.recorded_before` relies on.
        """
        session, store = self.session, self._services.store
        session.refuse_if_sealed()
        opening = session.opening
        write = store.add_turn(session.id, *turns, opening=opening, owner=session.owner)
        if self._services.config.durability == "batched" and opening is None:
            session.watch_write(write, self.turn_ids)
            session.record(turns)
        else:
            await self._await_write(turns, write)
        if opening is not None and session.limit_reached is not None:  # reached before the episode was stored
            marking = store.mark_limit(session.id, session.limit_reached, owner=session.owner)
            await asyncio.wrap_future(marking)

    async def _await_write(self, turns: list[Turn], write: concurrent.futures.Future[None]) -> None:
        """Wait until the store has the turns. If no client is left, they are recorded as undelivered."""
        session, retries = self.session, self._services.retries
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def record() -> None:
            session.write_ends(turns, failed=write.exception() is not None)
            if not recorded.done():
                recorded.set_result(None)

        def discard() -> None:
            if write.exception() is None:
                retries.discard(session, self)

        session.write_begins()
        _call_when_ended(write, record)  # not in this task, because the task of a later write may run first
        try:
            async with asyncio.timeout(self._services.config.generate_timeout_s):
                await recorded
        except asyncio.CancelledError:
            _call_when_ended(write, discard)  # runs after `record`
            raise
        except TimeoutError:
            _call_when_ended(write, discard)
            raise StoreError("the store did not write the turn in time") from None
        try:
            write.result()
        except SessionTaken as error:  # another worker opened the episode first
            raise episode_elsewhere(str(error)) from None
        except OwnedElsewhere:
            session.lose()  # the next call loads what the other proxy has recorded
            raise
        except Conflict as error:  # sealed while this call was running
            raise RequestError(str(error), status=409, code="episode_sealed") from None


def too_long(limit: int, tokens: int, *, exact: bool) -> RequestError:
    """Return the error for a prompt of `tokens` tokens or, unless `exact`, of at least that many."""
    count = f"{tokens} tokens" if exact else f"at least {tokens} tokens"
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {count}. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
        details={"tokens": tokens, "limit": limit},
    )


class _ReplyFeed:
    """Turns the tokens of one choice into pieces of its reply, for the clients of the exchange."""

    def __init__(self, exchange: Exchange, choice: int, prompts: Prompts) -> None:
        self._exchange, self._choice, self._request = exchange, choice, exchange.request
        self._stream = prompts.reply_stream(exchange.prompt, exchange.request)
        self._delivered = DeliveredStream(exchange.request)

    def feed(self, chunk: TokenChunk) -> None:
        """Pass on the pieces that the next tokens complete."""
        self._exchange.put(self._choice, self._delivered.feed(self._stream.feed(chunk.token_ids)))

    def finish(self) -> Message:
        """Pass on the rest, and return the whole reply. Raise RenderingError if it cannot be parsed."""
        rest = self._stream.finish()
        self._exchange.put(self._choice, [*self._delivered.feed(rest), *self._delivered.finish()])
        return delivered_reply(self._stream.message, self._request)


def _call_when_ended(write: concurrent.futures.Future[None], act: Callable[[], None]) -> None:
    """Call `act` on this event loop once a write has ended.

    Functions are called in the order of the writes, and those of one write in the order of registration.
    """
    loop = asyncio.get_running_loop()
    write.add_done_callback(lambda _: loop.call_soon_threadsafe(act))


async def _gather(samples: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """Return the results of all samples; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
