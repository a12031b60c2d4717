from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates as t
import numpy as np
import pytest
from real_tokenizers import QWEN2_TEMPLATE, QWEN3_TEMPLATE
from transformers import PreTrainedTokenizerFast

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering import ChatRenderer, Tokenizer
from areal_agents.rendering.templates.generic import TemplateFormat
from areal_agents.rendering.templates.template import ChatTemplate

SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Find <b> & 'é'.", "parameters": {"type": "object"}},
}
QUESTION = [Message("user", "Where?")]


def generic(folder: Path, **options: Any) -> tuple[ChatRenderer, TemplateFormat]:
    tokenizer = Tokenizer.from_folder(folder)
    chat_format = TemplateFormat.from_folder(folder, tokenizer, options)
    return ChatRenderer(tokenizer, chat_format, family="template"), chat_format


def extends(chat_format: TemplateFormat, *, tools: bool = False, called: bool = False) -> set[str]:
    """The proven shapes, for example "tool*2+user"."""
    kinds = [k for k in chat_format.proven if (k.tools, k.called) == (tools, called)]
    return {"+".join(role if n == 1 else f"{role}*{n}" for role, n in k.shape) for k in kinds}


EVERYTHING = {"user", "user*2", "system", "system+user", "user+system"} | {
    f"{tool}{more}" for tool in ("tool", "tool*2", "tool*3") for more in ("", "+user", "+system")
}


# --- rendering as in the Hugging Face libraries -----------------------------------------------------------


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": arguments}}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Where is Lyon?\n"}],
    [
        {"role": "system", "content": "Answer <b> & 'é'."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."},
        {"role": "user", "content": "And?"},
    ],
    [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call({"query": "é & <b>", "n": 2})]},
        {"role": "tool", "content": '{"a": 1}', "tool_call_id": "call00000", "name": "search"},
        {"role": "tool", "content": "more", "tool_call_id": "call00001"},
    ],
]
TEMPLATES = {
    name: getattr(t, name)
    for name in "CHATML HERMES INST ALTERNATING GENERATION NUMBERED LAST_QUESTION STRICT_SYSTEM".split()  # noqa: SIM905
} | {"qwen2": QWEN2_TEMPLATE, "qwen3": QWEN3_TEMPLATE}


@pytest.mark.parametrize("tools", [None, [SEARCH]])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(tmp_path: Path, template: str, tools: Any) -> None:
    folder = t.write_folder(tmp_path, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    ours = ChatTemplate.from_folder(folder, special_tokens=tokenizer.special_tokens, options={})
    compared = 0
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            try:
                ids = theirs.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=prompt, return_dict=False
                )
            except Exception:
                with pytest.raises(RenderingError, match="refuses this conversation"):
                    ours.render(messages, tools, add_generation_prompt=prompt)
                continue
            text = theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
            assert ours.render(messages, tools, add_generation_prompt=prompt) == text
            assert tokenizer.encode(text) == ids
            compared += 1
    assert compared >= 2


def test_a_folder_may_have_templates_by_name_or_in_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": t.CHATML}, {"name": "tool_use", "template": "TOOLS" + t.CHATML}]
    renderer, _ = generic(t.write_folder(tmp_path / "named", named))
    assert renderer.tokenizer.decode(renderer.render(QUESTION, [SEARCH])).startswith("TOOLS<|im_start|>")
    assert renderer.tokenizer.decode(renderer.render(QUESTION)).startswith("<|im_start|>")
    filed = t.write_folder(tmp_path / "filed", "not this one")
    (filed / "chat_template.jinja").write_text(t.CHATML)
    renderer, _ = generic(filed)
    expected = "<|im_start|>user\nWhere?<|im_end|>\n"
    assert renderer.tokenizer.decode(renderer.render(QUESTION, generation_prompt=False)) == expected


