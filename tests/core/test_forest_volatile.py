"""Volatile text in a forest, compared with a forest without it and with a record of the first text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, canonical_key
from areal_agents.core.trajectory import Turn

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=300)


def noisy(before: str, text: str, after: str) -> Message:
    """A message with one volatile part."""
    start = len(before)
    return Message("user", before + text + after, volatile=((start, start + len(text)),))


def plain(message: Message) -> Message:
    """The message with the same constant in place of each volatile part."""
    content = message.content
    for start, end in reversed(message.volatile):
        content = f"{content[:start]}\0{content[end:]}"
    return replace(message, content=content, volatile=())


words = st.sampled_from(["", "p", "q"])
texts = st.sampled_from(["", "1", "2", "33"])
messages = st.builds(noisy, words, texts, words) | words.map(lambda text: Message("user", text))
replies = st.sampled_from(["x", "y"]).map(lambda text: Message("assistant", text))


def turn(index: int, parent: Turn | None, new: tuple[Message, ...], reply: Message, tools_id: str) -> Turn:
    return Turn(
        id=f"t{index}",
        parent=parent.id if parent else None,
        new_messages=new,
        new_prompt_ids=[index, index],
        completion=Completion([index], [-0.5], [index], "stop"),
        reply=reply,
        sampling=SamplingParams(8),
        tools_id=tools_id,
    )


@STEADY
@given(st.data())
def test_volatile_text_is_replaced_by_the_text_that_was_seen_first(data: st.DataObject) -> None:
    """As in the proxy, each call is looked up and then recorded with the text that was seen first."""
    forest, calm = Forest(), Forest()
    first: dict[tuple[str, ...], str] = {}  # tools and canonical keys of a conversation → its last content
    for index in range(data.draw(st.integers(1, 7))):
        known = data.draw(st.none() | st.sampled_from(forest.turns)) if len(forest) else None
        earlier = (*forest.history(known.id), known.reply) if known else ()
        tools_id = known.tools_id if known else data.draw(st.sampled_from(["", "tools"]))
        changed = [
            noisy(m.content[: m.volatile[0][0]], data.draw(texts), m.content[m.volatile[0][1] :])
            if m.volatile and data.draw(st.booleans())
            else m
            for m in earlier
        ]
        sent = (*changed, *data.draw(st.lists(messages, min_size=1, max_size=2)))
        shown, count = forest.as_first_seen(sent, tools_id)
        expected = []
        for place in range(len(sent)):
            key = (tools_id, *(canonical_key(plain(message)) for message in sent[: place + 1]))
            expected.append(
                first.get(key, sent[place].content) if sent[place].volatile else sent[place].content
            )
        assert [message.content for message in shown] == expected
        assert count == sum(a.content != b.content for a, b in zip(shown, sent, strict=True))
        where = forest.continuation(shown, tools_id)
        calm_where = calm.continuation([plain(message) for message in sent], tools_id)
        assert (where.parent and where.parent.id) == (calm_where.parent and calm_where.parent.id)
        assert where.fork == calm_where.fork
        reply = data.draw(replies)
        forest.record(turn(index, where.parent, where.new_messages, reply, tools_id))
        calm.record(turn(index, calm_where.parent, calm_where.new_messages, reply, tools_id))
        for place, message in enumerate(shown):
            key = (tools_id, *(canonical_key(plain(m)) for m in sent[: place + 1]))
            first.setdefault(key, message.content)
    # The stored turns are sufficient: a forest that is built from them returns the same messages.
    again = Forest(
        replace(t, new_messages=tuple(Message.from_dict(m.to_dict()) for m in t.new_messages))
        for t in forest.turns
    )
    assert again.as_first_seen(sent, tools_id) == forest.as_first_seen(sent, tools_id)


def test_of_two_concurrent_calls_the_text_of_the_first_recorded_one_is_used() -> None:
    """Both calls were rendered before either was recorded, so each has its own text."""
    forest = Forest()
    for index, text in enumerate(("1", "2")):
        asked = Message("user", f"question {index}")
        forest.record(turn(index, None, (noisy("at ", text, ""), asked), Message("assistant", "x"), ""))
    shown, replaced = forest.as_first_seen((noisy("at ", "3", ""), Message("user", "question 1")))
    assert (shown[0].content, replaced) == ("at 1", 1)


def test_a_message_is_identified_by_the_text_around_its_volatile_part() -> None:
    one, other = noisy("at ", "12:00", " go"), noisy("at ", "9:30", " go ")
    assert one.digest == other.digest and canonical_key(one) == canonical_key(other)
    for different in (
        noisy("at", " 12:00", " go"),
        noisy("at ", "12:00", " stop"),
        Message("user", "at 12:00 go"),
        Message("user", "at  go"),
        replace(one, role="system"),
        Message("user", "at 12:00 go", volatile=((3, 5), (6, 8))),
    ):
        assert different.digest != one.digest and canonical_key(different) != canonical_key(one)


def test_volatile_parts_are_checked() -> None:
    for content, volatile, role in (
        ("abc", ((1, 5),), "user"),
        ("abc", ((2, 1),), "user"),
        ("abc", ((1, 2), (0, 1)), "user"),
        ("abc", ((0, 1),), "assistant"),
    ):
        with pytest.raises(ValueError, match="volatile parts must be in order"):
            Message(role, content, volatile=volatile)  # type: ignore[arg-type]
