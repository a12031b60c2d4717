"""The forest: each turn stores only what it adds, and every path is exactly what the model saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Fork, Trajectory, Turn


def make_turn(turn_id: str, parent: str | None = None, **fields: Any) -> Turn:
    """Return a turn whose fields are derived from its id unless they are given."""
    number = sum(turn_id.encode())
    defaults: dict[str, Any] = {
        "new_messages": (Message("user", f"q {turn_id}"),),
        "new_prompt_ids": [number, number + 1],
        "completion": Completion([number + 2], [-0.5], [number % 5], "stop"),
        "reply": Message("assistant", f"a {turn_id}"),
        "sampling": SamplingParams(8, temperature=0.5),
    }
    return Turn(id=turn_id, parent=parent, **{**defaults, **fields})


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Turns in the order of recording, each a root or the child of an earlier turn."""
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 10))):
        parent = draw(st.none() | st.sampled_from([turn.id for turn in turns])) if turns else None
        sampled = draw(st.lists(st.integers(0, 99), max_size=4))
        prompt = draw(st.lists(st.integers(0, 99), min_size=parent is None, max_size=4))
        # Few different strings, so that siblings often have equal replies.
        reply = Message(
            "assistant", draw(st.sampled_from("xy")), tool_calls=(ToolCall(f"c{index}", "f", "{}"),)
        )
        turns.append(
            make_turn(
                f"t{index}",
                parent,
                new_messages=(Message("user", draw(st.sampled_from("pq"))),),
                new_prompt_ids=prompt,
                completion=Completion(
                    sampled, [-0.01 * token for token in sampled], [index] * len(sampled), "stop"
                ),
                reply=reply,
                sampling=SamplingParams(8, temperature=index / 10),
            )
        )
    return turns


@given(forests())
def test_every_path_is_the_concatenation_of_the_tokens_that_its_turns_add(turns: list[Turn]) -> None:
    forest, by_id = Forest(turns), {turn.id: turn for turn in turns}
    assert forest.turns == tuple(turns) and len(forest) == len(turns)
    for turn in turns:
        before: list[int] = []
        if turn.parent is not None:
            parent = by_id[turn.parent]
            before = [*forest.prompt_ids(parent.id).tolist(), *parent.completion.token_ids.tolist()]
        prompt = before + turn.new_prompt_ids.tolist()
        assert forest.prompt_ids(turn.id).tolist() == prompt
        path = forest.path(turn.id)
        assert path.token_ids.tolist() == prompt + turn.completion.token_ids.tolist()
        assert path.token_ids.dtype == np.int32 and path.behavior_logprobs.dtype == np.float32


@given(forests())
def test_the_arrays_of_a_path_are_aligned(turns: list[Turn]) -> None:
    for path in Forest(turns).trajectories():
        size, mask = len(path.token_ids), path.sampled_mask
        for array in (path.behavior_logprobs, path.versions, path.temperatures, path.turn_index, mask):
            assert array.shape == (size,)
        assert (path.versions[~mask] == -1).all() and (path.temperatures[~mask] == 1).all()
        assert (path.behavior_logprobs[~mask] == 0).all()
        owners = [path.turns[index] for index in path.turn_index[mask]]
        assert path.versions[mask].tolist() == [int(turn.id[1:]) for turn in owners]
        expected = np.array([turn.sampling.temperature for turn in owners], np.float32)
        np.testing.assert_array_equal(path.temperatures[mask], expected)
        np.testing.assert_allclose(path.behavior_logprobs[mask], path.token_ids[mask] * -0.01, rtol=1e-6)


@given(forests())
def test_leaves_cover_every_turn(turns: list[Turn]) -> None:
    forest = Forest(turns)
    parents = {turn.parent for turn in turns}
    assert [leaf.id for leaf in forest.leaves()] == [turn.id for turn in turns if turn.id not in parents]
    assert {turn.id for path in forest.trajectories() for turn in path.turns} == {turn.id for turn in turns}