def test_options_reach_the_template_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    folder = t.write_folder(tmp_path, t.OPTION)
    renderer, _ = generic(folder, style="terse")
    assert renderer.tokenizer.decode(renderer.render(QUESTION)).startswith("Be terse.\n")
    with pytest.raises(
        ConfigError, match="'enable_thinking' is not read by this chat template; it reads style"
    ):
        generic(folder, enable_thinking=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "is not a valid Jinja template"),
        (None, "has no chat template"),
        ([{"name": "rag", "template": "x"}], "named 'default', got .'rag'"),
        ([1], "must be a string or a list"),
        ("{{ raise_exception('never') }}", "cannot render a user message: .*never"),
        ("", "must write the user's message, but for 'zqx7305mark' it wrote ''"),
    ],
)
def test_an_unusable_template_is_a_config_error(tmp_path: Path, template: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generic(t.write_folder(tmp_path, template))


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    template = t.CHATML + "{{ ''.__class__.__mro__[1].__subclasses__() | length }}"
    with pytest.raises(ConfigError, match="cannot render a user message: .*unsafe"):
        generic(t.write_folder(tmp_path, template))


# --- messages that can be appended ------------------------------------------------------------------------


def test_a_template_that_only_appends_can_be_extended_by_all_messages(tmp_path: Path) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, t.CHATML))
    assert extends(chat_format) == extends(chat_format, tools=True) == EVERYTHING
    assert chat_format.describe() == (
        "the model's own chat template; extends after: system, tool, user, system+user, tool+system, "
        "tool+user, user+system; reads no tool calls; reads no reasoning"
    )
    prompt = renderer.render(QUESTION)
    completion = np.array(renderer.tokenizer.encode("In France.<|im_end|>"))
    suffix = renderer.bridge(prompt, completion, [Message("user", "Sure?")])
    assert suffix is not None
    assert renderer.tokenizer.decode(suffix) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "name", ["NUMBERED", "STAMPED", "COUNTED_DOWN", "LAST_QUESTION", "WINDOW", "UNCLOSED", "DROPS_REASONING"]
)
def test_a_template_that_changes_earlier_messages_cannot_be_extended(tmp_path: Path, name: str) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, getattr(t, name)))
    assert extends(chat_format) == extends(chat_format, tools=True) == set()
    assert "cannot extend: full render each turn" in chat_format.describe()
    completion = np.array(renderer.tokenizer.encode("Yes.<|im_end|>"))
    assert renderer.bridge(renderer.render(QUESTION), completion, QUESTION) is None


def test_a_template_that_begins_with_a_date_can_be_extended(tmp_path: Path) -> None:
    _, chat_format = generic(t.write_folder(tmp_path, t.DATED_HEAD))
    assert extends(chat_format) == EVERYTHING


def test_a_template_without_a_generation_prompt_can_be_extended(tmp_path: Path) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, t.NO_PROMPT))
    assert extends(chat_format) == EVERYTHING
    completion = np.array(renderer.tokenizer.encode("<|im_start|>assistant\nYes.<|im_end|>"))
    suffix = renderer.bridge(renderer.render(QUESTION), completion, [Message("user", "Sure?")])
    assert suffix is not None and renderer.tokenizer.decode(suffix) == "\n<|im_start|>user\nSure?<|im_end|>\n"


def test_messages_that_a_template_refuses_are_not_appended(tmp_path: Path) -> None:
    _, strict = generic(t.write_folder(tmp_path / "strict", t.STRICT_SYSTEM))
    assert extends(strict) == {kind for kind in EVERYTHING if "system" not in kind}
    renderer, alternating = generic(t.write_folder(tmp_path / "alternating", t.ALTERNATING))
    assert extends(alternating) == {"user"}
    prompt = renderer.render([Message("user", " Where? ")])
    completion = np.array(renderer.tokenizer.encode("\n In France. <|im_end|>"))
    suffix = renderer.bridge(prompt, completion, [Message("user", " Sure?\n")])
    assert suffix is not None
    assert renderer.tokenizer.decode(suffix) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>model\n"
    assert renderer.bridge(prompt, completion, [Message("user", "a"), Message("user", "b")]) is None


def test_a_template_that_moves_tools_or_system_prompts_cannot_be_extended(tmp_path: Path) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, t.INST))
    # A question contains the system prompt only while it is the last message.
    assert extends(chat_format) == extends(chat_format, tools=True) == set()
    assert not chat_format.markup.calls
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id,)


def test_results_that_name_the_called_function_are_not_appended(tmp_path: Path) -> None:
    _, named = generic(t.write_folder(tmp_path / "named", t.NAMED_RESULTS))
    _, plain = generic(t.write_folder(tmp_path / "plain", t.HERMES))
    assert extends(plain, called=True) == EVERYTHING
    assert extends(named, called=True) == {kind for kind in EVERYTHING if "tool" not in kind}


def test_a_template_that_drops_the_content_beside_calls_is_not_extended_after_calls(tmp_path: Path) -> None:
    _, chat_format = generic(t.write_folder(tmp_path, t.SILENT_CALLS))
    assert extends(chat_format, called=True) == set()
    assert extends(chat_format, called=False) == EVERYTHING


