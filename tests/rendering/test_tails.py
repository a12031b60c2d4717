from __future__ import annotations

import random

import numpy as np
import pytest
from family_models import SPECIAL_TOKENS, family_renderer
from test_streaming import TOOLS, any_reply, meaning

from areal_agents.core.completion import TokenIds
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RenderingError
from areal_agents.rendering import ChatRenderer
from areal_agents.rendering.templates.tails import reads_last_turn, tail_start

CALL = ToolCall("functions.search:0", "search", '{"query": "Lyon"}')
HISTORY = [
    Message("system", "Answer."),
    Message("user", "Where is Lyon?"),
    Message("assistant", "I look.", "hm", (CALL,)),
    Message("tool", "In France.", tool_call_id=CALL.id, name="search"),
]
FAMILIES = sorted(SPECIAL_TOKENS)


class WholePrompt(ChatRenderer):
    """A renderer that passes the whole prompt to the library."""

    def _tail(self, prompt_ids: TokenIds) -> list[int]:
        return np.asarray(prompt_ids).tolist()


def whole(renderer: ChatRenderer) -> ChatRenderer:
    return WholePrompt(renderer.tokenizer, renderer._format, family=renderer.family)


def prompts(renderer: ChatRenderer) -> list[TokenIds]:
    """A first prompt, one after a tool result, one after a new question, and one with markers as text."""
    marked = "".join(SPECIAL_TOKENS.get(renderer.family, ["<think>", "</think>", "<|im_start|>"]))
    later = [Message("assistant", "France."), Message("user", "And <think> Paris?")]
    histories = [HISTORY[:2], HISTORY, [*HISTORY, *later], [Message("user", marked)]]
    return [renderer.render(messages, TOOLS) for messages in histories]


def suffix(renderer: ChatRenderer, prompt: TokenIds, ids: TokenIds, new: list[Message]) -> object:
    try:
        bridged = renderer.bridge(prompt, ids, new, TOOLS)
    except RenderingError as error:
        return str(error)
    return None if bridged is None else bridged.tolist()


def check(renderer: ChatRenderer, seeds: range) -> None:
    reference = whole(renderer)
    news = [[Message("tool", "ok", tool_call_id=CALL.id, name="search")], [Message("user", "And Paris?")]]
    for prompt in prompts(renderer):
        for seed in seeds:
            rng = random.Random(seed)
            ids = np.array(any_reply(renderer, prompt.tolist(), rng), dtype=np.int32)
            assert meaning(renderer.parse(prompt, ids, TOOLS)) == meaning(reference.parse(prompt, ids, TOOLS))
            for new in news:
                assert suffix(renderer, prompt, ids, new) == suffix(reference, prompt, ids, new)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_the_prompt_gives_the_same_results_as_the_whole_prompt(family: str) -> None:
    check(family_renderer(family), range(15))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-vl", "qwen3.5", "glm-5"])
def test_the_end_of_the_prompt_suffices_if_all_reasoning_is_kept(family: str) -> None:
    check(family_renderer(family, thinking_retention="all"), range(15))


def test_the_end_of_the_prompt_suffices_with_the_real_vocabulary(qwen3: ChatRenderer) -> None:
    check(qwen3, range(15))


def test_the_end_of_a_long_prompt_is_short(renderer: ChatRenderer) -> None:
    prompt = renderer.render([Message("user", "word " * 5000)])
    start = tail_start(prompt, renderer.stop_token_ids)
    assert renderer.tokenizer.decode(prompt[start:]) == "<|im_end|>\n<|im_start|>assistant\n"
    far = np.concatenate([prompt, np.zeros(9000, dtype=np.int32)])
    assert tail_start(far, renderer.stop_token_ids) == start
    assert tail_start(far[start + 1 :], renderer.stop_token_ids) == 0
    assert reads_last_turn(renderer._format, "qwen3")
    assert not reads_last_turn(renderer._format, "gpt-oss")
