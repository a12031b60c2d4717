"""Conversations as token ids with a training mask, built as serving builds them.

The opening is rendered, each reply is encoded as the model would sample it and ends with the end-of-turn
token, and what the agent adds is bridged onto what is there. Only replies are trained.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from renderers import Qwen3RendererConfig

from areal_agents.core.completion import as_token_ids
from areal_agents.core.messages import Message
from areal_agents.rendering import ChatRenderer, Tokenizer
from warmup.tokenizer import END_OF_TEXT, TURN_END, marker_id


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids [L], and the (start, end) of each reply that is trained."""

    ids: tuple[int, ...]
    replies: tuple[tuple[int, int], ...]

    def trained(self) -> list[bool]:
        """Which of the ids are trained [L]."""
        mask = [False] * len(self.ids)
        for start, end in self.replies:
            mask[start:end] = [True] * (end - start)
        return mask


class Transcriber:
    """Turns conversations into examples with the renderer that serving uses."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        *,
        keeps_history: bool = False,
    ) -> None:
        """Args:
        keeps_history: whether a user's message may follow a reply; Qwen3's template drops reasoning there.
        """
        self._tokenizer = Tokenizer(
            tokenizer, name_or_path="warm-up", eos_token=TURN_END, pad_token=END_OF_TEXT
        )
        self._turn_end = marker_id(tokenizer, TURN_END)
        retention: dict[str, Any] = {"thinking_retention": "all"} if keeps_history else {}
        self._renderer = ChatRenderer.from_config(self._tokenizer, Qwen3RendererConfig(**retention))
        self._tools = list(tools)

    def prefix(self, *openings: Sequence[Message]) -> list[int]:
        """The ids that several openings have in common."""
        return os.path.commonprefix([self._renderer.render([*o], self._tools).tolist() for o in openings])

    def transcribe(
        self,
        opening: Sequence[Message],
        replies: Sequence[str],
        turns: Sequence[Message],
        *,
        untrained: Collection[int] = (),
    ) -> Example:
        """An episode in which each reply but the last is followed by a message of `turns`.

        Args:
            untrained: the replies, by their numbers from 0, that are shown and not imitated.
        """
        ids = self._renderer.render([*opening], self._tools)
        spans = []
        for index, reply in enumerate(replies):
            completion = as_token_ids([*self._tokenizer.encode(reply), self._turn_end])
            if index not in untrained:
                spans.append((len(ids), len(ids) + len(completion)))
            added = as_token_ids([])
            if index < len(replies) - 1:
                bridged = self._renderer.bridge(ids, completion, [turns[index]], self._tools)
                assert bridged is not None, "tool results and kept user turns always extend"
                added = bridged
            ids = np.concatenate([ids, completion, added])
        return Example(tuple(ids.tolist()), tuple(spans))


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """How a model writes a call of a tool, in Qwen3's form."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def as_messages(plain: Sequence[Mapping[str, str]]) -> list[Message]:
    """Messages of chat completions as those of the renderer."""
    return [Message.from_dict(message) for message in plain]
