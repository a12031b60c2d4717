"""The tokens that a model samples for a reply: those of the template, which parse to the reply again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from family_models import SPECIAL_TOKENS, family_renderer

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RenderingError
from areal_agents.rendering import ChatRenderer

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
ASK = Message("user", "Where is Lyon?")
CALLS = (ToolCall("functions.search:0", "search", '{"query": "Lyon"}'),)
REPLIES = {
    "content": Message("assistant", "Lyon is\nin France"),
    "call": Message("assistant", "", tool_calls=CALLS),
    "reasoning": Message("assistant", "In France", reasoning="Easy."),
}
# The prompts of these families begin the reasoning. Their templates cannot write a reply without reasoning,
# or cannot write any reply.
REASON_ALWAYS = {"deepseek-r1", "glm-5", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"}
# The templates of these families write no reasoning into this reply, with the default options.
WITHOUT_REASONING = {
    "deepseek-r1", "deepseek-v3", "deepseek-v4", "hy3", "kimi-k2", "kimi-k2.5", "laguna-m.1", "laguna-xs-2.1",
    "laguna-xs.2", "llama-3", "qwen3-vl",
}  # fmt: skip
NO_END = {"glm-5.1"}  # its user messages do not begin with a token that ends a turn
REFUSED = {
    "content": REASON_ALWAYS | NO_END,
    "call": REASON_ALWAYS,
    "reasoning": WITHOUT_REASONING | NO_END,
}


@pytest.mark.parametrize("family", SPECIAL_TOKENS)
@pytest.mark.parametrize("kind", REPLIES)
def test_the_ids_of_a_reply_parse_to_this_reply_or_are_refused(family: str, kind: str) -> None:
    renderer, reply = family_renderer(family), REPLIES[kind]
    tools = [TOOL] if reply.tool_calls else []
    if family in REFUSED[kind]:
        with pytest.raises(
            RenderingError, match=f"family {family} (does not write|cannot express|writes no)"
        ):
            renderer.reply_ids([ASK], reply, tools)
        return
    ids = renderer.reply_ids([ASK], reply, tools)
    assert np.flatnonzero(np.isin(ids, renderer.stop_token_ids)).tolist() == [len(ids) - 1]
    prompt = renderer.render([ASK], tools)
    read = renderer.parse(prompt, ids, tools)
    assert (read.digest, read.reasoning) == (reply.digest, reply.reasoning)
    result = [Message("tool", "x", tool_call_id=CALLS[0].id, name="search")]
    after = result if reply.tool_calls else [Message("user", "And Paris?")]
    if (bridged := renderer.bridge(prompt, ids, after, tools)) is not None and not reply.reasoning:
        whole = renderer.render([ASK, reply, *after], tools)
        assert renderer.tokenizer.decode(bridged.tolist()) in renderer.tokenizer.decode(whole.tolist())


MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LAST = PLAIN.replace(
    "{{ m.content",
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content",
)
NEVER = PLAIN.replace("{{ m.content", "{{ m.content.split('</think>')[-1]")
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
BLOCK = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "block"),
    [(PLAIN, ""), (LAST, BLOCK), (NEVER, ""), (NEEDS_SYSTEM + NEVER, ""), (NEEDS_SYSTEM + LAST, BLOCK),
     (None, BLOCK), ("{{ raise_exception('</think>') }}", BLOCK), ("{% if </think> %}", BLOCK)],
)  # fmt: skip
def test_the_template_of_the_folder_decides_whether_a_reply_has_an_empty_reasoning_block(
    tmp_path: Path, template: str | None, block: str
) -> None:
    """What the template writes in its last message counts; without a usable template, the family decides."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    renderer = ChatRenderer.from_folder(folder)
    assert renderer.family == "qwen3"
    for content in ("In France", "", "\n\n  In </think> France"):
        reply = Message("assistant", content, tool_calls=() if content else CALLS)
        written = renderer.tokenizer.decode(renderer.reply_ids([ASK], reply, [TOOL]).tolist())
        assert written.startswith(block) and written.count("<think>") == bool(block)
    reasoned = renderer.reply_ids([ASK], REPLIES["reasoning"])
    assert renderer.tokenizer.decode(reasoned.tolist()) == "<think>\nEasy.\n</think>\n\nIn France<|im_end|>"
    closed = renderer.with_options({"enable_thinking": False})
    closed_ids = closed.reply_ids([ASK], REPLIES["content"])
    assert renderer.tokenizer.decode(closed_ids.tolist()) == "Lyon is\nin France<|im_end|>"