@given(forests(), st.data())
def test_a_conversation_continues_from_the_turn_whose_call_it_replays(
    turns: list[Turn], data: st.DataObject
) -> None:
    """Siblings with equal content are distinguished by their tool-call ids."""
    forest = Forest(turns)
    turn = data.draw(st.sampled_from(turns))
    new = (Message("tool", "result", tool_call_id=turn.reply.tool_calls[0].id), Message("user", "go on"))
    found = forest.continuation([*forest.history(turn.id), turn.reply, *new])
    assert found.parent is not None and found.fork is None and found.new_messages == new
    assert found.parent.reply.tool_calls == turn.reply.tool_calls
    assert found.parent is turn


@given(forests())
def test_a_turn_without_its_parent_or_recorded_twice_is_refused(turns: list[Turn]) -> None:
    children = [turn for turn in turns if turn.parent is not None]
    for child in children:
        with pytest.raises(ValueError, match="not recorded"):
            Forest([child])
    with pytest.raises(ValueError, match="already recorded"):
        Forest([*turns, turns[0]])


def conversation(*texts: str) -> list[Message]:
    """Return alternating user and assistant messages."""
    return [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]


def test_an_empty_forest_has_nothing_to_fork_from() -> None:
    found = Forest().continuation(conversation("hello"))
    assert found.parent is None and found.fork is None and len(found.new_messages) == 1


def test_the_longest_recorded_history_wins() -> None:
    forest = Forest()
    forest.record(make_turn("a"))
    forest.record(make_turn("b", "a"))
    found = forest.continuation(conversation("q a", "a a", "q b", "a b", "next"))
    assert found.parent is forest["b"] and [m.content for m in found.new_messages] == ["next"]


def test_an_edit_branches_off_after_the_last_unchanged_reply() -> None:
    forest = Forest([make_turn("a"), make_turn("b", "a")])
    found = forest.continuation(conversation("q a", "a a", "q b", "edited", "next"))
    assert found.parent is forest["a"] and [m.content for m in found.new_messages] == [
        "q b",
        "edited",
        "next",
    ]


def test_without_call_ids_the_latest_of_equal_siblings_wins() -> None:
    reply, question = Message("assistant", "same"), (Message("user", "q"),)
    forest = Forest([make_turn(name, new_messages=question, reply=reply) for name in ("a", "b")])
    assert forest.continuation(conversation("q", "same", "next")).parent is forest["b"]


@pytest.mark.parametrize(
    ("messages", "tools_id", "expected"),
    [
        (conversation("other"), "", Fork(None, "new conversation", 0)),
        (conversation("q a", "edited", "q b"), "", Fork("a", "edited", 1)),
        (conversation("q a", "a a", "q b"), "tools", Fork("b", "tools changed", 3)),
        (conversation("q a"), "", Fork("a", "resampled", 1)),
        (conversation("q b", "a b", "q a", "a a", "next"), "", Fork("a", "reordered", 0)),
        ([*conversation("q a"), Message("user", "and then?")], "", Fork("a", "unknown", 1)),
        (conversation("first", "reply", "q a", "a a", "q b"), "", Fork("a", "edited", 0)),
        (conversation("summary", "a b", "next"), "", Fork("a", "context compacted", 0)),
        (conversation("q a", "a a", "other"), "tools", Fork("a", "tools changed", 2)),
    ],
)
def test_a_new_root_has_the_reason_for_the_fork(
    messages: list[Message], tools_id: str, expected: Fork
) -> None:
    forest = Forest([make_turn("a"), make_turn("b", "a")])
    assert forest.continuation(messages, tools_id).fork == expected


def test_changed_reasoning_is_an_edit() -> None:
    forest = Forest([make_turn("a", reply=Message("assistant", "x", reasoning="hm"))])
    replayed = Message("assistant", "x", reasoning="aha")
    fork = forest.continuation([Message("user", "q a"), replayed, Message("user", "n")]).fork
    assert fork == Fork("a", "edited", 1)


