"""Estimates the tokens of calls for which an endpoint reports no usage.

The counts are estimates, and are marked as such: the tokenizer is that of the configuration's model, which
need not be the endpoint's, and the endpoint's chat template is not known.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.rendering import Tokenizer

logger = logging.getLogger(__name__)

# The fields of a message, and of what is in it, whose texts the model reads or writes.
_TEXT_FIELDS = frozenset(
    ("content", "reasoning_content", "refusal", "text", "tool_calls", "function", "name", "arguments")
)


class TokenEstimates:
    """Estimates the tokens of messages; the tokenizer is loaded when it is first needed. Thread-safe."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def completed(
        self, usage: Mapping[str, Any], messages: Sequence[Any], reply: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], bool]:
        """Return the usage of a call with estimates of missing counts, and whether any was missing.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        missing = {
            name: counted
            for name, counted in (("prompt_tokens", messages), ("completion_tokens", [reply]))
            if not usage.get(name) and any(_texts(counted))
        }
        if not missing:
            return usage, False
        tokenizer = self._opened()
        counts = {
            name: sum(len(tokenizer.encode(text)) for text in _texts(counted))
            for name, counted in missing.items()
        }
        return {**usage, **counts}, True

    def _opened(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_folder(self._model)
                logger.warning(
                    "the endpoint reports no usage: tokens, also those of rollout.limits.max_tokens, are "
                    "estimated with the tokenizer of %s",
                    self._model,
                )
            return self._tokenizer


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in messages, including those of tool calls, without roles and types."""
    if isinstance(value, str):
        if value:
            yield value.encode("utf-8", "replace").decode()  # a tokenizer accepts no lone surrogates
    elif isinstance(value, Mapping):
        for name, field in value.items():
            if name in _TEXT_FIELDS:
                yield from _texts(field)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