def test_what_can_be_appended_depends_on_tools_and_on_calls_before_it(tmp_path: Path) -> None:
    more = [Message("user", "Sure?")]
    renderer, chat_format = generic(t.write_folder(tmp_path / "tools", t.WANDERING_TOOLS))
    assert "user" in extends(chat_format) and "tool" in extends(chat_format, tools=True)
    assert "user" not in extends(chat_format, tools=True)
    completion = np.array(renderer.tokenizer.encode("Yes.<|im_end|>"))
    assert renderer.bridge(renderer.render(QUESTION), completion, more) is not None
    assert renderer.bridge(renderer.render(QUESTION, [SEARCH]), completion, more, [SEARCH]) is None
    assert "; with tools: system, tool, tool+system;" in chat_format.describe()
    renderer, _ = generic(t.write_folder(tmp_path / "calls", t.SILENT_CALLS))
    called = '<tool_call>{"name": "search", "arguments": {}}</tool_call><|im_end|>'
    assert renderer.bridge(renderer.render(QUESTION), completion, more) is not None
    assert (
        renderer.bridge(renderer.render(QUESTION), np.array(renderer.tokenizer.encode(called)), more) is None
    )


def test_questions_at_which_reasoning_is_dropped_are_not_appended(tmp_path: Path) -> None:
    _, chat_format = generic(t.write_folder(tmp_path, QWEN3_TEMPLATE))
    expected = {kind for kind in EVERYTHING if "user" not in kind}
    assert extends(chat_format, called=True) == extends(chat_format, tools=True, called=True) == expected


def test_merged_results_are_appended_as_one_block(tmp_path: Path) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, QWEN2_TEMPLATE, eos_token="<|im_end|>"))
    assert extends(chat_format, tools=True, called=True) == EVERYTHING
    block = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    completion = np.array(renderer.tokenizer.encode(f"{block}\n{block}<|im_end|>"))
    reply = renderer.parse(renderer.render(QUESTION, [SEARCH]), completion, [SEARCH])
    results = [Message("tool", c.id[:4], tool_call_id=c.id) for c in reply.tool_calls]
    suffix = renderer.bridge(renderer.render(QUESTION, [SEARCH]), completion, results, [SEARCH])
    assert suffix is not None
    assert renderer.tokenizer.decode(suffix) == (
        "\n<|im_start|>user\n<tool_response>\ncall\n</tool_response>\n<tool_response>\ncall\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_end_of_a_completion_decides_what_is_appended(tmp_path: Path) -> None:
    renderer, _ = generic(t.write_folder(tmp_path, t.GENERATION, eos_token="</s>"))
    prompt, more = renderer.render(QUESTION), [Message("user", "Sure?")]

    def bridged(text: str) -> str | None:
        suffix = renderer.bridge(prompt, np.array(renderer.tokenizer.encode(text)), more)
        return None if suffix is None else renderer.tokenizer.decode(suffix)

    added = "\n<|user|>\nSure?<|end|>\n<|assistant|>\n"
    end = renderer.tokenizer.convert_tokens_to_ids("<|end|>")
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id, end)
    assert bridged("Yes.<|end|>") == added
    assert bridged("Yes.</s>") == added
    assert bridged("Yes.") == "<|end|>" + added
    assert bridged("") == "<|end|>" + added
    assert bridged("Yes.<|end|> And") is None
    completion = np.array(renderer.tokenizer.encode("Yes.<|end|>"))
    assert renderer.bridge(prompt, completion, [Message("assistant", "x")]) is None
    mark = [Message("user", "zqx7305mark")]
    assert renderer.bridge(prompt, completion, mark) is None


