"""Which messages are equal, although a client may have changed them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.core.messages import (
    Message,
    ToolCall,
    canonical_key,
    extend_digest,
    history_digests,
    reasoning_conflicts,
    tools_digest,
)

texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(texts, json_values, max_size=3)
calls = st.builds(
    ToolCall, id=texts, name=st.text(min_size=1, max_size=5), arguments=arguments.map(json.dumps) | texts
)
assistants = st.builds(
    Message,
    role=st.just("assistant"),
    content=texts,
    reasoning=texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
)
others = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "tool"]),
    content=texts,
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
)
messages = assistants | others


@given(messages)
def test_a_message_survives_json(message: Message) -> None:
    assert Message.from_dict(json.loads(json.dumps(message.to_dict()))) == message


@given(assistants, st.sampled_from([" ", "\n", ""]), arguments)
def test_changes_that_frameworks_make_do_not_change_the_canonical_key(
    message: Message, space: str, values: dict[str, Any]
) -> None:
    """Such changes are surrounding whitespace, new ids, omitted reasoning, and another JSON serialisation."""

    def written(dump: Any, call_id: str) -> Message:
        call = ToolCall(call_id, "search", dump(values))
        return Message("assistant", message.content, tool_calls=(*message.tool_calls, call))

    plain = written(json.dumps, "call_1")
    backwards = {key: values[key] for key in reversed(values)}
    for dump in (
        lambda _: json.dumps(backwards, separators=(",", ":")),
        lambda _: json.dumps(values, ensure_ascii=False, indent=1, sort_keys=True),
    ):
        other = written(dump, "")
        padded = Message("assistant", space + other.content + space, "thoughts", other.tool_calls)
        assert canonical_key(padded) == canonical_key(plain)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ('{"n": 2.0}', '{"n": 2}', True),
        ('{"n": [1.0, {"m": -3.0}]}', '{"n":[1,{"m":-3}]}', True),
        ('{"n": 2.5}', '{"n": 2}', False),
        ('{"n": "2"}', '{"n": 2}', False),
        ('{"n": true}', '{"n": 1}', False),
        ("not json", " not json ", True),
        ("not json", "not  json", False),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
    ],
)
def test_arguments_are_compared_as_json(left: str, right: str, same: bool) -> None:
    keys = [
        canonical_key(Message("assistant", tool_calls=(ToolCall("", "f", text),))) for text in (left, right)
    ]
    assert (keys[0] == keys[1]) is same


def test_numbers_that_are_no_finite_floats_are_no_error() -> None:
    for text in ('{"n": 1e999}', '{"n": NaN}', '{"n": 123456789012345678901234567890}'):
        assert canonical_key(Message("assistant", tool_calls=(ToolCall("", "f", text),)))


def test_deeply_nested_arguments_are_no_error() -> None:
    """A policy may sample any string, and recognising its message must not end the episode."""
    text = "[" * 100_000
    assert canonical_key(Message("assistant", tool_calls=(ToolCall("", "f", text),)))
    closed = "[" * 5_000 + "]" * 5_000
    assert canonical_key(Message("assistant", tool_calls=(ToolCall("", "f", closed),)))


@given(messages)
def test_a_digest_is_that_of_the_canonical_key(message: Message) -> None:
    key = canonical_key(message).encode(errors="surrogatepass")
    assert message.digest == hashlib.blake2b(key, digest_size=16).digest()


@given(st.lists(messages, max_size=6), texts)
def test_digests_identify_every_prefix(history: list[Message], tools_id: str) -> None:
    digests = history_digests(history, tools_id)
    assert len(digests) == len(history)
    for index in range(1, len(history)):
        assert history_digests(history[:index], tools_id) == digests[:index]
        assert extend_digest(digests[index - 1], history[index]) == digests[index]


@given(st.lists(messages, min_size=2, max_size=6))
def test_digests_depend_on_the_order_of_messages_and_on_the_tools(history: list[Message]) -> None:
    turned = history[::-1]
    same = [canonical_key(m) for m in history] == [canonical_key(m) for m in turned]
    assert (history_digests(history, "")[-1] == history_digests(turned, "")[-1]) is same
    assert history_digests(history, "")[-1] != history_digests(history, "tools")[-1]


def test_reasoning_that_is_left_out_is_no_conflict() -> None:
    recorded = Message("assistant", "x", reasoning="hm\n")
    assert not reasoning_conflicts(Message("assistant", "x"), recorded)
    assert not reasoning_conflicts(Message("assistant", "x", reasoning=" hm "), recorded)
    assert reasoning_conflicts(Message("assistant", "x", reasoning="aha"), recorded)


def test_the_digest_of_tools_depends_on_their_order_but_not_on_the_order_of_keys() -> None:
    search, find = {"name": "search", "strict": True}, {"name": "find"}
    assert tools_digest([]) == ""
    assert tools_digest([search, find]) == tools_digest([dict(reversed(search.items())), find])
    assert len({tools_digest(tools) for tools in ([search], [find], [search, find], [find, search])}) == 4


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_an_assistant_message_has_reasoning_and_calls(role: Any) -> None:
    with pytest.raises(ValueError, match="only an assistant"):
        Message(role, reasoning="hm")
    with pytest.raises(ValueError, match="only an assistant"):
        Message(role, tool_calls=(ToolCall("", "f", "{}"),))
    with pytest.raises(ValueError, match="role"):
        Message("robot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name"):
        ToolCall("", "", "{}")


def test_integers_beyond_64_bits_are_compared_as_floats() -> None:
    """Some JSON parsers read such integers as floats, so a client may send them back as floats."""

    def called(arguments: str) -> Message:
        return Message("assistant", tool_calls=(ToolCall("c", "f", arguments),))

    assert (
        called('{"x": 123456789012345678901234567890}').digest
        == called('{"x": 1.2345678901234568e29}').digest
    )
    assert called('{"x": 9007199254740993}').digest != called('{"x": 9007199254740992}').digest
    assert called(f'{{"x": 1{"0" * 400}}}').digest == called(f'{{"x": 1{"0" * 400}}}').digest