def test_a_conversation_that_shares_only_the_system_prompt_is_new() -> None:
    system = Message("system", "Be brief.")
    forest = Forest([make_turn("a", new_messages=(system, Message("user", "q")))])
    fork = forest.continuation([system, Message("user", "other")]).fork
    assert fork is not None and fork.reason == "new conversation"


SYSTEM = Message("system", "Be brief.")
CALL = ToolCall("call_1", "search", "{}")
ASKED = Message("user", "Where is Lyon?")
CALLED = Message("assistant", "I look.", tool_calls=(CALL,))
FOUND = Message("tool", "In France.", tool_call_id="call_1")


def test_a_changed_message_before_a_kept_reply_is_an_edit() -> None:
    """The recorded message contains a reminder, which the next call leaves out."""
    reminded = Message("user", "Where is Lyon? (You have 3 turns left.)")
    forest = Forest([make_turn("a", new_messages=(SYSTEM, reminded), reply=CALLED)])
    assert forest.continuation([SYSTEM, ASKED, CALLED, FOUND]).fork == Fork("a", "edited", 1)
    rewritten = Message("assistant", "", tool_calls=(ToolCall("call_1", "search", '{"q": 1}'),))
    assert forest.continuation([SYSTEM, ASKED, rewritten, FOUND]).fork == Fork("a", "edited", 1)


def test_an_auxiliary_call_about_the_same_question_is_a_new_conversation() -> None:
    """A request for a title also contains the user's message, but no reply."""
    title = (Message("system", "Write titles."), Message("user", "Write a title for this:"), ASKED)
    forest = Forest([make_turn("a", new_messages=title, reply=Message("assistant", "Lyon"))])
    assert forest.continuation([SYSTEM, ASKED]).fork == Fork(None, "new conversation", 0)
    forest = Forest([make_turn("a", new_messages=(SYSTEM, ASKED), reply=CALLED)])
    assert forest.continuation(title).fork == Fork(None, "new conversation", 0)


def test_a_changed_order_is_recognised_although_some_messages_are_missing() -> None:
    last = Message("assistant", "In France.")
    turns = [
        make_turn("a", new_messages=(SYSTEM, ASKED), reply=CALLED),
        make_turn("b", "a", new_messages=(FOUND,), reply=last),
    ]
    sent = [SYSTEM, ASKED, FOUND, CALLED, Message("user", "And Rome?")]
    assert Forest(turns).continuation(sent).fork == Fork("a", "reordered", 2)


def test_repeated_equal_messages_do_not_count_as_reordered() -> None:
    again = Message("user", "Go on.")
    turns = [
        make_turn("a", new_messages=(ASKED,), reply=Message("assistant", "one")),
        make_turn("b", "a", new_messages=(again,), reply=Message("assistant", "two")),
        make_turn("c", "b", new_messages=(again,), reply=Message("assistant", "three")),
    ]
    sent = [Message("user", "Hi"), Message("assistant", "one"), again, Message("assistant", "two"), again]
    assert Forest(turns).continuation(sent).fork == Fork("a", "edited", 0)


def test_a_fork_that_the_template_forces_begins_a_new_root() -> None:
    forest = Forest([make_turn("a")])
    messages = conversation("q a", "a a", "next")
    found = forest.continuation(messages)
    assert found.parent is not None
    forked = forest.fork(found.parent, messages, found.new_messages, "template strips reasoning")
    assert forked.parent is None and list(forked.new_messages) == messages
    assert forked.fork == Fork("a", "template strips reasoning", 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_messages": ()}, "must add at least one message"),
        ({"new_prompt_ids": []}, "its prompt must have at least one token"),
        ({"turn_id": ""}, "must have an id"),
        ({"reply": Message("user", "x")}, "assistant message"),
        ({"parent": "p", "forked_from": Fork(None, "unknown", 0)}, "cannot also be a fork"),
    ],
)
def test_an_invalid_turn_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_turn(**{"turn_id": "t", **fields})