def test_a_reply_cut_off_in_its_reasoning_is_not_extended(tmp_path: Path) -> None:
    renderer, _ = generic(t.write_folder(tmp_path, QWEN3_TEMPLATE))
    prompt = renderer.render(QUESTION)
    tool = [Message("tool", "x", tool_call_id="call_1")]
    assert renderer.bridge(prompt, np.array(renderer.tokenizer.encode("<think>\nBecau")), tool) is None
    assert (
        renderer.bridge(prompt, np.array(renderer.tokenizer.encode("<think>\nYes.\n</think>\n\nI")), tool)
        is not None
    )


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_bridge_equals_the_full_rendering_if_tokens_depend_on_their_context(
    tmp_path: Path, scheme: str
) -> None:
    folder = t.write_folder(tmp_path, t.GENERATION, tokenizer=t.sentence_tokenizer(scheme))
    renderer, chat_format = generic(folder)
    assert extends(chat_format) == EVERYTHING
    prompt = renderer.render(QUESTION)
    assert renderer.tokenizer.encode("Yes.<|end|>\nNo") == renderer.tokenizer.encode("Yes.<|end|>No")
    completion = np.array(renderer.tokenizer.encode("<|assistant|>Yes.<|end|>")[1:])
    suffix = renderer.bridge(prompt, completion, [Message("user", "Sure?")])
    whole = renderer.render([*QUESTION, Message("assistant", "Yes."), Message("user", "Sure?")])
    assert suffix is not None and [*prompt, *completion, *suffix] == whole.tolist()


def test_stop_tokens_are_read_from_the_folder(tmp_path: Path) -> None:
    folder = t.write_folder(tmp_path, t.CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [260, 257]}')
    renderer, _ = generic(folder)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id, 260, end)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(ConfigError, match="token ids below 265, got 99999"):
        generic(folder)


# --- parsing of replies -----------------------------------------------------------------------------------


def parsed(renderer: ChatRenderer, text: str, *, prompt: Any = None) -> Message:
    ids = renderer.render(QUESTION) if prompt is None else prompt
    return renderer.parse(ids, np.array(renderer.tokenizer.encode(text)), [SEARCH])


def test_calls_are_parsed_even_if_their_markers_are_not_tokens(tmp_path: Path) -> None:
    renderer, chat_format = generic(t.write_folder(tmp_path, t.HERMES))
    assert chat_format.marker_texts == ("<tool_call>", "</tool_call>")
    one = '<tool_call>\n{"name": "search", "arguments": {"q":1}}\n</tool_call>'
    reply = parsed(renderer, f" I look.\n{one}{one.replace('1', '2')}<|im_end|>")
    assert (reply.content, reply.reasoning) == ("I look.", "")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("search", '{"q":1}'), ("search", '{"q":2}')]


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{no}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": []}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "sea',
    ],
)
def test_a_malformed_call_stays_in_the_content(tmp_path: Path, block: str) -> None:
    renderer, _ = generic(t.write_folder(tmp_path, t.HERMES))
    reply = parsed(renderer, f"Hm.\n{block}<|im_end|>")
    assert (reply.content, reply.tool_calls) == (f"Hm.\n{block}", ())


def test_markup_that_the_template_does_not_write_is_content(tmp_path: Path) -> None:
    renderer, _ = generic(t.write_folder(tmp_path, t.CHATML))
    text = '<think>x</think><tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert parsed(renderer, text + "<|im_end|>") == Message("assistant", text)


def test_reasoning_is_parsed_where_the_template_has_it(tmp_path: Path) -> None:
    renderer, _ = generic(t.write_folder(tmp_path / "a", QWEN3_TEMPLATE))
    assert parsed(renderer, "<think>\nHm.\n</think>\n\nYes.<|im_end|>") == Message("assistant", "Yes.", "Hm.")
    assert parsed(renderer, "<think>\nHm.") == Message("assistant", "", "Hm.")
    opened = "{#- </think> -#}" + t.CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")
    renderer, _ = generic(t.write_folder(tmp_path / "b", opened))
    assert parsed(renderer, "Hm.\n</think>\n\nYes.<|im_end|>") == Message("assistant", "Yes.", "Hm.")


def test_arguments_are_passed_in_the_form_that_the_template_writes_unquoted(tmp_path: Path) -> None:
    history = [*QUESTION, Message("assistant", "", tool_calls=(ToolCall("c", "search", '{"q":1}'),))]
    renderer, _ = generic(t.write_folder(tmp_path / "a", t.HERMES))
    assert '"arguments": {"q": 1}' in renderer.tokenizer.decode(renderer.render(history))
    renderer, _ = generic(t.write_folder(tmp_path / "b", QWEN3_TEMPLATE))
    assert '"arguments": {"q":1}' in renderer.tokenizer.decode(renderer.render(history))


def test_a_template_format_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = t.write_folder(tmp_path, t.HERMES)
    code = (
        "import sys; from areal_agents.rendering.tokenization.tokenizer import Tokenizer;"
        "from areal_agents.rendering.templates.generic import TemplateFormat;"
        f"TemplateFormat.from_folder({str(folder)!r}, Tokenizer.from_folder({str(folder)!r}), {{}});"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import json;" + code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []
