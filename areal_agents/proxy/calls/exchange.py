"""The way of one model call, from a canonical request to its recorded turns.

`Exchange._run` has the steps in order: refuse what is over a limit, find the recorded turn that the
conversation continues and build the prompt, fix the sampling parameters, sample and read each choice, and
record the turns.

A turn is in the store before its reply leaves, so whatever a client has seen is recorded. What was recorded
is never tokenised again: the next prompt is these very ids plus the new messages.
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
from areal_agents.proxy.calls.delivery import AskedStream, as_asked
from areal_agents.proxy.calls.prompts import Prompt, Prompts
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.calls.retries import Retries
from areal_agents.proxy.calls.sampling import BASE_SEED, TurnSampling, turn_sampling
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.turn_ids import new_turn_id
from areal_agents.proxy.episodes.sessions import Session
from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.store import Conflict, SessionTaken, Store


@dataclass(frozen=True, slots=True)
class Services:
    """What all exchanges of a proxy share."""

    store: Store
    engine: Sampler
    config: ProxyConfig
    admission: Admission
    prompts: Prompts
    retries: Retries


class Exchange(SharedReply):
    """One model call: its request, its state on the way, and the clients that wait for its replies.

    The task raises RequestError for a mistake of the client or a limit, EngineError if the engine fails, and
    StoreError if the store does.

    Attributes:
        session, request: the episode, and what is requested in it.
        model: what the engine serves.
        limit: most tokens of a prompt with its completion.
        prompt: the exact prompt; set once it is built, as are the next fields.
        sampling: the sampling parameters of each choice, except for its seed.
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
    ) -> None:
        self._services = services
        self._streamed = streamed
        self._model_info = model_info
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
                choices = [self._sample(choice) for choice in range(request.choices)]
                turns = [await choices[0]] if len(choices) == 1 else await _all(choices)
                await self._record(turns)
                await self._note_cut_off(turns)
                session.ledger.answer(request)
            except RequestError:
                raise
            except Exception:  # the fault of the engine, the store or the proxy, not of the policy
                session.ledger.lose(request.key())
                raise
        prompt_tokens = len(self.prompt.ids)
        reused = prompt_tokens - len(self.prompt.new_ids)
        return tuple(CompletedTurn(turn, prompt_tokens, self.created_at, reused) for turn in turns)

    # Limits

    async def _refuse_over_limit(self) -> None:
        """RequestError 403 if the episode has used up one of its limits."""
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
            f"episode {session.id} has reached its limit of {text}", status=403, code="episode_limit"
        )

    def _context_limit(self) -> int:
        """Most tokens of a prompt with its completion: the engine's, the config's or the episode's."""
        bounds = (
            self.model.max_context,
            self._services.config.context_length,
            self.session.limits.context_tokens,
        )
        return min(bound for bound in bounds if bound is not None)

    async def _reach_limit(self, limit: str) -> None:
        """Note a limit that the episode reached, in the store too unless the episode is not there yet."""
        if self.session.reach_limit(limit) and self.session.opening is None:
            await asyncio.wrap_future(self._services.store.mark_limit(self.session.id, limit))

    async def _note_cut_off(self, turns: Sequence[Turn]) -> None:
        """Note the limit that cut a completion off."""
        cut_off = [turn for turn in turns if turn.completion.finish_reason == "length"]
        most, room = self.session.limits.max_tokens, self.limit - len(self.prompt.ids)
        if cut_off and most is not None and self.session.sampled_tokens >= most:
            await self._reach_limit("max_tokens")
        elif any(len(turn.completion) >= room for turn in cut_off):
            await self._reach_limit("context_length")

    # Prompt and sampling parameters

    async def _build_prompt(self) -> Prompt:
        try:
            # At the limit itself no reply would fit.
            return await self._services.prompts.prompt(
                self.session.forest, self.request, self.model.vocab_size, most_tokens=self.limit - 1
            )
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
                f"at most {most} tokens may be requested, got {wish.max_tokens}", param="max_tokens"
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
        """Sample one reply and read it. If the call is streamed, its pieces are passed on as they arrive."""
        prompt, request, prompts = self.prompt, self.request, self._services.prompts
        params = self._with_seed(choice)
        stream = _ReplyFeed(self, choice, prompts) if self._streamed else None
        try:
            completion = await self._generate(self.turn_ids[choice], params, stream)
            if stream is not None:
                reply = stream.finish()
            else:
                reply = as_asked(await prompts.read_reply(prompt, completion.token_ids, request), request)
        except RenderingError as error:
            raise EngineError(f"its completion cannot be read: {error}") from error
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
        )

    def _with_seed(self, choice: int) -> SamplingParams:
        """The sampling parameters of a choice: choices with the same seed would be the same reply."""
        params, base = self.sampling.params, self.session.row.sampling.get(BASE_SEED)
        if params.seed is not None:
            return replace(params, seed=(params.seed + choice) % 2**63) if choice else params
        if base is None:
            return params
        seed = self.session.seeds.next_seed(base, self.prompt.where.parent, self.prompt.new_ids)
        return replace(params, seed=seed)

    async def _generate(self, rid: str, params: SamplingParams, stream: _ReplyFeed | None) -> Completion:
        """Wait for a place in the engine and generate, within `generate_timeout_s` from then on."""
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
            raise EngineUnavailable(f"no completion within {timeout_s:g} s") from None
        except EngineRejected as error:
            if params.grammar is None:
                raise
            raise RequestError(
                f"the engine cannot constrain its output so: {error}", code="unsupported_parameter"
            ) from None
        except asyncio.CancelledError:
            session.refuse_if_sealed()
            raise
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted the generation")
        return completion

    def _with_routing(self, params: SamplingParams) -> SamplingParams:
        """`params`, with a request for the experts of the tokens that the turn adds if they are recorded.

        The experts of the parent's last token were unknown when the parent was recorded, so they come first.
        """
        if not self._services.config.routed_experts:
            return params
        known = len(self.prompt.ids) - len(self.prompt.new_ids)
        return replace(params, routed_experts_from=max(known - 1, 0))

    # Recording

    async def _record(self, turns: list[Turn]) -> None:
        """Write the turns to the store, then record them in the session, in the order of the writes.

        Turns that are in the store are recorded whatever happens to the call. So the order of the forest is
        the order of the rows in the store, which `Turn.recorded_before` counts in.
        """
        session, store = self.session, self._services.store
        opening = session.opening
        write = store.add_turn(session.id, *turns, opening=opening)
        if self._services.config.durability == "batched" and opening is None:
            session.watch_write(write, self.turn_ids)
            session.record(turns)
        else:
            await self._written(turns, write)
        if opening is not None and session.limit_reached is not None:  # before the store had the episode
            await asyncio.wrap_future(store.mark_limit(session.id, session.limit_reached))

    async def _written(self, turns: list[Turn], write: concurrent.futures.Future[None]) -> None:
        """Wait until the store has the turns. Without a client left, they are recorded as undelivered."""
        session, retries = self.session, self._services.retries
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def land() -> None:
            session.write_ends(turns, failed=write.exception() is not None)
            if not landed.done():
                landed.set_result(None)

        def discard() -> None:
            if write.exception() is None:
                retries.discard(session, self)

        session.write_begins()
        _when_ended(write, land)  # not by this task, which another one may overtake
        try:
            async with asyncio.timeout(self._services.config.generate_timeout_s):
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
        except Conflict as error:  # sealed while this call was running
            raise RequestError(str(error), status=409, code="episode_sealed") from None


def too_long(limit: int, tokens: int, *, exact: bool) -> RequestError:
    """The refusal of a prompt of `tokens` tokens or, unless `exact`, of at least that many."""
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
        self._asked = AskedStream(exchange.request)

    def feed(self, chunk: TokenChunk) -> None:
        """Pass on the pieces that the next tokens complete."""
        self._exchange.put(self._choice, self._asked.feed(self._stream.feed(chunk.token_ids)))

    def finish(self) -> Message:
        """Pass on the rest; returns the whole reply. RenderingError if it cannot be read."""
        rest = self._stream.finish()
        self._exchange.put(self._choice, [*self._asked.feed(rest), *self._asked.finish()])
        return as_asked(self._stream.message, self._request)


def _when_ended(write: concurrent.futures.Future[None], act: Callable[[], None]) -> None:
    """Call `act` on this event loop once a write has ended, in the order of the writes and of these calls."""
    loop = asyncio.get_running_loop()
    write.add_done_callback(lambda _: loop.call_soon_threadsafe(act))


async def _all(samples: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """The results of all samples; if one fails, the others are ended."""
    tasks = [asyncio.ensure_future(one) for one in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
