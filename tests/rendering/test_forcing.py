from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import xgrammar
from family_models import family_renderer

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message
from areal_agents.errors import RenderingError
from areal_agents.rendering import ChatRenderer

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "n": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "number"}}},
            "required": ["a"],
        },
    },
    "required": ["query", "n"],
    "additionalProperties": False,
}
CHOICE = {
    "type": "object",
    "properties": {"url": {"type": "string", "enum": ["a", "b"]}},
    "required": ["url"],
}
SCHEMAS = {"search": SCHEMA, "read_page": CHOICE, "anything": {"type": "object"}}
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "read_page", "parameters": CHOICE}},
    {"type": "function", "function": {"name": "anything"}},
]
FAMILIES = ["qwen3", "qwen3-vl", "llama-3", "deepseek-v3", "kimi-k2", "kimi-k2.5"]
XML_FAMILIES = ["qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "nemotron-3"]
ENDINGS = {'"', "}", "]", "<", "</", "\n", ">"}


def vocabulary(renderer: ChatRenderer) -> xgrammar.TokenizerInfo:
    pieces = []
    for token in range(renderer.vocab_size):
        try:
            pieces.append(renderer.tokenizer.token_text(token))
        except ValueError:  # a gap in the vocabulary
            pieces.append("")
    return xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=list(renderer.stop_token_ids)
    )


def compile_tag(renderer: ChatRenderer, grammar: Grammar | None) -> xgrammar.CompiledGrammar:
    assert grammar is not None and grammar.kind == "structural_tag"
    return xgrammar.GrammarCompiler(vocabulary(renderer)).compile_structural_tag(grammar.text)


