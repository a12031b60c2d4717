"""From a request to the exact prompt: recorded ids plus the new messages, or a full rendering with a reason.

Nothing that was sampled is ever tokenised again as long as its conversation is recognised: by its messages
first, and by what the template makes of them second.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Continuation, Fork, ForkReason, Turn
from areal_agents.errors import ConfigError, RenderingError, RequestError
from areal_agents.proxy.request import RAW_TOOLS_ID, ModelRequest
from areal_agents.rendering import ChatRenderer, Delta, ReplyStream

T = TypeVar("T")
Contexts = Callable[[Turn], TokenIds]

# Costs of rendering and parsing, roughly, to decide what leaves the event loop.
_MS_PER_CHARACTER, _MS_PER_SAMPLED_TOKEN = 5e-4, 5e-4
_INLINE_MS = 1.0
_MOST_RENDERERS = 16
_MOST_CANDIDATES = 4  # turns that the second look renders


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a turn: `ids` [P] is all of it, `new_ids` what its parent does not have."""

    where: Continuation
    ids: TokenIds
    new_ids: TokenIds
    renderer: ChatRenderer


@dataclass(frozen=True, slots=True)
class _Known:
    """What is recorded: the turns, and [L] all tokens up to the end of each."""

    forest: Forest
    context_after: Contexts


