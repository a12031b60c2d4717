"""Builds the exact prompt of a request: recorded ids plus new messages, or a full rendering with a reason.

As long as a conversation is recognised, its sampled tokens are never tokenised again. A conversation is
recognised by its messages or, if those differ from the recorded ones, by an equal rendering of them. Volatile
text is rendered as it was first recorded in the conversation, so that no prompt changes with it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import orjson

from areal_agents.core.completion import Grammar, TokenIds
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Continuation, Fork, ForkReason, Turn
from areal_agents.errors import ConfigError, PromptTooLong, RenderingError, RequestError
from areal_agents.lru import LruCache
from areal_agents.proxy.calls.raw_prompts import PlainStream, RawPrompts
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.calls.sampling import grammar_of
from areal_agents.rendering import ChatRenderer, ReplyStream

T = TypeVar("T")

# Approximate costs of rendering and parsing, which decide what runs in a thread.
_MS_PER_CHARACTER, _MS_PER_SAMPLED_TOKEN = 5e-4, 5e-4
_MS_PER_BRIDGED_TOOLS_CHARACTER = 1e-5  # templates render the tools again, but they are not encoded
_INLINE_MS, _LONG_MS = 1.0, 100.0
_COUNTED_CHARACTERS = 200_000  # tools with more characters count as very large
_RENDERERS_KEPT = 16
_TOOLS_KEPT = 256  # sets of tools whose size is remembered
_MOST_CANDIDATES = 4  # turns whose rendering is compared with that of a conversation


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a turn.

    Attributes:
        where: the turn that the prompt continues, or the reason why it continues none.
        ids: [P] the whole prompt.
        new_ids: the part of `ids` after the parent's prompt and completion.
        renderer: the renderer of the prompt, which also parses the reply.
        recorded_before: number of turns of the episode that were recorded when `where` was determined;
            `where` refers only to those.
        special_tokens_as_text: number of special tokens that the content behind `new_ids` spells out as text.
        volatile_as_first_seen: number of volatile texts that `ids` has as first recorded, not as received.
    """

    where: Continuation
    ids: TokenIds
    new_ids: TokenIds
    renderer: ChatRenderer
    recorded_before: int
    special_tokens_as_text: int = 0
    volatile_as_first_seen: int = 0


