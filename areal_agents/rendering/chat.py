"""A conversation as the exact prompt of a model, and a completion as a message.

The one promise that training rests on: what `bridge` returns, appended to the previous prompt and
completion, is a prompt in which every earlier token stands unchanged.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import renderers

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering.arguments import arguments_text
from areal_agents.rendering.families import renderer_config
from areal_agents.rendering.tokenizer import Tokenizer


class ChatRenderer:
    """One model's chat format. Stateless after construction, so threads may share it.

    Rendering is CPU-bound: about 0.1 ms per 50 tokens of new text, and as much again per thousand
    tokens of history; an event loop hands long ones to a thread.

    Attributes:
        tokenizer: of the model folder.
        stop_token_ids: the tokens that end the model's turn.
        vocab_size: ids at or above it do not exist.
    """

    def __init__(self, tokenizer: Tokenizer, config: Any) -> None:
        """Wrap the family that `config` (of the `renderers` library) names. ConfigError if it cannot."""
        try:
            self._renderer = renderers.create_renderer(tokenizer, config)
        except Exception as error:  # each family asserts its own special tokens
            raise ConfigError(
                f"the tokenizer in {tokenizer.name_or_path} does not fit family {config.name}: {error}"
            ) from error
        self.tokenizer = tokenizer
        self.family: str = config.name
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.vocab_size = tokenizer.vocab_size

    @classmethod
    def from_folder(
        cls, path: str | Path, *, family: str = "auto", options: Mapping[str, Any] | None = None
    ) -> ChatRenderer:
        """The renderer of a model folder.

        Args:
            path: a folder with config.json and tokenizer.json.
            family: "auto" (by config.json's model_type), or a family's name.
            options: the family's template options, for example `{"enable_thinking": False}`.

        Raises:
            ConfigError: no such folder, unknown family, or an option that the family does not have.
        """
        config = renderer_config(path, family=family, options=options or {})
        return cls(Tokenizer.from_folder(path), config)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> TokenIds:
        """[P] the whole prompt, up to where the model's reply begins. RenderingError if impossible."""
        if not messages:
            raise RenderingError("a conversation needs at least one message")
        plain = [_to_library(message) for message in messages]
        try:
            ids = self._renderer.render_ids(plain, tools=list(tools) or None, add_generation_prompt=True)
        except Exception as error:  # a template may fail in any way on what it does not know
            raise RenderingError(f"family {self.family} cannot express this conversation: {error}") from error
        return as_token_ids(ids)

    def bridge(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> TokenIds | None:
        """[N] the ids to append to prompt + completion for the next turn, earlier tokens untouched.

        A completion that was cut off gets the end of its turn here, as prompt, not as sampled.
        None where this template cannot extend: it would strip or rewrite earlier tokens (reasoning
        before a new user turn), or the completion goes on after the end of its turn.
        """
        before = [*np.asarray(prompt_ids).tolist(), *np.asarray(completion_ids).tolist()]
        plain = [_to_library(message) for message in new_messages]
        try:
            rendered = self._renderer.bridge_to_next_turn(
                before[: len(prompt_ids)], before[len(prompt_ids) :], plain, tools=list(tools) or None
            )
        except Exception as error:  # a template may fail in any way on what it does not know
            raise RenderingError(f"family {self.family} cannot extend this conversation: {error}") from error
        if rendered is None:
            return None
        ids = rendered.token_ids if hasattr(rendered, "token_ids") else list(rendered)
        # The library drops, without a word, tokens sampled after the end of the turn.
        if len(ids) <= len(before) or ids[: len(before)] != before:
            return None
        return as_token_ids(ids[len(before) :])

    def parse(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[dict[str, Any]] = ()
    ) -> Message:
        """The assistant message that a completion means.

        Tool calls get ids minted here. A call that is malformed (no JSON, no name, arguments that
        are no object, unclosed) stays in the content as sampled, so that agent and reward see it.
        """
        ids = np.asarray(completion_ids).tolist()
        try:
            parsed = self._renderer.parse_response(
                ids, tools=list(tools) or None, prompt_ids=np.asarray(prompt_ids).tolist()
            )
        except RecursionError:  # brackets nested beyond any real call: text, as sampled
            text = self.tokenizer.decode([token for token in ids if token not in self.stop_token_ids])
            return Message("assistant", text)
        except Exception as error:  # no completion may kill an episode unexplained
            raise RenderingError(f"family {self.family} cannot read this completion: {error}") from error
        calls = [call for call in parsed.tool_calls if _is_usable(call)]
        broken = [self._sampled_text(ids, call) for call in parsed.tool_calls if not _is_usable(call)]
        return Message(
            role="assistant",
            content="\n".join(text for text in (parsed.content, *broken) if text),
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(
                ToolCall(_mint_id(), call.name, arguments_text(call.raw, call.arguments)) for call in calls
            ),
        )

    def _sampled_text(self, ids: list[int], call: Any) -> str:
        """A call's block with its delimiters where the library knows its span, else its inside."""
        if call.token_span is None:
            return call.raw
        start, end = call.token_span
        return self.tokenizer.decode(ids[start:end])


def _is_usable(call: Any) -> bool:
    ok = call.status == renderers.ToolCallParseStatus.OK
    return ok and isinstance(call.name, str) and isinstance(call.arguments, dict)


def _mint_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _to_library(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out
