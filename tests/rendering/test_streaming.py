from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from family_models import SPECIAL_TOKENS, family_renderer
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RenderingError
from areal_agents.rendering import ChatRenderer
from areal_agents.rendering.replies import ParsedReply, ReplyReader
from areal_agents.rendering.streaming import Delta

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
QUESTION = [Message("user", "Where is Lyon?")]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Lyon"}}\n</tool_call>'

# What a model may write: text, whole markers, parts of them, and calls in the form of each family.
PIECES = [
    *(
        "hello world",
        " ",
        "\n",
        "\n\n",
        "café 日本 🎉",
        "\u3000",
        "<",
        "</",
        '"',
        "{}",
        "assistant\n",
        "thought\n",
    ),
    *(
        "<think>",
        "</think>",
        "<tool_",
        "call>",
        "<tool_call>",
        "</tool_call>",
        "search",
        "[e~[",
        "<assistant>",
    ),
    *('{"name": "search", "arguments": {"query": "x"}}', '{"name": "search", "parameters": {}}'),
    *("<function=search>\n<parameter=query>\nLyon\n</parameter>\n</function>", "functions.search:0"),
    *('{"query": "x"}', "function", "```json\n{}\n```", 'call:search{query:<|"|>x<|"|>}'),
    *(
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="search">\n',
        "</｜DSML｜invoke>",
        "</｜DSML｜tool_calls>",
    ),
    *('<invoke name="search">', '<parameter name="query">x</parameter>', "</invoke>"),
    "<arg_key>query</arg_key>\n<arg_value>x</arg_value>",
]


