"""A body that begins like an earlier one is parsed like any other, only faster."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.core.messages import Message
from areal_agents.proxy.dialects.known_bodies import KnownBodies
from areal_agents.proxy.dialects.replayed import BodyItems, MessageMemo

FILL = {"role": "system", "content": 'Brackets in strings "[{]}" and backslashes \\ count as text. ' * 80}


def body_of(messages: list[Any], before: str = '{"model": "m", ', after: str = ', "n": 1}') -> bytes:
    return (before + '"messages": ' + json.dumps(messages) + after).encode()


class Reader:
    """Reads the bodies of one episode."""

    def __init__(self, most_histories: int = 4) -> None:
        self.memo = MessageMemo(most_histories)
        self.known = KnownBodies()

    def parse(self, body: bytes) -> Any:
        return self.known.parsed(bytearray(body), self.memo)

    def read(self, body: bytes) -> bool:
        """Parse a body, read its messages like a dialect, and return whether it began like an earlier one."""
        data = self.parse(body)
        assert orjson.dumps(data) == orjson.dumps(orjson.loads(body))
        items = data.get("messages") if isinstance(data, dict) else None
        if not isinstance(items, list):
            return False
        history = self.memo.known(items)
        known = len(history.groups)
        history.groups += [(Message("user", json.dumps(item)),) for item in items[known:]]
        self.memo.keep(history, items)
        assert [group[0].content for group in history.groups] == [json.dumps(item) for item in items]
        return isinstance(items, BodyItems) and items.history is not None


def test_each_call_of_a_conversation_begins_like_the_one_before() -> None:
    reader, messages = Reader(), [FILL]
    began = []
    for turn in range(6):
        began.append(reader.read(body_of(messages)))
        messages += [
            {"role": "assistant", "content": f'"{turn}\\', "tool_calls": [{"function": {"arguments": "{}"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "}]"}, {"type": "text", "text": ""}]},
        ]
    assert began == [False] + [True] * 5
    assert reader.read(body_of(messages[:-2]))  # sent again
    assert reader.read(body_of([*messages[:-2], {"role": "user", "content": "another branch"}]))


def test_the_longest_known_beginning_of_a_branch_is_used() -> None:
    reader = Reader()
    root = [FILL, {"role": "user", "content": "root"}]
    first, second = [*root, {"content": "a"}], [*root, {"content": "b" * 50}]
    assert [reader.read(body_of(messages)) for messages in (root, first, second)] == [False, True, False]
    longer = [*second, {"content": "next"}]
    data = reader.parse(body_of(longer))
    assert len(data["messages"].history.items) == 3
    assert data["messages"] == longer


LATER_FIELDS = [
    ', "messages": [{"content": "other"}]}',
    ', "mess\\u0061ges": [{"content": "other"}]}',
    ', "messages": null}',
    ', "messages": [], "messages": "text"}',
    ', "messages": ["0123456789abcdef0123456789abcdef"]}',
]


@pytest.mark.parametrize("after", LATER_FIELDS)
def test_a_later_field_of_the_same_name_wins(after: str) -> None:
    reader, messages = Reader(), [FILL, {"content": "1"}]
    reader.read(body_of(messages))
    assert not reader.read(body_of([*messages, {"content": "2"}], after=after))


@pytest.mark.parametrize("after", LATER_FIELDS[:2])
def test_a_list_that_a_later_field_replaced_is_not_known(after: str) -> None:
    reader, messages = Reader(), [FILL, {"content": "2"}]
    reader.read(body_of([FILL], after=after))
    assert not reader.read(body_of(messages))
    assert reader.read(body_of([*messages, {"content": "3"}]))


@pytest.mark.parametrize(
    "before",
    ['{"tools": [{"messages": [{"content": "no"}]}], ', '{"m": "messages", "k": {"messages": []}, ', "{"],
)
def test_other_lists_and_strings_of_that_name_are_not_mistaken_for_the_messages(before: str) -> None:
    reader, messages = Reader(), [FILL]
    assert not reader.read(body_of(messages, before))
    assert reader.read(body_of([*messages, {"content": "2"}], before))


@pytest.mark.parametrize("item", ["text", 1, None, [{"content": "in a list"}], True])
def test_items_that_are_not_objects_are_read_from_whole_bodies(item: Any) -> None:
    reader = Reader()
    reader.read(body_of([FILL]))
    reader.read(body_of([FILL, item]))
    assert not reader.read(body_of([FILL, item, {"content": "2"}]))


def test_the_error_of_a_broken_end_has_its_position_in_the_whole_body() -> None:
    reader = Reader()
    reader.read(body_of([FILL]))
    broken = body_of([FILL, {"content": "2"}], after=", oops}")
    with pytest.raises(orjson.JSONDecodeError) as refusal:
        reader.parse(broken)
    with pytest.raises(orjson.JSONDecodeError) as expected:
        orjson.loads(broken)
    assert refusal.value.pos == expected.value.pos


def test_the_bodies_of_a_client_that_rewrites_its_history_are_no_longer_searched() -> None:
    reader, messages = Reader(), [FILL]
    for number in range(10):
        assert not reader.read(body_of(messages, before=f'{{"number": {number}, '))
        messages = [*messages, {"content": f"{number}"}]
    assert not reader.memo.expects_known_bodies
    assert not isinstance(reader.parse(body_of([FILL]))["messages"], BodyItems)


def test_a_conversation_after_many_single_calls_is_known() -> None:
    reader = Reader()
    for number in range(10):
        assert not reader.read(body_of([{"content": f"{number}"}, FILL]))
    messages = [FILL]
    assert not reader.read(body_of(messages))
    assert reader.read(body_of([*messages, {"content": "more"}]))


TEXT = st.text(st.sampled_from('ab"\\[]{},: \né😀\x00'), max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ITEM = st.dictionaries(TEXT | st.just("content"), VALUE, max_size=4) | VALUE
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@given(
    turns=st.lists(st.lists(ITEM, max_size=3), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 4), max_size=5),
    before=st.dictionaries(TEXT, VALUE, max_size=2),
    afters=st.lists(
        st.dictionaries(TEXT | st.just("messages"), VALUE | st.lists(ITEM), max_size=2),
        min_size=5,
        max_size=5,
    ),
    separators=SPACES,
    ascii=st.booleans(),
)
def test_any_sequence_of_bodies_is_parsed_as_if_each_were_the_first(
    turns: list[list[Any]],
    cuts: list[int],
    before: dict[str, Any],
    afters: list[dict[str, Any]],
    separators: tuple[str, str],
    ascii: bool,
) -> None:
    reader, messages = Reader(2), [FILL]
    dump = json.JSONEncoder(separators=separators, ensure_ascii=ascii).encode
    for number, new in enumerate(turns):
        if number < len(cuts) and cuts[number]:
            messages = messages[: -cuts[number]] or [FILL]
        messages = [*messages, *new]
        fields = [f"{dump(name)}{separators[1]}{dump(value)}" for name, value in before.items()]
        fields.append(f'"messages"{separators[1]}{dump(messages)}')
        fields += [f"{dump(name)}{separators[1]}{dump(value)}" for name, value in afters[number].items()]
        reader.read(("{" + separators[0].join(fields) + "}").encode())
