"""Counts the tokens of calls for which an endpoint reports no usage.

The tokenizer is that of the configuration's model, which need not be the endpoint's, and the chat format of
the endpoint is not known; so the counts are estimates, and are marked as such.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.rendering import Tokenizer

logger = logging.getLogger(__name__)


class TokenEstimates:
    """Estimates the tokens of messages; the tokenizer is read at the first use. Thread-safe."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def completed(
        self, usage: Mapping[str, Any], messages: Sequence[Any], reply: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], bool]:
        """Return the usage of a call with estimates for what is missing, and whether any is.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        missing = {
            name: told
            for name, told in (("prompt_tokens", messages), ("completion_tokens", [reply]))
            if not usage.get(name) and any(_texts(told))
        }
        if not missing:
            return usage, False
        tokenizer = self._opened()
        counts = {
            name: sum(len(tokenizer.encode(text)) for text in _texts(told)) for name, told in missing.items()
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


def _texts(told: Any) -> Iterator[str]:
    """Yield the texts of messages, without their roles and types; those of tool calls too."""
    if isinstance(told, str):
        if told:
            yield told.encode("utf-8", "replace").decode()  # a lone surrogate is no text of a tokenizer
    elif isinstance(told, Mapping):
        for name, value in told.items():
            if name in _TOLD:
                yield from _texts(value)
    elif isinstance(told, list):
        for part in told:
            yield from _texts(part)


_TOLD = frozenset(
    ("content", "reasoning_content", "refusal", "text", "tool_calls", "function", "name", "arguments")
)
