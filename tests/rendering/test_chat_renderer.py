from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.configs import Qwen3RendererConfig

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering import ChatRenderer

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TOOLS = [SEARCH]
QUESTION = (Message("system", "Answer."), Message("user", "Where is Lyon?"))
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Lyon"}}\n</tool_call>'


def sampled(renderer: ChatRenderer, text: str) -> np.ndarray:
    return np.array(renderer.tokenizer.encode(text), dtype=np.int32)


def results(reply: Message, *texts: str) -> list[Message]:
    return [Message("tool", text, tool_call_id=c.id) for c, text in zip(reply.tool_calls, texts, strict=True)]


def test_a_prompt_is_what_the_template_writes(renderer: ChatRenderer) -> None:
    text = renderer.tokenizer.decode(renderer.render(QUESTION, TOOLS))
    assert text.startswith("<|im_start|>system\nAnswer.\n\n# Tools")
    assert json.dumps(SEARCH) in text
    assert text.endswith("<|im_start|>user\nWhere is Lyon?<|im_end|>\n<|im_start|>assistant\n")
    assert "Tools" not in renderer.tokenizer.decode(renderer.render(QUESTION))


def test_a_reply_is_parsed_into_reasoning_content_and_parallel_calls(renderer: ChatRenderer) -> None:
    prompt = renderer.render(QUESTION, TOOLS)
    text = f"<think>\nI search.\n</think>\n\nOne moment.\n{CALL}\n{CALL.replace('Lyon', 'France')}<|im_end|>"
    reply = renderer.parse(prompt, sampled(renderer, text), TOOLS)
    assert (reply.reasoning, reply.content) == ("I search.", "One moment.")
    assert [call.arguments for call in reply.tool_calls] == ['{"query": "Lyon"}', '{"query": "France"}']
    assert [call.name for call in reply.tool_calls] == ["search", "search"]
    ids = [call.id for call in reply.tool_calls]
    assert len(set(ids)) == 2 and all(len(i) == 29 and i.startswith("call_") for i in ids)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"query":"a"}',
        '{ "n" : 2.0 ,"b": [1,  2]}',
        '{"query": "caf\\u00e9"}',
        '{"query": "café \\"x\\""}',
        "{}",
    ],
)
def test_arguments_are_kept_as_sampled(renderer: ChatRenderer, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    reply = renderer.parse(renderer.render(QUESTION, TOOLS), sampled(renderer, text), TOOLS)
    assert reply.tool_calls[0].arguments == arguments


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>\n{"arguments": {"query": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": ["x"]}\n</tool_call>',
        '<tool_call>\n{"name": "search", "argum',
    ],
)
def test_a_malformed_call_stays_visible_in_the_content(renderer: ChatRenderer, block: str) -> None:
    completion = sampled(renderer, f"Hm.\n{block}<|im_end|>")
    reply = renderer.parse(renderer.render(QUESTION, TOOLS), completion, TOOLS)
    assert reply.content.replace("\n", "") == f"Hm.{block}".replace("\n", "")
    assert reply.tool_calls == ()


def test_good_calls_beside_a_malformed_one_are_kept(renderer: ChatRenderer) -> None:
    text = f"{CALL}\n<tool_call>\noops\n</tool_call>\n{CALL}<|im_end|>"
    reply = renderer.parse(renderer.render(QUESTION, TOOLS), sampled(renderer, text), TOOLS)
    assert len(reply.tool_calls) == 2
    assert reply.content == "<tool_call>\noops\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"I search.\n{CALL}\n\nThen I read.\n\n{CALL} qj0qj",
        f"{CALL}{CALL.replace('Lyon', 'qj1qj')}",
        '<tool_call>\n{"name": "search", "argum',
        "<tool_call>oops</tool_call> and more",
        "[" * 1000,
    ],
)
def test_without_tools_calls_stay_in_the_content_as_sampled(renderer: ChatRenderer, text: str) -> None:
    completion = sampled(renderer, f"<think>\nA\n</think>\n\n{text}<|im_end|>")
    reply = renderer.parse(renderer.render(QUESTION), completion)
    assert (reply.reasoning, reply.content, reply.tool_calls) == ("A", text, ())
    assert renderer.parse(renderer.render(QUESTION, TOOLS), completion, TOOLS).tool_calls or CALL not in text


