"""Finds the end of a prompt that a chat format reads in order to extend the prompt or parse the reply to it.

A format reads back to the end of the turn before the reply, to see whether the prompt itself opened reasoning
and where the assistant's header is. Earlier tokens change neither the suffix nor the parsed reply, so they
are not passed to the format, and a long history costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# These families read the prompt only back to the last token that ends a turn. Any other family gets the whole
# prompt.
_BACK_TO_STOP = frozenset(
    {
        "deepseek-r1",
        "deepseek-v3",
        "deepseek-v4",
        "glm-4.5",
        "glm-5",
        "glm-5.1",
        "glm-5.3",
        "hy3",
        "kimi-k2",
        "llama-3",
        "minimax-m2",
        "nemotron-3",
        "prime-qwen3",
        "qwen3",
        "qwen3-vl",
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
    }
)
_NEAR, _WINDOW = 32, 4096  # tokens searched in the first step, and in each later step


def reads_last_turn(chat_format: Any, family: str) -> bool:
    """Whether a format reads no further back in a prompt than to the last token that ends a turn."""
    if family not in _BACK_TO_STOP and not getattr(chat_format, "reads_only_last_turn", False):
        return False
    # With this option a format counts the images of the whole conversation.
    return not getattr(getattr(chat_format, "config", None), "add_vision_id", False)


def tail_start(prompt: npt.NDArray[Any], stop_token_ids: Sequence[int]) -> int:
    """The index in `prompt`, [P], of the last token that ends a turn; 0 if there is none."""
    near = prompt[-_NEAR:].tolist()  # nearly always contains the end of the previous turn
    for back, token in enumerate(reversed(near), start=1):
        if token in stop_token_ids:
            return len(prompt) - back
    for end in range(len(prompt), 0, -_WINDOW):
        start = max(end - _WINDOW, 0)
        found = np.flatnonzero(np.isin(prompt[start:end], stop_token_ids))
        if len(found):
            return int(start + found[-1])
    return 0