class Prompts:
    """Builds prompts and parses replies for one model. Shared by all episodes."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer  # for requests that set no template options
        self._with_options: LruCache[bytes, ChatRenderer] = LruCache(_RENDERERS_KEPT)
        self._tools_sizes: LruCache[str, float] = LruCache(_TOOLS_KEPT)
        self._raw = RawPrompts(renderer)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rendering")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rendering-long")

    def close(self) -> None:
        """Stop the rendering threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def prompt(
        self, forest: Forest, request: ModelRequest, vocab_size: int, *, most_tokens: int
    ) -> Prompt:
        """Return the prompt of a request in an episode whose recorded turns are `forest`.

        Args:
            most_tokens: maximum length; a much longer prompt may be refused before it is encoded.

        Raises:
            PromptTooLong: the prompt has more than `most_tokens` tokens.
            RequestError: 400 if the prompt has an unknown token id.
            RenderingError: the chat template cannot render the messages.
        """
        if request.raw_prompt is not None:
            prompt = await self._raw_prompt(forest, request.raw_prompt, most_tokens)
        else:
            prompt = await self._chat(forest, request, most_tokens)
        _check_vocabulary(prompt.new_ids, min(vocab_size, self.renderer.vocab_size))
        return prompt

    async def recorded_prompt(
        self, forest: Forest, request: ModelRequest, turn: Turn, vocab_size: int
    ) -> Prompt:
        """Return the prompt of a recorded turn, token for token, for a request that this turn answered.

        The turn is not in `forest`, but its parent is. Raises as `prompt`.
        """
        renderer = self.renderer if request.raw_prompt is not None else await self._renderer_of(request)
        parent = None if turn.parent is None else forest[turn.parent]
        new_ids = turn.new_prompt_ids
        ids = new_ids if parent is None else np.concatenate([forest.context(parent.id), new_ids])
        _check_vocabulary(ids, min(vocab_size, self.renderer.vocab_size))
        where = Continuation(parent, turn.new_messages, turn.forked_from)
        as_text, as_first_seen = turn.special_tokens_as_text, turn.volatile_as_first_seen
        return Prompt(where, ids, new_ids, renderer, len(forest), as_text, as_first_seen)

    async def read_reply(self, prompt: Prompt, completion_ids: TokenIds, request: ModelRequest) -> Message:
        """Parse a completion into an assistant message. Raise RenderingError if it cannot be parsed."""
        cost = len(completion_ids) * _MS_PER_SAMPLED_TOKEN
        if request.raw_prompt is not None:
            text = await self.off_loop(cost, lambda: self._raw.text_of(completion_ids.tolist()))
            return Message("assistant", text)
        return await self.off_loop(
            cost, lambda: prompt.renderer.parse(prompt.ids, completion_ids, request.tools)
        )

    async def grammar(self, request: ModelRequest, renderer: ChatRenderer) -> Grammar | None:
        """Return the grammar that the reply must match, or None; see `grammar_of`."""
        characters = 0.0 if request.output is None else len(request.output.text)
        if request.calls == "required":
            characters += self._tools_size(request)
        return await self.off_loop(characters * _MS_PER_CHARACTER, lambda: grammar_of(request, renderer))

    def reply_stream(self, prompt: Prompt, request: ModelRequest) -> ReplyStream | PlainStream:
        """Return an incremental parser for the tokens of the reply."""
        if request.raw_prompt is not None:
            return PlainStream(self._raw)
        return prompt.renderer.reply_stream(prompt.ids, request.tools)

    def answers(self, forest: Forest, request: ModelRequest) -> tuple[Turn, ...]:
        """Return the turns of `forest` that answer the prompt of a request, in the order of recording."""
        if request.raw_prompt is None:
            return forest.answers(request.messages, request.tools_id, request.tools)
        return self._raw.answers(forest, request.raw_prompt)

    async def off_loop(self, estimate_ms: float, work: Callable[[], T]) -> T:
        """Run CPU-bound work, in a thread if it is long, so that no other call waits for it.

        Very long work runs in a separate thread, one item at a time, so that shorter work never waits for it.
        """
        if estimate_ms < _INLINE_MS:
            return work()
        threads = self._threads if estimate_ms < _LONG_MS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def cached_renderer(self, request: ModelRequest) -> ChatRenderer:
        """Return the renderer with a request's template options if it exists, else the default one."""
        return self._with_options.get(_options_key(request)) or self.renderer

    async def _renderer_of(self, request: ModelRequest) -> ChatRenderer:
        """Return the renderer with a request's template options.

        Raise RequestError 400 if the template does not have these options.
        """
        if not request.template_options:
            return self.renderer
        key = _options_key(request)
        if (known := self._with_options.get(key)) is not None:
            return known
        try:
            made = await self.off_loop(
                _LONG_MS / 2, lambda: self.renderer.with_options(request.template_options)
            )
        except ConfigError as error:
            raise RequestError(str(error), code="invalid_value", param="chat_template_kwargs") from None
        return self._with_options.put(key, made)

    def _tools_size(self, request: ModelRequest) -> float:
        """Return the approximate size of a request's tools in characters, infinity if they are very large."""
        if not request.tools:
            return 0
        known = self._tools_sizes.get(request.tools_id)
        return self._tools_sizes.put(request.tools_id, _size(request.tools)) if known is None else known

    def _rendering_ms(self, messages: Sequence[Message], request: ModelRequest) -> float:
        """Return the approximate time to render a whole conversation, in milliseconds."""
        return (_characters(messages) + self._tools_size(request)) * _MS_PER_CHARACTER

    async def _chat(self, forest: Forest, request: ModelRequest, most_tokens: int) -> Prompt:
        renderer = await self._renderer_of(request)
        # No await may come between these lines: the forest must not grow before it is searched.
        recorded_before = len(forest)
        messages, as_first_seen = forest.as_first_seen(request.messages, request.tools_id, request.tools)
        request = replace(request, messages=messages) if as_first_seen else request
        where = forest.continuation(request.messages, request.tools_id, request.tools)
        if where.parent is None and where.fork is not None and where.fork.turn is not None:
            where = await self._continuation_by_rendering(forest, request, renderer, where)
        if where.parent is not None:
            extended = await self._extended(
                forest, request, renderer, where, where.parent, recorded_before, most_tokens
            )
            if extended is not None:
                return replace(extended, volatile_as_first_seen=as_first_seen) if as_first_seen else extended
            where = _why_not_extended(forest, request, where.parent, where.new_messages)
        ids, as_text = await self.off_loop(
            self._rendering_ms(request.messages, request),
            lambda: (
                renderer.render(request.messages, request.tools, most_tokens=most_tokens),
                renderer.special_tokens_as_text(request.messages, request.tools),
            ),
        )
        return Prompt(where, ids, ids, renderer, recorded_before, as_text, as_first_seen)

    async def _extended(
        self,
        forest: Forest,
        request: ModelRequest,
        renderer: ChatRenderer,
        where: Continuation,
        parent: Turn,
        recorded_before: int,
        most_tokens: int,
    ) -> Prompt | None:
        context = forest.context(parent.id)
        split, room = len(context) - len(parent.completion), max(most_tokens - len(context), 0)
        cost = _characters(where.new_messages) * _MS_PER_CHARACTER
        try:
            new_ids, as_text = await self.off_loop(
                cost + self._tools_size(request) * _MS_PER_BRIDGED_TOOLS_CHARACTER,
                lambda: (
                    renderer.bridge(
                        context[:split],
                        context[split:],
                        where.new_messages,
                        request.tools,
                        most_tokens=room,
                    ),
                    renderer.special_tokens_as_text(where.new_messages),
                ),
            )
        except PromptTooLong as error:
            raise PromptTooLong(len(context) + error.at_least) from None
        if new_ids is None:
            return None
        ids = np.concatenate([context, new_ids])
        return Prompt(where, ids, new_ids, renderer, recorded_before, as_text)

    async def _continuation_by_rendering(
        self, forest: Forest, request: ModelRequest, renderer: ChatRenderer, where: Continuation
    ) -> Continuation:
        """Continue from a turn whose history renders exactly like the beginning of this conversation.

        The messages then differ only in parts that the model does not see. The recorded ids are those of a
        plain server's prompt, except for the tokenisation of the sampled text.
        """
        messages = request.messages
        for turn, length in _replayed_at_most(forest, request)[:_MOST_CANDIDATES]:
            recorded = (*forest.history(turn.id), turn.reply)
            cost = 2 * self._rendering_ms(recorded, request)
            same = functools.partial(_renders_alike, renderer, recorded, messages[:length], request.tools)
            if await self.off_loop(cost, same):
                return Continuation(turn, tuple(messages[length:]), None)
        return where

    async def _raw_prompt(self, forest: Forest, raw: str | tuple[int, ...], most_tokens: int) -> Prompt:
        recorded_before = len(forest)
        best = self._raw.parent(forest, raw)
        rest = raw if best is None else raw[best[1] :]
        rate = _MS_PER_CHARACTER if isinstance(rest, str) else _MS_PER_SAMPLED_TOKEN
        context = None if best is None else forest.context(best[0].id)
        known = 0 if context is None else len(context)
        try:
            new_ids, message = await self.off_loop(
                len(rest) * rate, lambda: self._raw.encode(rest, most_tokens=max(most_tokens - known, 0))
            )
        except PromptTooLong as error:
            raise PromptTooLong(known + error.at_least) from None
        if best is not None and context is not None:
            ids = np.concatenate([context, new_ids])
            where = Continuation(best[0], (message,), None)
            return Prompt(where, ids, new_ids, self.renderer, recorded_before)
        fork = Fork(None, "new conversation", 0) if recorded_before else None
        return Prompt(Continuation(None, (message,), fork), new_ids, new_ids, self.renderer, recorded_before)