def test_very_deeply_nested_brackets_stay_in_the_content(renderer: ChatRenderer) -> None:
    text = "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>"
    reply = renderer.parse(renderer.render(QUESTION, TOOLS), sampled(renderer, text + "<|im_end|>"), TOOLS)
    assert reply.content == text


def test_a_bridge_equals_the_full_rendering_of_a_tool_cycle(renderer: ChatRenderer) -> None:
    prompt = renderer.render(QUESTION, TOOLS)
    completion = sampled(renderer, f"<think>\nI search.\n</think>\n\nWait.\n{CALL}\n{CALL}<|im_end|>")
    reply = renderer.parse(prompt, completion, TOOLS)
    new = results(reply, "Lyon is in France.", "")
    suffix = renderer.bridge(prompt, completion, new, TOOLS)
    assert suffix is not None
    whole = renderer.render([*QUESTION, reply, *new], TOOLS)
    assert np.array_equal(whole, np.concatenate([prompt, completion, suffix]))


def test_a_truncated_turn_is_closed_in_the_next_prompt(renderer: ChatRenderer) -> None:
    prompt, cut = renderer.render(QUESTION, TOOLS), sampled(renderer, f"Let me.\n{CALL}")
    reply = renderer.parse(prompt, cut, TOOLS)
    suffix = renderer.bridge(prompt, cut, results(reply, "ok"), TOOLS)
    assert suffix is not None
    assert renderer.tokenizer.decode(suffix) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_that_was_cut_off_is_closed_too(renderer: ChatRenderer) -> None:
    prompt, cut = renderer.render(QUESTION, TOOLS), sampled(renderer, "<think>\nfor ever and")
    assert renderer.parse(prompt, cut, TOOLS).reasoning == "for ever and"
    suffix = renderer.bridge(prompt, cut, [Message("tool", "ok")], TOOLS)
    assert suffix is not None
    assert renderer.tokenizer.decode(suffix).startswith("</think><|im_end|>\n")


def test_a_bridge_that_would_rewrite_earlier_tokens_is_refused(renderer: ChatRenderer) -> None:
    prompt, done = renderer.render(QUESTION), sampled(renderer, "France.<|im_end|>")
    assert renderer.bridge(prompt, done, [Message("user", "And Paris?")]) is None
    assert renderer.bridge(prompt, done, [Message("assistant", "edited"), Message("tool", "x")]) is None
    after_the_end = np.append(done, done[0])
    assert renderer.bridge(prompt, after_the_end, [Message("tool", "x")]) is None


def test_user_turns_are_bridged_if_all_thinking_is_kept(model_folder) -> None:  # type: ignore[no-untyped-def]
    keep = ChatRenderer.from_folder(model_folder, options={"thinking_retention": "all"})
    prompt, done = keep.render(QUESTION), sampled(keep, "<think>\nhm\n</think>\n\nFrance.<|im_end|>")
    suffix = keep.bridge(prompt, done, [Message("user", "And Paris?")])
    assert suffix is not None
    turn = "\n<|im_start|>user\nAnd Paris?<|im_end|>\n<|im_start|>assistant\n"
    assert keep.tokenizer.decode(suffix) == turn


def test_other_options_make_another_renderer_of_the_same_model(renderer: ChatRenderer) -> None:
    quiet = renderer.with_options({"enable_thinking": False})
    assert quiet.tokenizer is renderer.tokenizer
    opening = "<|im_start|>assistant\n"
    assert quiet.tokenizer.decode(quiet.render(QUESTION)).endswith(f"{opening}<think>\n\n</think>\n\n")
    assert renderer.tokenizer.decode(renderer.render(QUESTION)).endswith(opening)
    both = quiet.with_options({"thinking_retention": "all"})
    done = sampled(both, "France.<|im_end|>")
    suffix = both.bridge(both.render(QUESTION), done, [Message("user", "And Paris?")])
    assert suffix is not None and both.tokenizer.decode(suffix).endswith("</think>\n\n")
    with pytest.raises(ConfigError, match="'thinking'.*enable_thinking"):
        renderer.with_options({"thinking": True})
    with pytest.raises(ConfigError, match="'thinking_retention'.*'all'"):
        renderer.with_options({"thinking_retention": "some"})
    bare = ChatRenderer.from_config(renderer.tokenizer, Qwen3RendererConfig())
    with pytest.raises(ConfigError, match="only for a renderer of a model folder; use from_folder"):
        bare.with_options({})


