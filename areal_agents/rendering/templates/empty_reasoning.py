"""The empty block of reasoning that a family writes for a reply without any, and a model may never sample.

A family serves models that think and models that do not; the chat template in the model's folder says which
this is. Only that template decides: the block counts as sampled if it writes one in its last message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_agents.core.completion import TokenIds
from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering.templates.template import ChatTemplate, template_sources
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
_QUESTION = {"role": "user", "content": "Where?"}
_REPLY = {"role": "assistant", "content": "Here."}
# Some templates refuse a conversation without a system prompt.
_HEADS: tuple[list[dict[str, Any]], ...] = ([], [{"role": "system", "content": "Answer."}])


class EmptyReasoning:
    """Removes the empty block of reasoning from the beginning of a reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._close = tokenizer.added_token_id(_CLOSE)

    @classmethod
    def unless_written(
        cls, folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any]
    ) -> EmptyReasoning | None:
        """Return what removes the block; None if the template of this folder writes it, or there is none.

        A template that is unusable, or refuses a question and its answer, does not decide: the family does.
        """
        sources = template_sources(folder)
        if not sources:
            return None
        if not any(_CLOSE in source for source in sources.values()):
            return cls(tokenizer)
        try:
            template = ChatTemplate(sources, special_tokens=tokenizer.special_tokens, options={})
            known = {name: value for name, value in options.items() if name in template.option_names}
            template = ChatTemplate(sources, special_tokens=tokenizer.special_tokens, options=known)
        except ConfigError:
            return None
        for head in _HEADS:
            try:
                written = template.render([*head, _QUESTION, _REPLY], add_generation_prompt=False)
            except RenderingError:
                continue
            return None if _CLOSE in written else cls(tokenizer)
        return None

    def removed(self, ids: TokenIds) -> TokenIds:
        """[C] the ids of a reply without the block; the same ids if they do not begin with one."""
        found = [] if self._close is None else (ids == self._close).nonzero()[0].tolist()
        if not found:
            return ids
        start = found[0] + 1
        if "".join(self._text(ids[:start]).split()) != _OPEN + _CLOSE:
            return ids
        while start < len(ids) and self._text(ids[start : start + 1]).isspace():
            start += 1
        return ids[start:]

    def _text(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(ids.tolist())