class Prompts:
    """Finds and renders prompts, and reads replies, for one model. Shared by all episodes."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderers = {b"{}": renderer}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rendering")

    def close(self) -> None:
        """Stop the rendering threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer of requests that set no template options."""
        return self._renderers[b"{}"]

    async def prompt(
        self, forest: Forest, request: ModelRequest, vocab_size: int, context_after: Contexts | None = None
    ) -> Prompt:
        """The prompt of a request after the turns of `forest`.

        `context_after` gives all tokens up to the end of a turn, where they are at hand already.

        Raises RequestError 400 or RenderingError if it cannot be expressed, or has an unknown token id.
        """
        known = _Known(forest, context_after or (lambda turn: forest.path(turn.id).token_ids))
        if request.raw_prompt is not None:
            prompt = self._raw(known, request.raw_prompt)
        else:
            prompt = await self._chat(known, request)
        _check_vocabulary(prompt.new_ids, min(vocab_size, self.renderer.vocab_size))
        return prompt

    async def read_reply(self, prompt: Prompt, completion_ids: TokenIds, request: ModelRequest) -> Message:
        """The assistant message that a completion means. RenderingError if it cannot be read."""
        if request.raw_prompt is not None:
            return Message("assistant", self.text_of(completion_ids))
        return await self.off_loop(
            len(completion_ids) * _MS_PER_SAMPLED_TOKEN,
            lambda: prompt.renderer.parse(prompt.ids, completion_ids, request.tools),
        )

    def reply_stream(self, prompt: Prompt, request: ModelRequest) -> ReplyStream | PlainStream:
        """A reader of the reply's tokens as they come."""
        if request.raw_prompt is not None:
            return PlainStream(self)
        return prompt.renderer.reply_stream(prompt.ids, request.tools)

    def answers(self, forest: Forest, request: ModelRequest) -> tuple[Turn, ...]:
        """The turns of `forest` that answered just what a request asks, in the order of recording."""
        raw = request.raw_prompt
        if raw is None:
            return forest.answers(request.messages, request.tools_id)
        turns = tuple(turn for turn in forest.turns if turn.tools_id == RAW_TOOLS_ID)
        if isinstance(raw, str):
            return tuple(turn for turn in turns if self._raw_prompt_text(forest, turn) == raw)
        return tuple(turn for turn in turns if tuple(forest.prompt_ids(turn.id).tolist()) == raw)

    def text_of(self, completion_ids: TokenIds) -> str:
        """The text of a completion without a template: all but the token that ended it."""
        ids = completion_ids.tolist()
        return self.renderer.tokenizer.decode(ids[:-1] if self._is_stop(ids[-1:]) else ids)

    def _ends_in_stop(self, turn: Turn) -> bool:
        return self._is_stop(turn.completion.token_ids[-1:].tolist())

    def _is_stop(self, last: list[int]) -> bool:
        return bool(last) and last[0] in self.renderer.stop_token_ids

    async def off_loop(self, estimate_ms: float, work: Callable[[], T]) -> T:
        """Do CPU-bound work here if it is short, else in a thread, so that no other call waits for it."""
        if estimate_ms < _INLINE_MS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def renderer_at_hand(self, request: ModelRequest) -> ChatRenderer:
        """The renderer with a request's template options if there is one already, else the one without."""
        return self._renderers.get(_options_key(request), self.renderer)

    async def _renderer_of(self, request: ModelRequest) -> ChatRenderer:
        """The renderer with a request's template options. RequestError 400 if the template has none such."""
        if not request.template_options:
            return self.renderer
        key = _options_key(request)
        if key not in self._renderers:
            if len(self._renderers) >= _MOST_RENDERERS:
                raise RequestError(
                    f"at most {_MOST_RENDERERS} different chat_template_kwargs are served",
                    param="chat_template_kwargs",
                )
            try:
                made = await self.off_loop(
                    float("inf"), lambda: self.renderer.with_options(request.template_options)
                )
            except ConfigError as error:
                raise RequestError(str(error), code="invalid_value", param="chat_template_kwargs") from None
            self._renderers.setdefault(key, made)
        return self._renderers[key]

    async def _chat(self, known: _Known, request: ModelRequest) -> Prompt:
        renderer = await self._renderer_of(request)
        where = known.forest.continuation(request.messages, request.tools_id)
        if where.parent is None and where.fork is not None and where.fork.turn is not None:
            where = await self._second_look(known, request, renderer, where)
        if where.parent is not None:
            extended = await self._extended(known, request, renderer, where, where.parent)
            if extended is not None:
                return extended
            reason = _why_not_extended(where.new_messages)
            where = known.forest.fork(where.parent, request.messages, where.new_messages, reason)
        ids = await self.off_loop(
            _characters(request.messages) * _MS_PER_CHARACTER,
            lambda: renderer.render(request.messages, request.tools),
        )
        return Prompt(where, ids, ids, renderer)

    async def _extended(
        self, known: _Known, request: ModelRequest, renderer: ChatRenderer, where: Continuation, parent: Turn
    ) -> Prompt | None:
        context = known.context_after(parent)
        split = len(context) - len(parent.completion)
        new_ids = await self.off_loop(
            _characters(where.new_messages) * _MS_PER_CHARACTER,
            lambda: renderer.bridge(context[:split], context[split:], where.new_messages, request.tools),
        )
        if new_ids is None:
            return None
        return Prompt(where, np.concatenate([context, new_ids]), new_ids, renderer)

    async def _second_look(
        self, known: _Known, request: ModelRequest, renderer: ChatRenderer, where: Continuation
    ) -> Continuation:
        """Go on from a turn whose history the template renders just as this conversation's beginning.

        The messages differ in something that the model never sees, so its recorded ids are what a plain
        server would prompt it with, but for how the sampled text was cut into tokens.
        """
        messages, forest = request.messages, known.forest
        candidates = [
            (turn, len(history) + 1)
            for turn in reversed(forest.turns)
            if turn.tools_id == request.tools_id
            if len(history := forest.history(turn.id)) + 1 < len(messages)
            and messages[len(history)].role == "assistant"
        ]
        candidates.sort(key=lambda item: -item[1])
        for turn, length in candidates[:_MOST_CANDIDATES]:
            recorded = (*forest.history(turn.id), turn.reply)
            cost = 2 * _characters(recorded) * _MS_PER_CHARACTER
            same = functools.partial(_renders_alike, renderer, recorded, messages[:length], request.tools)
            if await self.off_loop(cost, same):
                return Continuation(turn, tuple(messages[length:]), None)
        return where

    def _raw(self, known: _Known, raw: str | tuple[int, ...]) -> Prompt:
        """A prompt without a template: it goes on from the longest recorded text or ids it begins with.

        A text does not show the token that ended a reply, so a plain server would not show it to the model
        either: such a reply is not gone on from by its text.
        """
        tokenizer, forest = self.renderer.tokenizer, known.forest
        best: tuple[int, Turn] | None = None
        for turn in forest.turns:
            if turn.tools_id != RAW_TOOLS_ID:
                continue
            before: str | tuple[int, ...]
            if isinstance(raw, str):
                if self._ends_in_stop(turn):
                    continue
                before = self._raw_text(forest.path(turn.id).turns)
            else:
                before = tuple(known.context_after(turn).tolist())
            if len(raw) > len(before) > (best[0] if best else 0) and raw[: len(before)] == before:
                best = (len(before), turn)
        rest = raw[best[0] :] if best else raw
        new_ids = as_token_ids(tokenizer.encode(rest) if isinstance(rest, str) else rest)
        new_messages = (Message("user", rest if isinstance(rest, str) else tokenizer.decode(rest)),)
        if best is not None:
            ids = np.concatenate([known.context_after(best[1]), new_ids])
            return Prompt(Continuation(best[1], new_messages, None), ids, new_ids, self.renderer)
        fork = Fork(None, "new conversation", 0) if len(forest) else None
        return Prompt(Continuation(None, new_messages, fork), new_ids, new_ids, self.renderer)

    def _raw_prompt_text(self, forest: Forest, turn: Turn) -> str:
        added = "".join(message.content for message in turn.new_messages)
        return self._raw_text(forest.path(turn.id).turns[:-1]) + added

    def _raw_text(self, turns: Sequence[Turn]) -> str:
        """The text of a path of raw turns; what a client got ends before a stop string, the tokens after."""
        return "".join(
            "".join(message.content for message in turn.new_messages)
            + (self.text_of(turn.completion.token_ids) if turn.sampling.stop else turn.reply.content)
            for turn in turns
        )


class PlainStream:
    """Reads a completion without a template as it comes; see `ReplyStream`."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._ids: list[int] = []
        self._sent = 0

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The text that the next tokens add; a character that is not whole yet is held back."""
        self._ids.extend(token_ids)
        text = self._text()
        return self._piece(text[: len(text.rstrip("\ufffd"))])

    def finish(self) -> list[Delta]:
        """The rest of the text."""
        return self._piece(self._text())

    @property
    def message(self) -> Message:
        """The whole reply."""
        return Message("assistant", self._text())

    def _text(self) -> str:
        return self._prompts.text_of(as_token_ids(self._ids))

    def _piece(self, text: str) -> list[Delta]:
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return [Delta("content", piece)] if piece else []


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
    except RenderingError:  # the template cannot show one of them, so they are not shown alike
        return False


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
