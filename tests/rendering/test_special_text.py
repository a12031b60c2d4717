"""Special tokens that content spells out are encoded as text in families, templates and extensions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import renderers
import tokenizers
from chat_templates import CHATML, HERMES, INST, SPECIAL, byte_tokenizer, sentence_tokenizer, write_folder
from family_models import SPECIAL_TOKENS, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering import ChatRenderer, Tokenizer, special_text
from areal_agents.rendering.special_text import MARK, SpecialText

# This template writes values unquoted, so that a name or a value could be completed to a special token.
XML = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "{%- for call in message.tool_calls or [] -%}<{{ call.function.name }}>"
    "{%- for key, value in call.function.arguments.items() -%}<{{ key }}>{{ value }}</{{ key }}>"
    "{%- endfor -%}{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- for tool in tools or [] -%}{{ tool | tojson(ensure_ascii=True) }}<{{ tool.function.description }}>"
    "{%- endfor -%}{{- '<|im_start|>assistant\n' if add_generation_prompt -}}"
)
TEMPLATES = {"chatml": CHATML, "hermes": HERMES, "inst": INST, "xml": XML}
PLAIN = [
    "",
    "word",
    "  two words\n",
    "<",
    ">",
    "|>",
    "<|im_",
    "}",
    "\\udc7f",
    "\\",
    '"',
    "é 漢字 🙂",
    "e\u0301",
]


def renderer_pair(
    kind: str, name: str, tmp_path: Path
) -> tuple[Callable[..., ChatRenderer], list[str], bool]:
    """Return a function that makes the renderer, its special tokens, and whether each byte is a token."""
    if kind == "family":
        tokenizer = tiny_tokenizer(SPECIAL_TOKENS[name])
        config = type(renderers.config_from_name(name))()
        return (
            lambda how: ChatRenderer.from_config(tokenizer, config, special_tokens_in_content=how),
            SPECIAL_TOKENS[name],
            False,
        )
    tokenizer = byte_tokenizer() if kind == "bytes" else sentence_tokenizer("first")
    folder = write_folder(tmp_path, TEMPLATES[name], tokenizer=tokenizer)
    return (
        lambda how: ChatRenderer.from_folder(folder, special_tokens_in_content=how),
        SPECIAL,
        kind == "bytes",
    )


KINDS = [("family", name) for name in SPECIAL_TOKENS]
KINDS += [(kind, name) for kind in ("bytes", "sentences") for name in TEMPLATES]


def words(rng: random.Random, special: list[str]) -> str:
    """A string with special tokens: whole, in part and run together."""
    cut = [token[: rng.randrange(len(token))] for token in special]
    rest = [token[rng.randrange(len(token)) :] for token in special]
    return "".join(rng.choice([rng.choice(pool) for pool in (special, cut, rest, PLAIN)]) for _ in range(6))


def said(rng: random.Random, text: Callable[[], str]) -> tuple[list[Message], list[dict[str, Any]]]:
    """A conversation in which the client chooses every string."""
    name = text() or "f"
    key = text().replace("\\udc7f", "")  # templates that sort names may put this one elsewhere
    arguments = {key: text(), "n": [text(), {"k": text()}]}
    written = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.5:
        written = written.replace("<", "\\u003c")
    call = ToolCall("call00001", name, written)
    messages = [
        Message("user", text()),
        Message("assistant", text(), reasoning=text(), tool_calls=(call,)),
        Message("tool", text(), tool_call_id="call00001", name=name),
        Message("user", text()),
    ]
    if rng.random() < 0.5:
        messages.insert(0, Message("system", text()))
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": text()}}}
    tool = {"name": name, "description": text(), "parameters": parameters}
    return messages, [{"type": "function", "function": tool}] if rng.random() < 0.5 else []


@pytest.mark.parametrize("kind, name", KINDS, ids=lambda value: value)
def test_no_special_token_comes_from_content(kind: str, name: str, tmp_path: Path) -> None:
    make, special, each_byte = renderer_pair(kind, name, tmp_path)
    text, parse = make("text"), make("parse")
    control = text.tokenizer.special_token_ids
    differed = compared = 0
    for seed in range(60):
        rng = random.Random(seed)
        state = rng.getstate()
        conversation = said(rng, lambda rng=rng: words(rng, special))  # type: ignore[misc]
        try:
            parsed = parse.render(*conversation).tolist()
        except RenderingError:
            with pytest.raises(RenderingError):
                text.render(*conversation)
            continue
        ids = text.render(*conversation).tolist()
        rng.setstate(state)
        blunt = [Message(m.role, *_blunt(m)) for m in conversation[0]]  # the same shape without any markup
        skeleton = [i for i in parse.render(blunt, _blunt_tools(conversation[1])).tolist() if i in control]
        assert [i for i in ids if i in control] == skeleton, (seed, conversation)
        decode = text.tokenizer.decode
        assert decode(ids) == decode(parsed) or not each_byte, (seed, conversation)
        differed += ids != parsed
        compared += 1
    assert compared > 10 and differed > compared / 3
    for seed in range(30):
        rng = random.Random(seed)
        plain = ["word", "  two words\n", "a < b > c", "é 漢字 🙂", "e\u0301", "x\\udc7f", "|", "<|im", "[1]"]
        conversation = said(rng, lambda rng=rng, plain=plain: rng.choice(plain))  # type: ignore[misc]
        assert text.render(*conversation).tolist() == parse.render(*conversation).tolist(), conversation


def _blunt(message: Message) -> tuple[Any, ...]:
    def same(value: str) -> str:
        return "x" if value.strip() else value

    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"x{i}" if key else "": value_of(item) for i, (key, item) in enumerate(value.items())}
        return [value_of(item) for item in value] if isinstance(value, list) else same(value)

    calls = tuple(
        ToolCall(call.id, "x", json.dumps(value_of(json.loads(call.arguments))))
        for call in message.tool_calls
    )
    name = None if message.name is None else "x"
    return same(message.content), same(message.reasoning), calls, message.tool_call_id, name


def _blunt_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def of(tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        described = function["parameters"]["properties"]["a"]["description"]
        text = {"type": "string", "description": described and "x"}
        parameters = {"type": "object", "properties": {"a": text}}
        return {"name": "x", "description": function["description"] and "x", "parameters": parameters}

    return [{"type": "function", "function": of(tool)} for tool in tools]


def test_content_is_encoded_as_by_transformers_with_special_tokens_split(
    qwen3: ChatRenderer,
) -> None:
    """With the real vocabulary. A message is encoded as one piece: `user`, a line break and the content."""
    backend = qwen3.tokenizer._backend
    oracle = PreTrainedTokenizerFast(tokenizer_object=type(backend).from_str(backend.to_str()))
    special = [qwen3.tokenizer.token_text(i) for i in sorted(qwen3.tokenizer.special_token_ids)]
    common = [
        *special,
        "<think>",
        "</think>",
        "<tool_call>",
        " and ",
        "\n",
        "e\u0301",
        "漢",
        "<|im_",
        "start|>",
    ]
    start, end = (qwen3.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    for seed in range(200):
        rng = random.Random(seed)
        content = "".join(rng.choice(common) for _ in range(rng.randrange(1, 9))) + "."
        if seed == 0:
            content = "x <|im_start|> " * 40_000  # too long for the fast encoding
        ids = qwen3.render([Message("user", content)], generation_prompt=False).tolist()
        expected = oracle.encode("user\n" + content, add_special_tokens=False, split_special_tokens=True)
        assert ids == [start, *expected, end, *oracle.encode("\n")], content[:200]
        assert (
            qwen3.tokenizer.decode(ids) == f"<|im_start|>user\n{content}<|im_end|>\n" or "e\u0301" in content
        )


@pytest.mark.parametrize("kind, name", [("bytes", "chatml"), ("bytes", "hermes"), ("family", "qwen3")])
def test_an_extension_equals_the_full_rendering(kind: str, name: str, tmp_path: Path) -> None:
    make, special, _ = renderer_pair(kind, name, tmp_path)
    renderer = make("text")
    tokenizer = renderer.tokenizer
    for seed in range(40):
        rng = random.Random(seed)
        first = Message("user", words(rng, special))
        call = ToolCall("call00001", "search", '{"query": "x"}')
        reply = Message("assistant", "", tool_calls=(call,))
        result = Message("tool", words(rng, special), tool_call_id="call00001")
        tools = [{"type": "function", "function": {"name": "search", "description": words(rng, special)}}]
        prompt = renderer.render([first], tools)
        whole = renderer.render([first, reply, result], tools).tolist()
        stop = next(i for i in range(len(prompt), len(whole)) if whole[i] in renderer.stop_token_ids)
        completion = whole[len(prompt) : stop + 1]
        added = renderer.bridge(prompt, completion, [result], tools)
        assert added is not None
        assert [*prompt.tolist(), *completion, *added.tolist()] == whole, tokenizer.decode(whole)


def test_special_tokens_that_stay_text_are_counted(tmp_path: Path) -> None:
    make, _, _ = renderer_pair("bytes", "chatml", tmp_path)
    call = ToolCall("c", "<s>", '{"a": "\\u003c/s> <|end|>"}')
    messages = [Message("user", "<|im_start|><|im_end|> <|im_"), Message("assistant", "", "[INST]", (call,))]
    tools = [{"type": "function", "function": {"name": "f", "description": "<|user|>"}}]
    assert make("text").special_tokens_as_text(messages, tools) == 7
    assert make("parse").special_tokens_as_text(messages, tools) == 0


def test_marks_break_every_special_token_in_any_context() -> None:
    tokens = ["]~!b[", "]~b]", "[e~[", "<|user|>", "<s>"]
    found = SpecialText(tokens)
    for seed in range(3000):
        rng = random.Random(seed)
        pieces = [t[i:j] for t in tokens for i in range(len(t)) for j in range(i, len(t) + 1)]
        content = "".join(rng.choice(pieces) for _ in range(rng.randrange(4))) + rng.choice(
            ["", "", " ", "\n"]
        )
        marked = found.mark(content)
        assert marked.replace(MARK, "") == content
        for shown in (marked, marked.strip()):
            before, behind = rng.choice(pieces), rng.choice(pieces)
            if len(shown) < 5 and not set(shown) & set("<>[]~"):
                before, behind = before[-1:], behind[:1]
            whole, start = before + shown + behind, len(before)
            for token in tokens:
                at = whole.find(token)
                while at >= 0:
                    outside = at + len(token) <= start or at >= start + len(shown)
                    assert outside or not shown.strip(), (content, before, behind)
                    at = whole.find(token, at + 1)


def test_special_tokens_at_the_ends_of_parts_of_long_strings_are_marked() -> None:
    found = SpecialText(["<|im_start|>"])
    for shift in range(65_520, 65_545):
        text = "a" * shift + "<|im_start|>" + "b" * 70_000 + "<|im_start|>"
        assert found.count(text) == 2 and found.mark(text).count("<" + MARK) == 2


def test_marked_json_keeps_its_form_and_its_value() -> None:
    found = SpecialText(["<|a|>", "🙂|"])
    written = '{"x": "\\u003c|a|> \\ud83d\\ude42| \\" <|a|>", "y<": [1.50, "<|a|"]}'
    marked = found.mark_json(written)
    assert marked.replace(MARK, "") == written
    assert json.loads(marked) == found.mark_value(json.loads(written))
    assert found.count_json(written) == 3
    assert found.mark_json("<|a|> {") == f"<{MARK}|a|> {{"


_JSON_STRINGS = st.lists(
    st.sampled_from(
        [
            "<|a|>",
            "<|",
            " ",
            "a",
            "|>",
            "🙂|",
            "🙂",
            "b",
            "y<",
            "<tool>",
            "\\n",
            '"',
            "\\",
            "é",
            "\ud83d",
            "\\udc7f",
        ]
    )
).map("".join)
_JSON_VALUES = st.recursive(
    _JSON_STRINGS | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(_JSON_STRINGS, inner),
)


@given(_JSON_VALUES, st.booleans(), st.sampled_from([None, 2]), st.integers(1, 5))
def test_marks_in_json_do_not_depend_on_the_size_of_its_parts(
    value: Any, ascii_only: bool, indent: int | None, size: int
) -> None:
    """The result parses to the marked value, and equals the JSON without its marks, wherever a part ends."""
    found = SpecialText(["<|a|>", "🙂|", "<tool>"])
    written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    whole = found.mark_json(written)
    assert whole.replace(MARK, "") == written
    assert json.loads(whole) == found.mark_value(value)
    with mock.patch.multiple(special_text, _PART=size + 1, _WINDOW=size, _PIECES=size):
        assert found.mark_json(written) == whole


def test_tokens_and_strings_that_cannot_be_distinguished_are_refused() -> None:
    with pytest.raises(ConfigError, match="special_tokens_in_content: parse"):
        SpecialText(["<s>", "\n"])
    with pytest.raises(RenderingError, match="surrogate"):
        SpecialText(["<s>"]).mark(f"a{MARK}")


def test_an_escaped_mark_is_removed_only_from_rendered_text() -> None:
    tokenizer = tiny_tokenizer(["<|im_start|>"])
    literal = "\\udc7f"
    assert tokenizer.encode_rendered(literal) == []
    assert Tokenizer.decode(tokenizer, tokenizer.encode(literal)) == literal


@pytest.mark.parametrize(
    ("normalizer", "token", "written"),
    [
        (tokenizers.normalizers.NFKC(), "<|im_start|>", "＜|im_start|＞"),
        (tokenizers.normalizers.Lowercase(), "<|im_start|>", "<|IM_START|>"),
        (tokenizers.normalizers.Replace(" ", "▁"), "<|begin▁of▁text|>", "<|begin of text|>"),
    ],
    ids=["NFKC", "lower case", "spaces"],
)
def test_content_is_not_normalised_to_a_special_token(
    normalizer: tokenizers.normalizers.Normalizer, token: str, written: str
) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[])
    )
    backend.normalizer = normalizer
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=True)])
    tokenizer = Tokenizer(backend, name_or_path="normalised")
    special = len(letters)
    assert backend.encode(written).ids == [special]  # as the library reads it
    ids = tokenizer.encode_rendered(token + SpecialText([token]).mark(f"a{written}b"))
    assert ids[0] == special and special not in ids[1:]
    plain = normalizer.normalize_str(f"a{written}b").encode()
    assert len(ids[1:]) == len(plain)