def test_invalid_relations_between_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="reason must be one of"):
        Fork(None, "because", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must offer the same tools"):
        Forest([make_turn("a"), make_turn("b", "a", tools_id="x")])
    with pytest.raises(ValueError, match="at least one turn"):
        Trajectory(())
    with pytest.raises(ValueError, match="has the parent c, but follows a"):
        Trajectory((make_turn("a"), make_turn("b", "c")))
    with pytest.raises(KeyError):
        Forest().path("none")


def called(turn_id: str) -> Turn:
    """Return a turn whose reply has content and a tool call."""
    call = ToolCall(f"call of {turn_id}", "f", '{"x": 1}')
    return make_turn(turn_id, reply=Message("assistant", "let me see", tool_calls=(call,)))


def test_a_reply_without_its_content_is_recognised_by_its_call_ids() -> None:
    forest = Forest([called("a")])
    call = forest["a"].reply.tool_calls[0]
    end = Message("tool", "r", tool_call_id=call.id)
    dropped = Message("assistant", tool_calls=(ToolCall(call.id, "f", '{"x":1.0}'),))
    first = forest["a"].new_messages
    assert forest.continuation([*first, dropped, end]).parent is forest["a"]
    forest.record(make_turn("b", "a", new_messages=(end,)))
    later = forest.continuation([*first, dropped, end, forest["b"].reply, Message("user", "n")])
    assert later.parent is forest["b"]


@pytest.mark.parametrize(
    "replayed",
    [
        Message("assistant", "other words", tool_calls=(ToolCall("call of a", "f", '{"x": 1}'),)),
        Message("assistant", "", tool_calls=(ToolCall("call of a", "f", '{"x": 2}'),)),
        Message("assistant", "", tool_calls=(ToolCall("call of a", "g", '{"x": 1}'),)),
        Message("assistant", "", tool_calls=(ToolCall("call of a", "f", "{}"), ToolCall("c2", "f", "{}"))),
        Message("assistant", "other words", handle="a"),
    ],
)
def test_other_content_with_a_known_id_is_an_edit(replayed: Message) -> None:
    forest = Forest([called("a")])
    found = forest.continuation([*forest["a"].new_messages, replayed, Message("user", "n")])
    assert found.parent is None and found.fork == Fork("a", "edited", 1)


EDIT_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "all": {"type": "boolean", "default": False},
                "most": {"type": "integer", "default": 5},
            },
        },
    },
}


def replayed_with(arguments: str, *, call_id: str = "call of a", content: str = "let me see") -> Message:
    return Message("assistant", content, tool_calls=(ToolCall(call_id, "f", arguments),))


def test_a_replayed_call_with_added_tool_defaults_is_the_recorded_call() -> None:
    forest = Forest([called("a")])
    end = Message("tool", "r", tool_call_id="call of a")
    first = forest["a"].new_messages
    filled = replayed_with('{"all": false, "x": 1, "most": 5.0}')
    conversation = [*first, filled, end]
    assert Forest([called("a")]).continuation(conversation).parent is None  # the tools are not known
    found = forest.continuation(conversation, tools=[EDIT_TOOL])
    assert found.parent is forest["a"] and found.new_messages == (end,)
    forest.record(make_turn("b", "a", new_messages=(end,)))
    assert forest.answers(conversation, tools=[EDIT_TOOL]) == (forest["b"],)
    later = [*conversation, forest["b"].reply, Message("user", "n")]
    assert forest.continuation(later, tools=[EDIT_TOOL]).parent is forest["b"]


