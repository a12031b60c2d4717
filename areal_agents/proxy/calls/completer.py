"""Answers the model calls of all episodes and dialects, with one store, engine and renderer."""

from __future__ import annotations

from areal_agents.core.forest import Forest
from areal_agents.errors import PromptTooLong
from areal_agents.inference import ModelInfo, Sampler
from areal_agents.proxy.calls.admission import Admission
from areal_agents.proxy.calls.exchange import Exchange, Services, too_long
from areal_agents.proxy.calls.prompts import Prompts
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.calls.retries import Retries, recorded_reply
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.config import FEWEST_CALLS, ProxyConfig
from areal_agents.proxy.episodes.sessions import Session
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store

_COUNTED_CONTEXTS = 2  # tokens are counted for prompts of up to this many context lengths


class Completer:
    """Answers requests with recorded or new samples."""

    def __init__(self, *, store: Store, engine: Sampler, renderer: ChatRenderer, config: ProxyConfig) -> None:
        self._engine = engine
        self._config = config
        self._admission = Admission(
            max_concurrent=config.max_concurrent or FEWEST_CALLS,
            max_queued=config.max_queued,
            longest_wait_s=config.generate_timeout_s,
        )
        self._prompts = Prompts(renderer)
        self.retries = Retries(store, self._prompts)
        self._services = Services(store, engine, config, self._admission, self._prompts, self.retries)
        self._model: ModelInfo | None = None

    def close(self) -> None:
        """Stop the rendering threads."""
        self._prompts.close()

    @property
    def waiting(self) -> int:
        """Number of calls that wait in the queue."""
        return self._admission.waiting

    @property
    def running(self) -> int:
        """Number of calls that the engine is answering."""
        return self._admission.running

    def call(self, session: Session, request: ModelRequest, *, streamed: bool) -> SharedReply:
        """Return the running or recorded reply that a request repeats, else a new exchange.

        The caller joins the reply, and leaves it when its client has been served or has disconnected.
        Raise RequestError 409 if the request's Idempotency-Key was used for another request, or if a forked
        episode repeats calls of another one and this is none of them.
        """
        start, resampled = session.start, None
        if start is not None and (turns := start.take(self._prompts, request)):
            return recorded_reply(session, turns)
        if (earlier := self.retries.earlier(session, request)) is not None:
            return earlier
        if start is not None and not start.has_resumed:
            resampled = start.resume(self._prompts, request)
        exchange = Exchange(
            self._services,
            session,
            request,
            streamed=streamed,
            model_info=self.model_info,
            resampled=resampled,
        )
        if start is not None and resampled is not None:
            exchange.task.add_done_callback(lambda _: start.ended(failed=exchange.has_failed))
        self.retries.begin(session, request, exchange)
        return exchange

    async def count_tokens(self, forest: Forest, request: ModelRequest) -> int:
        """Return the length of the prompt that a request would have after the recorded turns of `forest`.

        Raise RequestError, as for a call, if the prompt is longer than `_COUNTED_CONTEXTS` context lengths.
        """
        model = await self.model_info()
        limit = min(bound for bound in (model.max_context, self._config.context_length) if bound is not None)
        try:
            most = _COUNTED_CONTEXTS * limit
            prompt = await self._prompts.prompt(forest, request, model.vocab_size, most_tokens=most)
        except PromptTooLong as error:
            raise too_long(limit, error.at_least, exact=False) from None
        return len(prompt.ids)

    async def model_info(self) -> ModelInfo:
        """Return what the engine serves; the engine is queried once."""
        if self._model is None:
            self._model = await self._engine.model_info()
        return self._model