@dataclass
class Received:
    """The parts of a reply that a client of a stream has received."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if delta.call is not None:
                assert delta.kind == "call"
                self.calls.append(delta.call)
            else:
                assert delta.text
                setattr(self, delta.kind, getattr(self, delta.kind) + delta.text)


def any_reply(renderer: ChatRenderer, prompt: list[int], rng: random.Random) -> list[int]:
    """Random token ids, with misplaced markers, single bytes and incomplete markup."""
    markers = sorted(renderer.tokenizer.added_token_ids)
    ids = prompt[-rng.randrange(1, 5) :] if rng.random() < 0.1 else []  # the header repeated
    for _ in range(rng.randrange(14)):
        kind = rng.random()
        if kind < 0.4:
            ids.append(rng.choice(markers))
        elif kind < 0.5:
            ids.append(rng.randrange(renderer.vocab_size))
        else:
            ids += renderer.tokenizer.encode(rng.choice(PIECES))
    return ids


def meaning(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, [(c.name, c.arguments) for c in message.tool_calls]


def check_stream(
    renderer: ChatRenderer,
    prompt: np.ndarray,
    ids: list[int],
    rng: random.Random,
    tools: Sequence[dict] = TOOLS,
) -> None:
    stream, received = renderer.reply_stream(prompt, tools), Received()
    position = 0
    while position < len(ids):
        size = rng.choice([1, 1, 1, 2, 5])
        received.take(stream.feed(ids[position : position + size]))
        position += size
    received.take(stream.finish())
    message = stream.message
    assert (received.reasoning, received.content) == (message.reasoning, message.content)
    assert tuple(received.calls) == message.tool_calls
    assert meaning(message) == meaning(renderer.parse(prompt, np.array(ids, dtype=np.int32), tools))
    assert tools or not message.tool_calls


@pytest.mark.parametrize("family", sorted(SPECIAL_TOKENS))
def test_a_stream_of_any_tokens_joins_to_the_parsed_reply(family: str) -> None:
    renderer = family_renderer(family)
    prompt = renderer.render(QUESTION, TOOLS)
    for seed in range(40):
        rng = random.Random(seed)
        check_stream(renderer, prompt, any_reply(renderer, prompt.tolist(), rng), rng)


@pytest.mark.parametrize("family", sorted(SPECIAL_TOKENS))
def test_a_stream_without_tools_joins_to_a_reply_without_calls(family: str) -> None:
    renderer = family_renderer(family)
    prompt = renderer.render(QUESTION)
    for seed in range(20):
        rng = random.Random(seed)
        check_stream(renderer, prompt, any_reply(renderer, prompt.tolist(), rng), rng, tools=())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_text_and_markers_in_any_order_join_to_the_parsed_reply(
    renderer: ChatRenderer, data: st.DataObject
) -> None:
    pieces = st.one_of(st.sampled_from([*PIECES, CALL, "<|im_end|>"]), st.text(max_size=6))
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    prompt = renderer.render(QUESTION, TOOLS)
    check_stream(renderer, prompt, renderer.tokenizer.encode(text), random.Random(len(text)))


def test_replies_of_a_model_with_its_own_template_are_streamed(qwen25: ChatRenderer) -> None:
    renderer = qwen25
    assert renderer.family == "template"
    prompt = renderer.render(QUESTION, TOOLS)
    for seed in range(60):
        rng = random.Random(seed)
        check_stream(renderer, prompt, any_reply(renderer, prompt.tolist(), rng), rng)
    stream = renderer.reply_stream(prompt, TOOLS)
    assert feed_text(renderer, stream, f"One moment.\n{CALL}") == [
        ("content", "One moment."),
        ("call", '{"query": "Lyon"}'),
    ]


# In these families, text before any marker may be dropped or become a call, so it is sent at the end.
LATE_CONTENT = {"gemma4", "inkling"}


@pytest.mark.parametrize("family", sorted(set(SPECIAL_TOKENS) - LATE_CONTENT))
def test_plain_text_is_sent_as_it_arrives(family: str) -> None:
    renderer = family_renderer(family)
    stream, received = renderer.reply_stream(renderer.render(QUESTION)), Received()
    text = "Lyon is in France, and so is Paris."
    seen = []
    for token in renderer.tokenizer.encode(text):
        received.take(stream.feed([token]))
        seen.append(len(received.content + received.reasoning))
    assert received.content + received.reasoning == text
    assert len(set(seen)) > len(text) / 4
    assert stream.finish() == []


def test_inkling_streams_content_after_its_marker() -> None:
    renderer = family_renderer("inkling")
    stream = renderer.reply_stream(renderer.render(QUESTION))
    ids = renderer.tokenizer.encode("<|content_text|>Lyon is in France")
    assert "".join(delta.text for token in ids for delta in stream.feed([token])) == "Lyon is in France"


def feed_text(renderer: ChatRenderer, stream, text: str) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    """Feed a string token by token, and return its deltas, with neighbours of one kind joined."""
    joined: list[tuple[str, str]] = []
    for token in renderer.tokenizer.encode(text):
        for delta in stream.feed([token]):
            text = delta.call.arguments if delta.call else delta.text
            if joined and joined[-1][0] == delta.kind != "call":
                joined[-1] = (delta.kind, joined[-1][1] + text)
            else:
                joined.append((delta.kind, text))
    return joined


def test_reasoning_content_and_each_call_are_sent_once_they_are_certain(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    assert feed_text(renderer, stream, "<think>\nI search") == [("reasoning", "I search")]
    assert feed_text(renderer, stream, ".\n</think>\n\nOne moment.\n") == [
        ("reasoning", "."),
        ("content", "One moment."),
    ]
    assert feed_text(renderer, stream, CALL.removesuffix("</tool_call>")) == []
    assert feed_text(renderer, stream, "</tool_call>") == [("call", '{"query": "Lyon"}')]
    assert feed_text(renderer, stream, "\n" + CALL) == [("call", '{"query": "Lyon"}')]
    assert feed_text(renderer, stream, "<|im_end|>") == []
    assert stream.finish() == []
    assert len({call.id for call in stream.message.tool_calls}) == 2


def test_a_malformed_call_is_sent_as_content_at_the_end(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    assert feed_text(renderer, stream, "Hm. <tool_call>\noops\n</tool_call>") == [("content", "Hm.")]
    assert stream.finish() == [Delta("content", "\n<tool_call>\noops\n</tool_call>")]


def test_a_call_in_open_reasoning_waits_for_the_end_of_the_reasoning(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    assert feed_text(renderer, stream, f"<think>\nso {CALL}") == [("reasoning", "so")]
    assert feed_text(renderer, stream, "\n</think>\n\nNo.") == [("reasoning", f" {CALL}"), ("content", "No.")]
    assert stream.finish() == []


def test_incomplete_characters_and_trailing_spaces_are_held_back(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION))
    bread = renderer.tokenizer.encode("日")
    assert len(bread) == 3
    assert [stream.feed([token]) for token in bread] == [[], [], [Delta("content", "日")]]
    assert feed_text(renderer, stream, "  \n") == []
    assert feed_text(renderer, stream, "a") == [("content", "  \na")]


def test_json_of_llama_is_held_back_until_it_is_known_not_to_be_a_call() -> None:
    renderer = family_renderer("llama-3")
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    assert feed_text(renderer, stream, '{"name": "search", "parameters": {"query": "x"}}') == []
    assert [delta.call.name for delta in stream.finish() if delta.call] == ["search"]
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    assert feed_text(renderer, stream, "{a, b} is a set") == []
    assert stream.finish() == [Delta("content", "{a, b} is a set")]


def test_very_deeply_nested_brackets_are_streamed_as_content(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS)
    deep = "<tool_call>\n" + "[" * 20_000 + "\n</tool_call>"
    assert stream.feed(renderer.tokenizer.encode("Hm. " + deep)) == [Delta("content", "Hm.")]
    assert stream.finish() == [Delta("content", "\n" + deep)]


def test_the_cost_of_a_stream_of_markers_is_not_quadratic(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = renderer.tokenizer.encode("<think></think>" + CALL * 3) * 80
    stream, received = renderer.reply_stream(renderer.render(QUESTION, TOOLS), TOOLS), Received()
    lengths: list[int] = []
    read = ReplyReader.read

    def counted(
        self: ReplyReader, prompt_tail: list[int], tokens: list[int], tools: list[dict]
    ) -> ParsedReply:
        lengths.append(len(tokens))
        return read(self, prompt_tail, tokens, tools)

    monkeypatch.setattr(ReplyReader, "read", counted)
    for token in ids:
        received.take(stream.feed([token]))
    received.take(stream.finish())
    assert len(received.calls) == 240
    assert len(ids) > 5000 and sum(lengths) < 1_100_000


def test_a_stream_has_a_message_after_its_end_and_takes_no_more_tokens(renderer: ChatRenderer) -> None:
    stream = renderer.reply_stream(renderer.render(QUESTION))
    with pytest.raises(RenderingError, match="before its stream is finished"):
        _ = stream.message
    assert stream.feed([]) == [] and stream.finish() == []
    assert stream.message == Message("assistant")
    with pytest.raises(RenderingError, match="no more tokens after finish"):
        stream.feed([1])
