"""A reply is cut to what the request allows, in the same way whole and in pieces of any length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.messages import Message, ToolCall
from areal_agents.proxy.calls.request import ModelRequest, SamplingWish
from areal_agents.proxy.calls.stop_strings import DeliveredStream, delivered_reply
from areal_agents.rendering import Delta

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=400)

words = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)
policies = st.sampled_from([{}, {"calls": "none"}, {"parallel_calls": False}, {"calls": "required"}])


def request(stop: tuple[str, ...] = (), **fields: Any) -> ModelRequest:
    return ModelRequest((Message("user", "x"),), (), "", SamplingWish(stop=stop), **fields)


def reply(reasoning: str, content: str, calls: int) -> Message:
    made = tuple(ToolCall(f"id {index}", "search", "{}") for index in range(calls))
    return Message("assistant", content, reasoning=reasoning, tool_calls=made)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in zip(places, places[1:], strict=False)]


@STEADY
@given(
    words, words, st.integers(0, 3), stops, policies, st.lists(st.integers(0, 99), max_size=6), st.booleans()
)
def test_the_joined_pieces_are_the_whole_reply(
    reasoning: str,
    content: str,
    calls: int,
    stop: tuple[str, ...],
    policy: dict[str, Any],
    cuts: list[int],
    at_once: bool,
) -> None:
    whole = reply(reasoning, content, calls)
    asked = request(stop, **policy)
    deltas = [Delta("reasoning", piece) for piece in in_pieces(reasoning, cuts)]
    deltas += [Delta("content", piece) for piece in in_pieces(content, cuts)]
    deltas += [Delta("call", call=call) for call in whole.tool_calls]
    stream = DeliveredStream(asked)
    out: list[Delta] = []
    for group in [deltas] if at_once else [[delta] for delta in deltas]:
        out += stream.feed(group)
    out += stream.finish()
    expected = delivered_reply(whole, asked)
    assert "".join(delta.text for delta in out if delta.kind == "reasoning") == expected.reasoning
    assert "".join(delta.text for delta in out if delta.kind == "content") == expected.content
    assert tuple(delta.call for delta in out if delta.call) == expected.tool_calls
    assert all(delta.text or delta.call for delta in out)
    assert delivered_reply(expected, asked) == expected  # a second time, nothing changes


@STEADY
@given(words, stops)
def test_the_cut_is_before_the_stop_string_that_is_complete_first(text: str, stop: tuple[str, ...]) -> None:
    """The expected cut is that of an engine that looks for stop strings after each character."""
    expected = text
    for end in range(len(text) + 1):
        met = [word for word in stop if text[:end].endswith(word)]
        if met:
            expected = text[: end - max(map(len, met))]
            break
    assert delivered_reply(reply("", text, 0), request(stop)).content == expected
    thought = delivered_reply(reply(text, "content", 0), request(stop))
    assert thought.reasoning == expected
    if expected != text:
        assert thought.content == ""


@pytest.mark.parametrize(
    ("stop", "content", "expected"),
    [
        (("STOP",), "one STOP two", "one "),
        (("abcd", "bc"), "abcd", "a"),
        (("bc", "abcd"), "abcd", "a"),
        (("abc", "bc"), "xabc", "x"),
        (("x",), "", ""),
        ((), "STOP", "STOP"),
    ],
)
def test_stop_strings_by_example(stop: tuple[str, ...], content: str, expected: str) -> None:
    assert delivered_reply(reply("", content, 0), request(stop)).content == expected


def test_a_stop_string_in_the_reasoning_leaves_no_content() -> None:
    cut = delivered_reply(reply("one STOP two", "three", 1), request(("STOP",)))
    assert (cut.reasoning, cut.content, len(cut.tool_calls)) == ("one ", "", 1)


def test_text_that_may_begin_a_stop_string_is_held_back_and_other_text_is_not() -> None:
    stream = DeliveredStream(request(("STOP", "\n\nQ")))

    def feed(text: str) -> list[str]:
        return [delta.text for delta in stream.feed([Delta("content", text)])]

    assert [feed("one S"), feed("T"), feed("ART\n"), feed("x S")] == [["one "], [], ["START"], ["\nx "]]
    assert [delta.text for delta in stream.finish()] == ["S"]


@pytest.mark.parametrize(
    ("policy", "expected"), [({}, 3), ({"calls": "none"}, 0), ({"parallel_calls": False}, 1)]
)
def test_only_the_calls_that_a_client_accepts_are_delivered(policy: dict[str, Any], expected: int) -> None:
    whole = reply("", "text", 3)
    assert delivered_reply(whole, request(**policy)).tool_calls == whole.tool_calls[:expected]