@pytest.mark.parametrize(
    "replayed",
    [
        replayed_with('{"x": 1, "all": true}'),
        replayed_with('{"x": 1, "all": 0}'),
        replayed_with('{"x": 1, "most": 6}'),
        replayed_with('{"x": 1, "other": false}'),
        replayed_with('{"x": 2, "all": false}'),
        replayed_with('{"all": false}'),
        replayed_with('{"x": 1, "all": false}', content="other words"),
        replayed_with("[]"),
    ],
)
def test_a_change_other_than_added_defaults_is_an_edit(replayed: Message) -> None:
    forest = Forest([called("a")])
    conversation = [*forest["a"].new_messages, replayed, Message("user", "n")]
    found = forest.continuation(conversation, tools=[EDIT_TOOL])
    assert found.parent is None and found.fork == Fork("a", "edited", 1)


@pytest.mark.parametrize(
    "tool",
    [{}, {"function": None}, {"function": {"name": "f"}}, {"function": {"name": "f", "parameters": []}}],
)
def test_tools_without_declared_properties_have_no_defaults(tool: dict[str, Any]) -> None:
    forest = Forest([called("a")])
    filled = replayed_with('{"x": 1, "all": false}')
    conversation = [*forest["a"].new_messages, filled, Message("user", "n")]
    assert forest.continuation(conversation, tools=[tool]).parent is None


def test_a_handle_distinguishes_equal_siblings() -> None:
    reply, question = Message("assistant", "same"), (Message("user", "q"),)
    forest = Forest([make_turn(name, new_messages=question, reply=reply) for name in ("a", "b")])
    replayed = Message("assistant", " same", handle="a")
    assert forest.continuation([*question, replayed, Message("user", "n")]).parent is forest["a"]


def test_a_call_id_after_another_history_is_not_spliced() -> None:
    forest = Forest([called("a")])
    found = forest.continuation([Message("user", "other"), forest["a"].reply, Message("user", "n")])
    assert found.parent is None


def test_all_turns_that_answered_a_conversation_are_found() -> None:
    forest = Forest(
        [called("a"), make_turn("b", "a"), make_turn("c", "a", new_messages=(Message("user", "q b"),))]
    )
    replayed = Message("assistant", tool_calls=forest["a"].reply.tool_calls)
    assert [t.id for t in forest.answers([*forest["a"].new_messages, replayed, Message("user", "q b")])] == [
        "b",
        "c",
    ]
    assert forest.answers(conversation("q a"))[0] is forest["a"] and forest.answers(conversation("x")) == ()


def thinking(turn_id: str, reasoning: str, parent: str | None = None, **fields: Any) -> Turn:
    """Return a turn with reasoning, and with the same content as its siblings."""
    return make_turn(turn_id, parent, reply=Message("assistant", "same", reasoning=reasoning), **fields)


def test_nothing_after_a_reply_with_changed_reasoning_is_recognised() -> None:
    forest = Forest([thinking("a", "hm"), make_turn("b", "a")])
    edited = Message("assistant", "same", reasoning="aha")
    end = Message("user", "n")
    history = [*forest["a"].new_messages, edited, *forest["b"].new_messages, forest["b"].reply, end]
    assert forest.continuation(history).fork == Fork("a", "edited", 1)


def test_a_branch_is_followed_from_sibling_to_child() -> None:
    """Two siblings and their children are equal except for the siblings' reasoning."""
    question, more = (Message("user", "q"),), (Message("user", "more"),)
    forest = Forest(
        [
            thinking("a", "hm", new_messages=question),
            thinking("b", "aha", new_messages=question),
            thinking("a1", "x", "a", new_messages=more),
            thinking("b1", "x", "b", new_messages=more),
        ]
    )
    for name in ("a", "b"):
        replayed = [*question, forest[name].reply, *more, forest[f"{name}1"].reply, Message("user", "n")]
        assert forest.continuation(replayed).parent is forest[f"{name}1"]


def test_an_assistant_message_in_a_prompt_is_recognised_with_its_reasoning() -> None:
    shown = (
        Message("user", "example"),
        Message("assistant", "answer", reasoning="why"),
        Message("user", "q"),
    )
    forest = Forest([make_turn("a", new_messages=shown)])
    assert forest.continuation([*shown, forest["a"].reply, Message("user", "n")]).parent is forest["a"]
