"""Renders a conversation as the exact prompt of a model, and parses a completion into a message.

Training relies on one invariant: the ids that `bridge` returns, appended to the previous prompt and
completion, form a prompt in which every earlier token is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from areal_agents.core.completion import Grammar, TokenIds, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.errors import ConfigError, PromptTooLong, RenderingError
from areal_agents.rendering.forcing import Forcing
from areal_agents.rendering.formats import TEMPLATE, ChatFormat
from areal_agents.rendering.replies import ReplyReader
from areal_agents.rendering.special_text import SpecialText, strings_in
from areal_agents.rendering.streaming import ReplyStream
from areal_agents.rendering.templates.empty_reasoning import EmptyReasoning
from areal_agents.rendering.templates.tails import reads_last_turn, tail_start
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

# Nearly all calls of an agent have the same tools, so the marked tools are cached.
_CACHED_TOOL_LISTS = 16
_MAX_CACHED_TOOLS_BYTES = 65_536  # larger lists are marked at every call
SpecialTokensInContent = Literal["text", "parse"]


class ChatRenderer:
    """One model's chat format. Stateless after construction, so threads may share it.

    Rendering is CPU-bound. The cost of a bridge or a parse grows with the new text and the last reply, not
    with the history; that of a full render grows with the whole conversation. An event loop should run long
    ones in a thread.

    Attributes:
        tokenizer: the tokenizer of the model folder.
        family: the name of the chat format.
        stop_token_ids: the tokens that end the model's turn.
        vocab_size: all token ids are below it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        family: str,
        special_text: SpecialText | None = None,
    ) -> None:
        """Wrap an existing format; `from_folder` and `from_config` also create the format.

        With `special_text`, special tokens in content stay text; the format must have been created with
        `marked=True`.
        """
        self.tokenizer = tokenizer
        self.family = family
        self.stop_token_ids: tuple[int, ...] = tuple(chat_format.get_stop_token_ids())
        self.vocab_size = tokenizer.vocab_size
        self._format = chat_format
        self._reads_last_turn = reads_last_turn(chat_format, family)
        self._special_text = special_text
        self._reader = ReplyReader(tokenizer, chat_format, family=family)
        self._forcing = Forcing(self._reader)
        self._marked_tools = functools.lru_cache(_CACHED_TOOL_LISTS)(self._mark_tools)
        self._source: tuple[Path, str, dict[str, Any]] | None = None

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        family: str = "auto",
        options: Mapping[str, Any] | None = None,
        special_tokens_in_content: SpecialTokensInContent = "text",
    ) -> ChatRenderer:
        """Create the renderer of a model folder.

        Args:
            path: a folder with config.json and tokenizer.json.
            family: "auto" (by config.json's model_type), or a family's name.
            options: the family's template options, for example `{"enable_thinking": False}`.
            special_tokens_in_content: how a special token that messages or tools spell out is encoded: "text"
                encodes its characters; "parse" encodes the special token itself, as plain servers do.

        Raises:
            ConfigError: the folder is not a model folder, the family is unknown, it does not have an option,
                or the tokenizer cannot encode its special tokens as text.
        """
        from areal_agents.rendering.families import renderer_config

        # The config is read first, because it gives the clearer error for a folder without a model.
        config = renderer_config(path, family=family, options=options or {})
        tokenizer = Tokenizer.from_folder(path)
        return cls._made(tokenizer, config, Path(path), family, options or {}, special_tokens_in_content)

    @classmethod
    def from_config(
        cls, tokenizer: Tokenizer, config: Any, *, special_tokens_in_content: SpecialTokensInContent = "text"
    ) -> ChatRenderer:
        """Create the renderer of a config; see `families.make_format`. ConfigError as for `from_folder`."""
        from areal_agents.rendering.families import make_format

        special_text = None
        if special_tokens_in_content == "text":
            special_text = SpecialText(tokenizer.token_text(i) for i in tokenizer.special_token_ids)
            tokenizer.check_marks()
        made = make_format(tokenizer, config, marked=special_text is not None)
        return cls(tokenizer, made, family=config.name, special_text=special_text)

    @classmethod
    def _made(
        cls,
        tokenizer: Tokenizer,
        config: Any,
        path: Path,
        family: str,
        options: Mapping[str, Any],
        special_tokens_in_content: SpecialTokensInContent,
    ) -> ChatRenderer:
        renderer = cls.from_config(tokenizer, config, special_tokens_in_content=special_tokens_in_content)
        renderer._source = (path, family, dict(options))
        return renderer

    def with_options(self, options: Mapping[str, Any]) -> ChatRenderer:
        """A renderer with these template options added to this one's. The two share the tokenizer.

        Raises:
            ConfigError: the family does not have an option, or `from_folder` did not create this renderer.
        """
        from areal_agents.rendering.families import renderer_config

        if self._source is None:
            raise ConfigError(
                "template options can be changed only for a renderer of a model folder; use from_folder"
            )
        path, family, given = self._source
        merged = {**given, **options}
        config = renderer_config(path, family=family, options=merged)
        content: SpecialTokensInContent = "parse" if self._special_text is None else "text"
        return self._made(self.tokenizer, config, path, family, merged, content)

    def describe(self) -> str:
        """A line for the log: the chat format and, for a model's own template, what it can extend."""
        describe = getattr(self._format, "describe", None)
        return f"{self.family} of the renderers library" if describe is None else describe()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> TokenIds:
        """[P] the whole prompt, up to where the model's reply begins.

        Args:
            messages: at least one message.
            tools: OpenAI chat function tools.
            generation_prompt: whether to add the header of the reply; False ends after the last message.
            most_tokens: a limit; a longer prompt may be refused before it is encoded.

        Raises:
            PromptTooLong: the prompt is longer than `most_tokens`. Short prompts are never refused.
            RenderingError: there is no message, or the family cannot express the conversation.
        """
        if not messages:
            raise RenderingError("a conversation must have at least one message, got none")
        try:
            plain, specs = self._content(messages, tools)
            with self._limited(most_tokens):
                ids = self._format.render_ids(plain, tools=specs, add_generation_prompt=generation_prompt)
        except PromptTooLong:
            raise
        except Exception as error:  # a template can raise anything on input that it does not support
            raise RenderingError(f"family {self.family} cannot express this conversation: {error}") from error
        return as_token_ids(ids)

    def bridge(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        most_tokens: int | None = None,
    ) -> TokenIds | None:
        """[N] the ids to append to prompt + completion for the next turn; earlier tokens are unchanged.

        If the completion was cut off, the ids begin with the end of its turn, which counts as prompt.
        None if this template cannot extend the conversation: it would strip or rewrite earlier tokens
        (reasoning before a new user turn), or the completion continues after the end of its turn.

        Args:
            most_tokens: a limit on the new tokens; more may be refused with PromptTooLong, as by `render`.
        """
        prompt = self._tail(prompt_ids)
        completion = np.asarray(completion_ids).tolist()
        try:
            plain, specs = self._content(new_messages, tools)
            with self._limited(most_tokens):
                rendered = self._format.bridge_to_next_turn(prompt, completion, plain, tools=specs)
        except PromptTooLong:
            raise
        except Exception as error:  # a template can raise anything on input that it does not support
            raise RenderingError(f"family {self.family} cannot extend this conversation: {error}") from error
        if rendered is None:
            return None
        ids = rendered.token_ids if hasattr(rendered, "token_ids") else list(rendered)
        before = [*prompt, *completion]
        # The library silently drops tokens sampled after the end of the turn.
        if len(ids) <= len(before) or ids[: len(before)] != before:
            return None
        return as_token_ids(ids[len(before) :])

    def reply_ids(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[dict[str, Any]] = ()
    ) -> TokenIds:
        """[C] the ids that a model would sample to give this reply, through the token that ends its turn.

        They are what the template writes after the prompt of `messages`, so reading them gives `reply` again.
        A family may write an empty block of reasoning for a reply without any. A model samples that block
        only if its own template writes it in its last message; otherwise the ids do not have it.

        Raises:
            RenderingError: the template cannot express the reply, or writes it differently from what a model
                can sample after the prompt: it drops a part, or ends it with no token that ends a turn.
        """
        foreign_block = None if reply.reasoning else self._foreign_block
        if foreign_block is not None:  # white space of the content must not join that of the block
            reply = replace(reply, content=reply.content.lstrip())
        prompt = self.render(messages, tools)
        whole = self.render([*messages, reply], tools, generation_prompt=False)
        if len(whole) <= len(prompt) or not np.array_equal(whole[: len(prompt)], prompt):
            raise RenderingError(
                f"family {self.family} does not write this reply after the prompt that asks for it; a prompt "
                "that begins the reasoning needs a reply with reasoning, or a template option such as "
                "enable_thinking: false"
            )
        ids = whole[len(prompt) :]
        ends = np.flatnonzero(np.isin(ids, self.stop_token_ids))
        ids = np.append(ids, self._following_stop(reply, tools)) if not len(ends) else ids[: ends[0] + 1]
        if foreign_block is not None:
            ids = foreign_block.removed(ids)
        read = self.parse(prompt, ids, tools)
        if read.digest != reply.digest or read.reasoning.strip() != reply.reasoning.strip():
            raise RenderingError(
                f"family {self.family} cannot express this reply: written and read again, "
                f"{_difference(reply, read)}"
            )
        return as_token_ids(ids)

    @functools.cached_property
    def _foreign_block(self) -> EmptyReasoning | None:
        """Removes an empty block of reasoning that only the family writes, and not the model's template."""
        if self._source is None or self.family == TEMPLATE:
            return None
        path, _, options = self._source
        return EmptyReasoning.unless_written(path, self.tokenizer, options)

    def _following_stop(self, reply: Message, tools: Sequence[dict[str, Any]]) -> int:
        """The token with which a model ends a reply in a format that ends it with the next message's header.

        RenderingError if the next message does not begin with a token that ends a turn.
        """
        following = [Message("user", "next")]
        if reply.tool_calls:
            following = [Message("tool", "next", tool_call_id=call.id) for call in reply.tool_calls]
        short = [Message("user", "first"), Message("assistant", "second", tool_calls=reply.tool_calls)]
        end = len(self.render(short, tools, generation_prompt=False))
        longer = self.render([*short, *following], tools, generation_prompt=False)
        if len(longer) <= end or longer[end] not in self.stop_token_ids:
            raise RenderingError(f"family {self.family} writes no token that ends the turn after a reply")
        return int(longer[end])

    def parse(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[dict[str, Any]] = ()
    ) -> Message:
        """Parse a completion into the assistant message.

        Whitespace around reasoning and content is removed. Each tool call gets a new id. A malformed call
        (invalid JSON, no name, arguments that are not an object, unclosed) stays in the content as sampled,
        so that the agent and the reward function see it.
        """
        ids = np.asarray(completion_ids).tolist()
        return self._reader.read(self._tail(prompt_ids), ids, tools).message()

    def reply_stream(self, prompt_ids: TokenIds, tools: Sequence[dict[str, Any]] = ()) -> ReplyStream:
        """A stream that reads the reply to this prompt token by token, as they are sampled."""
        return ReplyStream(self._reader, self._tail(prompt_ids), tools)

    def reply_grammar(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        calls: Literal["auto", "none", "required"] = "auto",
        callable_tools: Sequence[str] = (),
        parallel: bool = True,
        output: Grammar | None = None,
    ) -> Grammar | None:
        """The grammar that a reply must match after any reasoning that the template allows.

        None if the reply is unconstrained.

        Args:
            tools: OpenAI chat function tools.
            calls: "required" allows only tool calls, and `output` is ignored; "auto" allows `output`, or
                tool calls if there are tools; "none" allows only `output`.
            callable_tools: with "required", the names of the tools that may be called; () allows all of them.
            parallel: whether several calls are allowed; False allows exactly one.
            output: the JSON schema that the content must match, or None.

        Raises:
            RenderingError: this family's calls cannot be forced, its content cannot be JSON, or a keyword of
                the schema cannot be enforced.
            ValueError: a call is required but there are no tools, or not those that may be called.
        """
        return self._forcing.grammar(
            tools, calls=calls, callable_tools=callable_tools, parallel=parallel, output=output
        )

    def special_tokens_as_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> int:
        """The number of special tokens in messages and tools that are rendered as plain text."""
        found = self._special_text
        if found is None:
            return 0
        count = sum(found.count(text) for tool in tools for text in strings_in(tool))
        for message in messages:
            count += found.count(message.content) + found.count(message.reasoning)
            for call in message.tool_calls:
                count += found.count(call.name) + found.count_json(call.arguments)
        return count

    def _content(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as a `ChatFormat` takes them. RenderingError for a lone surrogate."""
        if self._special_text is None:
            return [message.to_chat() for message in messages], list(tools) or None
        plain = [_marked(message.to_chat(), self._special_text) for message in messages]
        if not tools:
            return plain, None
        written = orjson.dumps([*tools])
        mark = self._marked_tools if len(written) <= _MAX_CACHED_TOOLS_BYTES else self._mark_tools
        return plain, mark(written)

    def _mark_tools(self, tools: bytes) -> list[dict[str, Any]]:
        """The marked tools of a JSON array."""
        assert self._special_text is not None
        return self._special_text.mark_value(orjson.loads(tools))

    def _limited(self, most_tokens: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if most_tokens is None else self.tokenizer.limited(most_tokens)

    def _tail(self, prompt_ids: TokenIds) -> list[int]:
        """The end of the prompt: as much of it as this format reads."""
        prompt = np.asarray(prompt_ids)
        start = tail_start(prompt, self.stop_token_ids) if self._reads_last_turn else 0
        return prompt[start:].tolist()


def _difference(written: Message, read: Message) -> str:
    """Say in which part a message that was read differs from the one that was written."""
    if written.reasoning.strip() != read.reasoning.strip():
        return f"its reasoning is {_cut(read.reasoning)} instead of {_cut(written.reasoning)}"
    if written.content.strip() != read.content.strip():
        return f"its content is {_cut(read.content)} instead of {_cut(written.content)}"
    calls = [[(call.name, _cut(call.arguments)) for call in m.tool_calls] for m in (read, written)]
    return f"its tool calls are {calls[0]} instead of {calls[1]}"


def _cut(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}…")


def _marked(message: dict[str, Any], special_text: SpecialText) -> dict[str, Any]:
    """Mark all strings of a message except the role, which has only a few allowed values."""
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        if key in message:
            message[key] = special_text.mark(message[key])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        call["id"] = special_text.mark(call["id"])
        function["name"] = special_text.mark(function["name"])
        function["arguments"] = special_text.mark_json(function["arguments"])
    return message