def _replayed_at_most(forest: Forest, request: ModelRequest) -> list[tuple[Turn, int]]:
    """Return (turn, number of its messages) for the turns that a conversation may replay.

    They are found by the number and the roles of messages. The longest come first, and of equally long ones
    the latest.
    """
    messages = request.messages
    lengths: dict[str, int] = {}
    found = []
    for turn in forest.turns:  # a parent comes before its children
        before = (0 if turn.parent is None else lengths[turn.parent]) + len(turn.new_messages)
        lengths[turn.id] = before + 1
        fits = before + 1 < len(messages) and messages[before].role == "assistant"
        if fits and turn.tools_id == request.tools_id:
            found.append((turn, before + 1))
    return sorted(reversed(found), key=lambda item: -item[1])


def _options_key(request: ModelRequest) -> bytes:
    try:
        return orjson.dumps(dict(request.template_options), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"chat_template_kwargs: {error}", param="chat_template_kwargs") from None


def _renders_alike(
    renderer: ChatRenderer,
    recorded: Sequence[Message],
    replayed: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> bool:
    try:
        shown = renderer.render(recorded, tools, generation_prompt=False)
        return np.array_equal(shown, renderer.render(replayed, tools, generation_prompt=False))
    except RenderingError:  # the template cannot render one of them
        return False


def _check_vocabulary(ids: TokenIds, vocab_size: int) -> None:
    """Raise RequestError 400 for an id outside the vocabulary, which would kill an SGLang server."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        outside = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise RequestError(
            f"the prompt has token id {outside}, outside the model's vocabulary of {vocab_size} tokens",
            code="token_out_of_vocabulary",
        )


def _size(tools: Sequence[dict[str, Any]]) -> float:
    """Return the approximate size of tools in characters, infinity above _COUNTED_CHARACTERS."""
    size, remaining = 0, list[Any](tools)
    while remaining:
        item = remaining.pop()
        size += 4 + (len(item) if isinstance(item, str) else 0)
        if size > _COUNTED_CHARACTERS:
            return float("inf")
        if isinstance(item, dict):
            size += sum(map(len, item))
            remaining += item.values()
        elif isinstance(item, list):
            remaining += item
    return size


def _characters(messages: Sequence[Message]) -> int:
    return sum(
        len(m.content) + len(m.reasoning) + sum(len(c.arguments) for c in m.tool_calls) for m in messages
    )


def _why_not_extended(
    forest: Forest, request: ModelRequest, parent: Turn, new_messages: Sequence[Message]
) -> Continuation:
    if any(message.role == "assistant" for message in new_messages):
        return forest.rewritten(parent, request.messages, new_messages, request.tools_id)
    # At a new user message, templates drop earlier reasoning and so change the earlier prompt.
    at_a_question = any(message.role == "user" for message in new_messages)
    reason: ForkReason = "template strips reasoning" if at_a_question else "template cannot extend"
    return forest.fork(parent, request.messages, new_messages, reason)