def test_a_rendering_may_end_after_the_last_message(renderer: ChatRenderer) -> None:
    prompt = renderer.render(QUESTION)
    shorter = renderer.render(QUESTION, generation_prompt=False)
    assert renderer.tokenizer.decode(prompt[len(shorter) :]) == "<|im_start|>assistant\n"
    assert np.array_equal(prompt[: len(shorter)], shorter)


def test_whitespace_around_reasoning_and_content_is_removed(renderer: ChatRenderer) -> None:
    reply = renderer.parse(renderer.render(QUESTION), sampled(renderer, "<think>\n for ever "))
    assert (reply.reasoning, reply.content) == ("for ever", "")


def test_an_empty_conversation_is_an_error(renderer: ChatRenderer) -> None:
    with pytest.raises(RenderingError, match="at least one message"):
        renderer.render([])


def test_rendering_needs_neither_torch_nor_transformers(model_folder) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import sys; from areal_agents.rendering import ChatRenderer;"
        "from areal_agents.core.messages import Message;"
        f"ChatRenderer.from_folder({str(model_folder)!r}).render([Message('user', 'hi')]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


plain = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12).map(
    lambda text: text.replace("<", "(").strip()
)
arguments = st.dictionaries(plain, st.one_of(plain, st.integers(-9, 9), st.booleans(), st.none()), max_size=3)
separators = st.sampled_from([(", ", ": "), (",", ":")])


@st.composite
def tool_turns(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What a model in this format would sample, and one result per call."""
    reasoning, content = draw(plain), draw(plain)
    calls = draw(st.lists(st.tuples(arguments, separators, st.booleans()), min_size=1, max_size=3))
    written = [json.dumps(args, separators=sep, ensure_ascii=ascii) for args, sep, ascii in calls]
    blocks = [f'<tool_call>\n{{"name": "search", "arguments": {text}}}\n</tool_call>' for text in written]
    head = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text = head + (content + "\n" if content else "") + "\n".join(blocks) + "<|im_end|>"
    return text, [draw(plain) for _ in blocks]


@settings(max_examples=60, deadline=None)
@given(question=plain, turns=st.lists(tool_turns(), min_size=1, max_size=4))
def test_bridged_turns_equal_one_full_rendering(renderer: ChatRenderer, question, turns) -> None:  # type: ignore[no-untyped-def]
    messages: list[Message] = [Message("user", question)]
    prompt = renderer.render(messages, TOOLS)
    for text, texts in turns:
        completion = sampled(renderer, text)
        reply = renderer.parse(prompt, completion, TOOLS)
        new = results(reply, *texts)
        suffix = renderer.bridge(prompt, completion, new, TOOLS)
        assert suffix is not None
        prompt = np.concatenate([prompt, completion, suffix])
        messages += [reply, *new]
        assert np.array_equal(renderer.render(messages, TOOLS), prompt)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_completion_parses_and_bridges_or_is_refused(renderer: ChatRenderer, data: st.DataObject) -> None:
    prompt = renderer.render(QUESTION, TOOLS)
    special = sampled(renderer, "<tool_call></tool_call><think></think><|im_end|><|im_start|>{}").tolist()
    ids = st.one_of(st.sampled_from(special), st.integers(0, renderer.vocab_size - 1))
    completion = np.array(data.draw(st.lists(ids, max_size=20)), dtype=np.int32)
    reply = renderer.parse(prompt, completion, TOOLS)
    assert reply.role == "assistant"
    suffix = renderer.bridge(prompt, completion, [Message("tool", "ok")], TOOLS)
    if suffix is None:  # only for tokens after the end of the turn, or a turn that ends inside reasoning
        assert np.isin(completion, renderer.stop_token_ids).any()
    else:
        assert renderer.tokenizer.decode(suffix).endswith("<|im_start|>assistant\n")


def test_a_clients_message_with_tool_calls_is_rendered_like_a_sampled_one(renderer: ChatRenderer) -> None:
    call = ToolCall("toolu_1", "search", '{"query": "Lyon"}')
    reply = Message("assistant", "", tool_calls=(call,))
    history = [*QUESTION, reply, Message("tool", "x", tool_call_id="toolu_1")]
    assert CALL in renderer.tokenizer.decode(renderer.render(history, TOOLS))
