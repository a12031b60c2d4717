"""The interface of a chat format, as `ChatRenderer` uses it: that of the `renderers` library's families.

The generic format for unknown templates has the same interface, so that everything built on it (exact
suffixes, parsing, streaming) is written once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from areal_agents.errors import ConfigError
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    import renderers

TEMPLATE = "template"  # the family of a model folder that is rendered by its own chat template
_MAX_CACHED = 40  # characters; longer strings are not cached


class ChatFormat(Protocol):
    """One model's chat format, in token ids. Messages are OpenAI chat messages, with `reasoning_content`."""

    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The whole conversation as ids."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Prompt + completion + what the new messages add, as ids or as an object with `token_ids`.

        None if earlier tokens would have to change.
        """

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> renderers.ParsedResponse:
        """The content, reasoning and tool calls of a completion."""

    def get_stop_token_ids(self) -> list[int]:
        """The tokens that end the model's turn."""


class ScaffoldTokenizer:
    """A tokenizer that caches the ids of short strings: a template writes the same few at every message.

    With `marked`, the strings contain marked content (see `SpecialText`).
    """

    def __init__(self, tokenizer: Tokenizer, *, marked: bool = False) -> None:
        self._tokenizer = tokenizer
        self._encode_text = tokenizer.encode_rendered if marked else tokenizer.encode
        self._encode = lru_cache(maxsize=256)(self._encode_once)
        self.name_or_path = tokenizer.name_or_path
        self.eos_token_id = tokenizer.eos_token_id
        self.pad_token_id = tokenizer.pad_token_id
        self.unk_token_id = tokenizer.unk_token_id
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids that the tokenizer gives `text`; the caller owns the list."""
        if add_special_tokens:
            return self._tokenizer.encode(text, add_special_tokens=True)
        return self._encode_text(text) if len(text) > _MAX_CACHED else list(self._encode(text))

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode_text(text))


def library_format(tokenizer: Tokenizer, config: Any, *, marked: bool = False) -> ChatFormat:
    """Create the `renderers` library's format for `config`; `marked` is as for `ScaffoldTokenizer`.

    Raises:
        ConfigError: the tokenizer lacks a special token that the family needs.
    """
    import renderers

    try:
        return renderers.create_renderer(ScaffoldTokenizer(tokenizer, marked=marked), config)
    except Exception as error:  # each family asserts its own special tokens
        raise ConfigError(
            f"the tokenizer in {tokenizer.name_or_path} does not fit family {config.name}: {error}"
        ) from error
