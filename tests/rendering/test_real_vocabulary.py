"""The real Qwen vocabulary: a bridge equals one full rendering, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import qwen_folder

from areal_agents.core.messages import Message, ToolCall
from areal_agents.rendering import ChatRenderer

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.fixture(scope="module")
def qwen3_by_template() -> ChatRenderer:
    return ChatRenderer.from_folder(qwen_folder("qwen3"), family="template")


@pytest.fixture(scope="module")
def example_formats() -> tuple[ChatRenderer, ChatRenderer]:
    return ChatRenderer.from_folder(EXAMPLE), ChatRenderer.from_folder(EXAMPLE, family="template")


def test_the_vocabulary_is_the_real_one(qwen3: ChatRenderer, qwen25: ChatRenderer) -> None:
    assert (qwen3.vocab_size, qwen25.vocab_size) == (151_669, 151_665)
    assert qwen3.tokenizer.encode("<|im_start|>user\nHello wörld 漢字 123</think>") == [
        *(151644, 872, 198, 9707, 289, 9416, 507, 6567, 120, 95, 18600, 220, 16, 17, 18, 151668)
    ]
    assert (qwen3.family, qwen25.family) == ("qwen3", "template")


# --- conversations ----------------------------------------------------------------------------------------

text = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), st.sampled_from(" \n\t.,{}\"'")),
    max_size=24,
).map(lambda value: value.replace("<", "("))
# Text of a model begins and ends without space, because a format strips it when the reply is parsed.
said = text.map(str.strip)
arguments = st.dictionaries(text, st.one_of(text, st.integers(), st.booleans(), st.none()), max_size=3)


@st.composite
def replies(draw: st.DrawFn, reasoning: bool = False) -> Message:
    calls = draw(st.lists(arguments, max_size=3))
    written = [json.dumps(value, ensure_ascii=False) for value in calls]
    return Message(
        "assistant",
        draw(said) if calls else draw(said.filter(bool)),
        draw(said) if reasoning else "",
        tuple(ToolCall(f"call_{i}", "search", value) for i, value in enumerate(written)),
    )


@st.composite
def continuations(draw: st.DrawFn, reply: Message, users: bool = True) -> list[Message]:
    """Results of the reply's calls, then messages of a user or of the agent's harness."""
    results = [Message("tool", draw(text), tool_call_id=call.id) for call in reply.tool_calls]
    more = [[], ["system"]] if results else [["system"]]
    if users:
        more += (
            [["user"]] if results else [["user"], ["user", "user"], ["system", "user"], ["user", "system"]]
        )
    return [*results, *(Message(role, draw(text)) for role in draw(st.sampled_from(more)))]  # type: ignore[arg-type]


@st.composite
def openings(draw: st.DrawFn) -> list[Message]:
    system = draw(st.lists(text, max_size=1))
    return [*(Message("system", value) for value in system), Message("user", draw(text))]


def written(renderer: ChatRenderer, reply: Message, *, think: bool = False) -> np.ndarray:
    """The tokens that a model samples for this reply."""
    head = f"<think>\n{reply.reasoning}\n</think>\n\n" if think and reply.reasoning else ""
    blocks = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    ]
    body = "\n".join([*([reply.content] if reply.content else []), *blocks])
    return np.array(renderer.tokenizer.encode(head + body + "<|im_end|>"), dtype=np.int32)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), opening=openings(), turns=st.integers(1, 4), tools=st.booleans())
def test_bridged_turns_equal_one_full_rendering(
    qwen25: ChatRenderer, data: st.DataObject, opening: list[Message], turns: int, tools: bool
) -> None:
    offered = [TOOL] if tools else []
    messages, prompt = opening, qwen25.render(opening, offered)
    for _ in range(turns):
        reply = data.draw(replies())
        new = data.draw(continuations(reply))
        completion = written(qwen25, reply)
        suffix = qwen25.bridge(prompt, completion, new, offered)
        assert suffix is not None
        prompt = np.concatenate([prompt, completion, suffix])
        messages = [*messages, reply, *new]
        assert prompt.tolist() == qwen25.render(messages, offered).tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), opening=openings(), turns=st.integers(0, 3), tools=st.booleans())
def test_the_template_of_qwen3_renders_and_parses_as_the_library(
    qwen3: ChatRenderer,
    qwen3_by_template: ChatRenderer,
    data: st.DataObject,
    opening: list[Message],
    turns: int,
    tools: bool,
) -> None:
    offered = [TOOL] if tools else []
    messages, prompt = opening, qwen3.render(opening, offered)
    for _ in range(turns):
        reply = data.draw(replies(reasoning=True))
        new = data.draw(continuations(reply, users=False))
        completion = written(qwen3, reply, think=True)
        suffix = qwen3.bridge(prompt, completion, new, offered)
        other = qwen3_by_template.bridge(prompt, completion, new, offered)
        assert suffix is not None and other is not None and suffix.tolist() == other.tolist()
        ours, theirs = (r.parse(prompt, completion, offered) for r in (qwen3_by_template, qwen3))
        assert (ours.content, ours.reasoning) == (theirs.content, theirs.reasoning)
        assert [c.arguments for c in ours.tool_calls] == [c.arguments for c in theirs.tool_calls]
        prompt = np.concatenate([prompt, completion, suffix])
        messages = [*messages, reply, *new]
    assert qwen3_by_template.render(messages, offered).tolist() == qwen3.render(messages, offered).tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), opening=openings(), turns=st.integers(0, 3), tools=st.booleans())
def test_the_template_of_the_example_policy_renders_as_its_family(
    example_formats: tuple[ChatRenderer, ChatRenderer],
    data: st.DataObject,
    opening: list[Message],
    turns: int,
    tools: bool,
) -> None:
    family, template = example_formats
    offered = [TOOL] if tools else []
    messages = opening
    for _ in range(turns):
        reply = data.draw(replies())
        messages = [*messages, reply, *data.draw(continuations(reply))]
    assert template.render(messages, offered).tolist() == family.render(messages, offered).tolist()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_completion_is_parsed_as_by_the_library(
    qwen3: ChatRenderer, qwen3_by_template: ChatRenderer, data: st.DataObject
) -> None:
    markers = qwen3.tokenizer.encode("<tool_call></tool_call><think></think><|im_end|>{}\n")
    ids = st.one_of(st.sampled_from(markers), st.integers(0, qwen3.vocab_size - 1))
    completion = np.array(data.draw(st.lists(ids, max_size=16)), dtype=np.int32)
    prompt = qwen3.render([Message("user", "Where?")])
    ours, theirs = (r.parse(prompt, completion) for r in (qwen3_by_template, qwen3))
    assert (ours.content, ours.reasoning, len(ours.tool_calls)) == (
        theirs.content,
        theirs.reasoning,
        len(theirs.tool_calls),
    )


def test_the_suffix_does_not_depend_on_the_length_of_the_history(qwen25: ChatRenderer) -> None:
    reply = Message("assistant", "", tool_calls=(ToolCall("call_0", "search", "{}"),))
    short = [Message("user", "Where?")]
    long = [
        message for i in range(40) for message in (Message("user", f"{i}?"), Message("assistant", "Yes."))
    ]
    new = [Message("tool", "Lyon", tool_call_id="call_0")]
    completion = written(qwen25, reply)
    suffixes = [
        qwen25.bridge(qwen25.render(history, [TOOL]), completion, new, [TOOL])
        for history in (short, [*long, *short])
    ]
    assert suffixes[0] is not None and suffixes[1] is not None
    assert suffixes[0].tolist() == suffixes[1].tolist()


def test_a_streamed_reply_of_a_template_equals_the_whole_reply(qwen25: ChatRenderer) -> None:
    reply = Message("assistant", "I look <b> 漢字.", tool_calls=(ToolCall("call_0", "search", '{"a": "é"}'),))
    prompt, ids = qwen25.render([Message("user", "Where?")], [TOOL]), written(qwen25, reply)
    stream = qwen25.reply_stream(prompt, [TOOL])
    deltas = [delta for token in ids.tolist() for delta in stream.feed([token])] + stream.finish()
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == "I look <b> 漢字."
    assert [delta.call.arguments for delta in deltas if delta.call] == ['{"a": "é"}']


def test_a_renderer_describes_what_it_can_extend(qwen3: ChatRenderer, qwen25: ChatRenderer) -> None:
    assert "tool" in qwen25.describe()
    assert qwen3.describe() == "qwen3 of the renderers library"