def walk(renderer: ChatRenderer, compiled: xgrammar.CompiledGrammar, rng: random.Random) -> list[int]:
    """Sample tokens that the mask allows, preferring those that end the output; [] if it did not end."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, renderer.vocab_size)
    markers = sorted(renderer.tokenizer.added_token_ids)
    spelled = map(renderer.tokenizer.encode, sorted(ENDINGS))
    endings = [some[0] for some in spelled if len(some) == 1]
    ids: list[int] = []
    for step in range(500):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: renderer.vocab_size]
        allowed = np.flatnonzero(bits)
        closing = [token for token in markers if bits[token]]
        ending = [token for token in endings if bits[token]]
        if closing and rng.random() < 0.5:
            token = rng.choice(closing)
        elif ending and rng.random() < (0.3 if step < 150 else 0.9):
            token = rng.choice(ending)
        else:
            token = int(rng.choice(allowed))
        assert matcher.accept_token(token)
        ids.append(token)
        if matcher.is_terminated():
            return ids
    return []


def check(renderer: ChatRenderer, *, callable_tools: tuple[str, ...], parallel: bool, walks: int) -> None:
    """Check that replies that the grammar allows parse as calls of the right tools, with valid arguments."""
    grammar = renderer.reply_grammar(
        TOOLS, calls="required", callable_tools=callable_tools, parallel=parallel
    )
    compiled = compile_tag(renderer, grammar)
    prompt = renderer.render([Message("user", "Where is Lyon?")], TOOLS)
    ended = 0
    for seed in range(walks):
        ids = walk(renderer, compiled, random.Random(seed))
        if not ids:
            continue
        ended += 1
        reply = renderer.parse(prompt, np.array(ids, dtype=np.int32), TOOLS)
        assert reply.content == "" and reply.tool_calls, renderer.tokenizer.decode(ids)
        assert parallel or len(reply.tool_calls) == 1
        for call in reply.tool_calls:
            assert not callable_tools or call.name in callable_tools
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert ended >= walks / 3


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_that_the_grammar_allows_are_parsed_as_calls(family: str) -> None:
    renderer = family_renderer(family)
    check(renderer, callable_tools=(), parallel=True, walks=12)
    check(renderer, callable_tools=("search",), parallel=False, walks=12)
    check(renderer, callable_tools=("anything",), parallel=True, walks=12)
    check(renderer, callable_tools=("search", "read_page"), parallel=True, walks=12)


@pytest.mark.parametrize("family", XML_FAMILIES)
def test_xml_replies_that_the_grammar_allows_are_parsed_as_calls(family: str) -> None:
    check(family_renderer(family), callable_tools=("read_page",), parallel=True, walks=20)


@pytest.mark.parametrize("family", XML_FAMILIES)
@pytest.mark.parametrize("text", ["Lyon", "a\nb", '{"x": 1}', "</para", '12"'])
def test_any_string_may_be_an_argument_in_xml(family: str, text: str) -> None:
    renderer = family_renderer(family)
    prompt = renderer.render([Message("user", "Where is Lyon?")], TOOLS)
    opened = renderer.reply_stream(prompt).feed(renderer.tokenizer.encode("hm"))[0].kind == "reasoning"
    parameters = f"<parameter=query>\n{text}\n</parameter>\n<parameter=n>\n1\n</parameter>"
    call = f"<tool_call>\n<function=search>\n{parameters}\n</function>\n</tool_call><|im_end|>"
    ids = renderer.tokenizer.encode(("hm</think>\n\n" if opened else "") + call)
    assert accepts(renderer, ids, callable_tools=("search",), parallel=False)
    reply = renderer.parse(prompt, np.array(ids, dtype=np.int32), TOOLS)
    assert [json.loads(made.arguments) for made in reply.tool_calls] == [{"query": text, "n": 1}]


def test_calls_of_the_example_model_can_be_forced() -> None:
    check(ChatRenderer.from_folder(EXAMPLE), callable_tools=("search",), parallel=False, walks=15)


def test_calls_with_the_real_vocabulary_can_be_forced(qwen3: ChatRenderer) -> None:
    check(qwen3, callable_tools=(), parallel=True, walks=8)


def accepts(
    renderer: ChatRenderer, ids: list[int], *, callable_tools: tuple[str, ...] = (), parallel: bool = True
) -> bool:
    grammar = renderer.reply_grammar(
        TOOLS, calls="required", callable_tools=callable_tools, parallel=parallel
    )
    return matches(renderer, grammar, ids)


def matches(renderer: ChatRenderer, grammar: Grammar | None, ids: list[int]) -> bool:
    matcher = xgrammar.GrammarMatcher(compile_tag(renderer, grammar))
    return all(matcher.accept_token(token) for token in ids) and matcher.is_terminated()


def test_a_call_marker_must_be_the_special_token_itself(renderer: ChatRenderer) -> None:
    tokenizer = renderer.tokenizer
    body = '\n{"name": "search", "arguments": {"query": "x", "n": 1}}\n'
    good = tokenizer.encode(f"<tool_call>{body}</tool_call><|im_end|>")
    assert accepts(renderer, good)
    spelled = [token for char in "<tool_call>" for token in tokenizer.encode(char)]
    assert not accepts(renderer, [*spelled, *good[1:]])
    inside = tokenizer.encode(f"<tool_call>{body.replace('x', '</tool_call>')}</tool_call><|im_end|>")
    assert not accepts(renderer, inside)


def test_the_grammar_restricts_the_names_and_the_number_of_calls(renderer: ChatRenderer) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "x", "n": 1}}\n</tool_call>'
    one, two = (renderer.tokenizer.encode(text + "<|im_end|>") for text in (call, f"{call}\n{call}"))
    assert accepts(renderer, one, callable_tools=("search",), parallel=False) and accepts(renderer, two)
    assert not accepts(renderer, two, parallel=False)
    assert not accepts(renderer, one, callable_tools=("read_page",))
    assert accepts(renderer, two, callable_tools=("search", "anything"))
    assert not accepts(renderer, two, callable_tools=("read_page", "anything"))
    assert not accepts(renderer, renderer.tokenizer.encode("France.<|im_end|>"))
    wrong = renderer.tokenizer.encode(call.replace('"n": 1', '"n": "1"') + "<|im_end|>")
    assert not accepts(renderer, wrong)


def test_reasoning_may_come_first_where_the_template_lets_the_model_think(model_folder: Path) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "x", "n": 1}}\n</tool_call><|im_end|>'
    thinking = ChatRenderer.from_folder(model_folder)
    ids = thinking.tokenizer.encode(f"<think>\nhm\n</think>\n\n{call}")
    assert accepts(thinking, ids)
    quiet = thinking.with_options({"enable_thinking": False})
    assert not accepts(quiet, ids) and accepts(quiet, quiet.tokenizer.encode(call))


def test_calls_that_cannot_be_forced_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(RenderingError, match="gemma4 cannot be forced: use tool_choice auto"):
        family_renderer("gemma4").reply_grammar(TOOLS, calls="required")
    with pytest.raises(ValueError, match="one of the tools .*'search'.*got 'sear'"):
        renderer.reply_grammar(TOOLS, calls="required", callable_tools=("sear",))
    with pytest.raises(ValueError, match=r"one of the tools \[\]"):
        renderer.reply_grammar([], calls="required")


ANSWER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "flags", "note"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def schema_grammar(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def kinds_of_replies(
    renderer: ChatRenderer, grammar: Grammar | None, schema: Mapping[str, object], walks: int
) -> set[str]:
    """Check replies that the grammar allows, and return which of JSON and calls they are."""
    compiled = compile_tag(renderer, grammar)
    prompt = renderer.render([Message("user", "Where is Lyon?")], TOOLS)
    found = set()
    for seed in range(walks):
        ids = walk(renderer, compiled, random.Random(seed))
        if not ids:
            continue
        whole = np.array(ids, dtype=np.int32)
        reply = renderer.parse(prompt, whole, TOOLS)
        stream = renderer.reply_stream(prompt, TOOLS)
        pieces = [*(delta for token in ids for delta in stream.feed([token])), *stream.finish()]
        assert "".join(d.text for d in pieces if d.kind == "content") == reply.content
        assert len(stream.message.tool_calls) == len(reply.tool_calls)
        if reply.tool_calls:
            assert reply.content == ""
            for call in reply.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        else:
            jsonschema.validate(json.loads(reply.content), schema)
        found.add("calls" if reply.tool_calls else "JSON")
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama-3", "deepseek-v3", "kimi-k2", "qwen3.5"])
def test_an_answer_is_json_that_matches_the_schema_or_calls(family: str) -> None:
    renderer = family_renderer(family)
    tools = TOOLS if family != "qwen3.5" else TOOLS[1:2]
    either = renderer.reply_grammar(tools, output=schema_grammar(ANSWER))
    assert kinds_of_replies(renderer, either, ANSWER, walks=24) == {"JSON", "calls"}
    alone = renderer.reply_grammar([], output=schema_grammar(ANSWER))
    barred = renderer.reply_grammar(TOOLS, calls="none", output=schema_grammar(ANSWER))
    for grammar in (alone, barred):
        assert kinds_of_replies(renderer, grammar, ANSWER, walks=8) == {"JSON"}


@pytest.mark.parametrize("family", ["glm-4.5", "glm-5", "minimax-m2", "laguna-s-2.1", "hy3"])
def test_a_json_answer_can_be_forced_where_calls_cannot(family: str) -> None:
    renderer = family_renderer(family)
    answer = renderer.reply_grammar([], output=schema_grammar(ANSWER))
    assert kinds_of_replies(renderer, answer, ANSWER, walks=12) == {"JSON"}
    with pytest.raises(
        RenderingError, match="JSON or tool calls.*response_format or tools.*tool_choice none"
    ):
        renderer.reply_grammar(TOOLS, output=schema_grammar(ANSWER))


def test_without_a_schema_or_required_calls_there_is_no_grammar(renderer: ChatRenderer) -> None:
    assert renderer.reply_grammar(TOOLS) is None
    assert renderer.reply_grammar(TOOLS, calls="none") is None
    assert renderer.reply_grammar([]) is None


def test_reasoning_before_an_answer_follows_the_template(model_folder: Path) -> None:
    thinking = ChatRenderer.from_folder(model_folder)
    answer, thought = '{"city": "Paris"}', "hm\n</think>\n\n"
    expected = [
        (thinking, (True, True, False)),
        (family_renderer("qwen3.5"), (False, False, True)),
        (family_renderer("glm-4.5"), (False, True, False)),
        (thinking.with_options({"enable_thinking": False}), (True, False, False)),
    ]
    for renderer, lets in expected:
        grammar = renderer.reply_grammar([], output=schema_grammar(CITY))
        end = renderer.tokenizer.decode(renderer.stop_token_ids[:1])
        texts = (answer + end, f"<think>\n{thought}{answer}{end}", f"{thought}{answer}{end}")
        got = tuple(matches(renderer, grammar, renderer.tokenizer.encode(text)) for text in texts)
        assert got == lets, renderer.family


def test_several_calls_instead_of_an_answer_need_parallel_calls(renderer: ChatRenderer) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "x", "n": 1}}\n</tool_call>'
    two = renderer.tokenizer.encode(f"{call}\n{call}<|im_end|>")
    for parallel in (True, False):
        grammar = renderer.reply_grammar(TOOLS, parallel=parallel, output=schema_grammar(CITY))
        assert matches(renderer, grammar, two) is parallel


def test_a_bounded_string_keeps_its_bounds_and_others_contain_no_marker(renderer: ChatRenderer) -> None:
    def lets(schema: Mapping[str, object], text: str) -> bool:
        grammar = renderer.reply_grammar([], output=schema_grammar(schema))
        return matches(renderer, grammar, renderer.tokenizer.encode(f"{text}<|im_end|>"))

    assert lets({"type": "string"}, '"ab"') and not lets({"type": "string"}, '"a<tool_call>"')
    bounded = {"type": "string", "maxLength": 2}
    assert lets(bounded, '"ab"') and not lets(bounded, '"abc"')


@pytest.mark.parametrize("family", ["deepseek-r1", "kimi-k2.5"])
def test_an_answer_that_would_be_reasoning_is_refused(family: str) -> None:
    """The prompts of these families open the reasoning, whose end is not a token of this vocabulary."""
    with pytest.raises(RenderingError, match=f"{family} does not read JSON as the content"):
        family_renderer(family).reply_grammar([], output=schema_grammar(CITY))


def test_a_schema_with_an_unsupported_keyword_is_refused(renderer: ChatRenderer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5}}}
    with pytest.raises(RenderingError, match="keyword multipleOf is not supported, at #/properties/n"):
        renderer.reply_grammar([], output=schema_grammar(schema))
