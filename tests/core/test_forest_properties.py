"""The forest compared with a plain list of messages: it finds the longest recorded history, and no other."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall, canonical_key, reasoning_conflicts
from areal_agents.core.trajectory import Continuation, Turn

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=120)

replies = st.builds(
    lambda content, reasoning, calls: ("assistant", content, reasoning, calls),
    st.sampled_from(["x", "y", " x\n", ""]),
    st.sampled_from(["", "", "hm", "why"]),
    st.sampled_from([(), (), ('{"a": 1}',), ('{"a": 1.0}', '{"a": 2}')]),
)
user = st.sampled_from(["p", "q", "p "]).map(lambda text: Message("user", text))


def reply(turn: int, parts: tuple[str, str, str, tuple[str, ...]]) -> Message:
    _, content, reasoning, calls = parts
    made = tuple(ToolCall(f"c{turn}.{index}", "f", arguments) for index, arguments in enumerate(calls))
    return Message("assistant", content, reasoning=reasoning, tool_calls=made)


def make_turn(index: int, parent: Turn | None, new: list[Message], answer: Message, tools_id: str) -> Turn:
    return Turn(
        id=f"t{index}",
        parent=parent.id if parent else None,
        new_messages=tuple(new),
        new_prompt_ids=[index, index],
        completion=Completion([index], [-0.5], [index], "stop"),
        reply=answer,
        sampling=SamplingParams(8),
        tools_id=tools_id,
    )


@st.composite
def recorded(draw: st.DrawFn) -> Forest:
    """A forest of a few turns, many of which have equal messages."""
    forest = Forest()
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.sampled_from(forest.turns)) if len(forest) else None
        tools_id = parent.tools_id if parent else draw(st.sampled_from(["", "", "tools"]))
        new = draw(st.lists(user, min_size=1, max_size=2))
        forest.record(make_turn(index, parent, new, reply(index, draw(replies)), tools_id))
    return forest


def said(forest: Forest, turn: Turn) -> list[Message]:
    """Return all messages up to the end of a turn."""
    return [*forest.history(turn.id), turn.reply]


def alike(one: Message, other: Message) -> bool:
    """Whether two messages are equal, possibly except for their reasoning."""
    return canonical_key(one) == canonical_key(other)


def check(forest: Forest, messages: list[Message], tools_id: str, found: Continuation) -> None:
    """Check what must hold for every conversation."""
    if found.parent is None:
        assert found.new_messages == tuple(messages)
        assert (found.fork is None) == (len(forest) == 0)
    else:
        history = said(forest, found.parent)
        shared = len(messages) - len(found.new_messages)
        assert found.fork is None and shared == len(history) and found.new_messages
        assert found.parent.tools_id == tools_id
        for mine, theirs in zip(messages, history, strict=False):
            only_calls = not mine.content.strip() and bool(theirs.tool_calls)
            assert alike(mine, theirs) or only_calls
            assert mine.role != "assistant" or not reasoning_conflicts(mine, theirs)
    # No longer recorded history matches message by message.
    fits = [
        len(history)
        for turn in forest.turns
        if turn.tools_id == tools_id and len(history := said(forest, turn)) < len(messages)
        if all(
            alike(mine, theirs) and not reasoning_conflicts(mine, theirs)
            for mine, theirs in zip(messages, history, strict=False)
        )
    ]
    assert max(fits, default=0) <= len(messages) - len(found.new_messages)


conversations = st.lists(
    user | st.tuples(st.integers(50, 60), replies).map(lambda pair: reply(*pair)), min_size=1, max_size=6
)


@STEADY
@given(recorded(), conversations, st.sampled_from(["", "tools"]))
def test_any_conversation_continues_from_its_longest_recorded_history(
    forest: Forest, messages: list[Message], tools_id: str
) -> None:
    check(forest, messages, tools_id, forest.continuation(messages, tools_id))


@STEADY
@given(st.data())
def test_a_forest_that_remembers_conversations_finds_the_same_as_a_fresh_one(data: st.DataObject) -> None:
    forest, open_ends, asked = Forest(), [[Message("user", "p")]], []
    for index in range(data.draw(st.integers(1, 16))):
        if asked and data.draw(st.booleans()):  # a completion, perhaps after other requests
            messages, found = data.draw(st.sampled_from(asked))
            answer = Message("assistant", "x", reasoning=data.draw(st.sampled_from(["", "hm"])))
            forest.record(make_turn(index, found.parent, list(found.new_messages), answer, ""))
            asked_for = data.draw(st.sampled_from(forest.turns)).id
            assert forest.context(asked_for).tolist() == Forest(forest.turns).context(asked_for).tolist()
            open_ends.append([*messages, answer, Message("user", "p")])
            continue
        messages = data.draw(st.sampled_from(open_ends))  # the same message objects again, as in the proxy
        found = forest.continuation(messages)
        fresh = Forest(forest.turns).continuation(messages)
        assert found.fork == fresh.fork and found.new_messages == fresh.new_messages
        assert (found.parent and found.parent.id) == (fresh.parent and fresh.parent.id)
        asked.append((messages, found))


def re_serialised(message: Message, how: str) -> Message:
    """Return a reply in a form in which clients send it back."""
    fields: dict[str, Any] = {
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": message.tool_calls,
    }
    if how == "padded":
        fields["content"] = f"\n {message.content} "
    elif how == "no reasoning":
        fields["reasoning"] = ""
    elif how == "other json":
        fields["tool_calls"] = tuple(
            ToolCall(call.id, call.name, json.dumps(json.loads(call.arguments), indent=2))
            for call in message.tool_calls
        )
    elif how == "no text" and message.tool_calls:
        fields["content"] = ""
    return Message("assistant", **fields)


FORMS = ["as it is", "padded", "no reasoning", "other json", "no text"]


@STEADY
@given(recorded(), st.data())
def test_a_recorded_conversation_is_found_however_it_is_sent(forest: Forest, data: st.DataObject) -> None:
    """The result is the turn that the call ids identify or, without calls, one with an equal reply."""
    turn = data.draw(st.sampled_from(forest.turns))
    history = said(forest, turn)
    sent = [
        re_serialised(message, data.draw(st.sampled_from(FORMS))) if message.role == "assistant" else message
        for message in history
    ]
    messages = [*sent, Message("tool", "result")]
    found = forest.continuation(messages, turn.tools_id)
    check(forest, messages, turn.tools_id, found)
    assert found.parent is not None and found.new_messages == (messages[-1],)
    assert alike(found.parent.reply, turn.reply)
    if turn.reply.tool_calls and sent[-1].content.strip() == turn.reply.content.strip():
        assert found.parent is turn


@STEADY
@given(recorded(), st.data())
def test_a_handle_identifies_one_of_several_equal_turns(forest: Forest, data: st.DataObject) -> None:
    turn = data.draw(st.sampled_from(forest.turns))
    *before, last = said(forest, turn)
    # Every reply on the path carries its handle too.
    path = forest.path(turn.id).turns
    handles = {id(each.reply): each.id for each in path}
    sent = [
        Message("assistant", m.content, m.reasoning, m.tool_calls, handle=handles[id(m)])
        if m.role == "assistant"
        else m
        for m in (*before, last)
    ]
    found = forest.continuation([*sent, Message("user", "next")], turn.tools_id)
    assert found.parent is turn
    assert turn.id in {each.id for each in forest.answers(forest.history(turn.id), turn.tools_id)}


@STEADY
@given(recorded(), st.data())
def test_a_made_up_reply_with_a_known_id_is_never_spliced(forest: Forest, data: st.DataObject) -> None:
    """Other content with a known handle or known call ids never continues the turn that they identify."""
    turn = data.draw(st.sampled_from(forest.turns))
    *before, last = said(forest, turn)
    made_up = Message("assistant", "made up", tool_calls=last.tool_calls, handle=turn.id)
    found = forest.continuation([*before, made_up, Message("user", "next")], turn.tools_id)
    assert found.parent is not turn and made_up in found.new_messages


@STEADY
@given(recorded())
def test_a_forest_that_is_loaded_again_finds_the_same_turns(forest: Forest) -> None:
    again = Forest(forest.turns)
    for turn in forest.turns:
        messages = [*said(forest, turn), Message("user", "next")]
        one, other = (each.continuation(messages, turn.tools_id) for each in (forest, again))
        assert one == other
        assert forest.prompt_ids(turn.id).tolist() == again.prompt_ids(turn.id).tolist()
