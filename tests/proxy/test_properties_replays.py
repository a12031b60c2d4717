"""However a framework re-serialises a reply, its conversation continues; any other change starts a new one.

The levels of the re-serialisation: absent fields and parts, arguments as other JSON, dropped reasoning,
padded content, and content that is dropped beside tool calls whose ids stay.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents_support import TOOL_AGENTS, ChatAgent, GeminiAgent, MessagesAgent, ResponsesAgent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation_support import ARGUMENT_FORMS, Mutation
from proxy_support import RunningProxy, running_proxy
from record_support import ObservedEngine, check_invariant

from areal_agents.rendering import ChatRenderer

STEADY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(STEADY, max_examples=500)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.sampled_from([2.0, -0.5, 1e20, 0.0])
    | st.text('aé日\U0001f600"\\/\n<', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("abé", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(["query", "limit", "a", "é"]), values, min_size=1, max_size=3)
spaces = st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")])


def markup(call: tuple[dict[str, Any], tuple[str, str], bool]) -> str:
    """Return a tool call in a JSON style of the model's own."""
    value, separators, ascii_only = call
    text = json.dumps({"name": "search", "arguments": value}, separators=separators, ensure_ascii=ascii_only)
    return f"<tool_call>\n{text}\n</tool_call>"


calls = st.lists(st.tuples(arguments, spaces, st.booleans()).map(markup), min_size=1, max_size=2)
replies = st.builds(
    lambda thought, said, made: thought + said + "\n".join(made),
    st.sampled_from(["", "<think>\nLet me see: 1 < 2.\n</think>\n\n", "<think>\n\n</think>\n\n"]),
    st.sampled_from(["", "Let me look.\n", "Für 日本 \U0001f600: \n\n"]),
    calls,
)
mutations = st.builds(
    Mutation,
    arguments=st.sampled_from(ARGUMENT_FORMS),
    reasoning=st.sampled_from(["keep", "drop"]),
    content=st.sampled_from(["as is", "parts", "padded", "stripped", "dropped"]),
    absent=st.sampled_from(["missing", "none", "empty"]),
    extras=st.booleans(),
    item_ids=st.booleans(),
)
loops = st.lists(st.tuples(replies, mutations, st.booleans()), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("replays") / "store.db"
    with running_proxy(path, ObservedEngine(renderer)) as proxy:
        yield proxy


def loop(proxy: RunningProxy, dialect: str, plan: list[tuple[str, Mutation, bool]]) -> None:
    """Run a tool loop; every call continues the one before, however the replies are re-serialised."""
    proxy.engine.reset()
    episode = proxy.open_episode()
    agent = TOOL_AGENTS[dialect](proxy, episode, "Where?", "Answer.")
    try:
        for text, mutation, streamed in plan:
            proxy.engine.script = lambda call, text=text: text
            [reply] = agent.ask(streamed=streamed)
            assert reply.calls
            agent.take(reply, mutation)
            agent.results(reply, "result")
        agent.ask()
    finally:
        agent.close()
    turns = proxy.tokens(episode)["turns"]
    assert [turn["parent"] for turn in turns] == [None, *agent.received[:-1]]
    check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received)


@STEADY
@given(dialect=st.sampled_from(sorted(TOOL_AGENTS)), plan=loops)
def test_a_tool_loop_continues_however_its_framework_re_serialises_replies(
    running: RunningProxy, dialect: str, plan: list[tuple[str, Mutation, bool]]
) -> None:
    loop(running, dialect, plan)


@pytest.mark.slow
@LONG
@given(dialect=st.sampled_from(sorted(TOOL_AGENTS)), plan=loops)
def test_very_many_tool_loops_continue(
    running: RunningProxy, dialect: str, plan: list[tuple[str, Mutation, bool]]
) -> None:
    loop(running, dialect, plan)


def other_value(value: Any) -> Any:
    """Return a value that cannot be a re-serialisation of `value`."""
    if isinstance(value, dict) and value:
        key = sorted(value)[0]
        return {**value, key: other_value(value[key])}
    if isinstance(value, bool) or value is None:
        return "other"
    return value + "x" if isinstance(value, str) else [value, "other"]


def rewrite(dialect: str, unit: list[Any], change: str) -> list[Any]:
    """Return a reply in its wire form with another meaning, but the same ids, handles and signatures."""
    unit = json.loads(json.dumps(unit))
    if dialect == "chat":
        [message] = unit
        functions = [call["function"] for call in message["tool_calls"]]
        if change == "text":
            message["content"] = (message.get("content") or "") + " But no."
    elif dialect == "messages":
        blocks = unit[0]["content"]
        functions = [block for block in blocks if block["type"] == "tool_use"]
        if change == "text":
            blocks.insert(len(blocks) - len(functions), {"type": "text", "text": "But no."})
    elif dialect == "gemini":
        parts = [part for content in unit for part in content["parts"]]
        functions = [part["functionCall"] for part in parts if "functionCall" in part]
        if change == "text":
            unit.insert(0, {"role": "model", "parts": [{"text": "But no."}]})
    else:
        functions = [item for item in unit if item.get("type") == "function_call"]
        if change == "text":
            unit.insert(len(unit) - len(functions), {"role": "assistant", "content": "But no."})
    if change == "arguments":
        field = {"messages": "input", "gemini": "args"}.get(dialect, "arguments")
        value = functions[0][field]
        parsed = json.loads(value) if isinstance(value, str) else value
        other = other_value(parsed)
        functions[0][field] = json.dumps(other) if field == "arguments" else other
    if change == "name":
        functions[0]["name"] = "search_again"
    return unit


@STEADY
@given(
    kind=st.sampled_from([ChatAgent, ResponsesAgent, MessagesAgent, GeminiAgent]),
    reply=replies,
    mutation=mutations.filter(lambda mutation: mutation.content != "dropped"),
    change=st.sampled_from(["text", "arguments", "name"]),
)
def test_a_reply_with_the_same_ids_and_another_meaning_starts_a_new_root(
    running: RunningProxy, kind: type[ChatAgent], reply: str, mutation: Mutation, change: str
) -> None:
    running.engine.reset()
    running.engine.script = lambda call: reply
    episode = running.open_episode()
    agent = kind(running, episode, "Where?")
    try:
        [first] = agent.ask()
        agent.take(first, mutation)
        agent.results(first, "result")
        agent.history[1] = rewrite(agent.dialect, agent.history[1], change)
        agent.ask()
    finally:
        agent.close()
    root, fork = running.tokens(episode)["turns"]
    assert root["parent"] is None and fork["parent"] is None
    assert fork["forked_from"] == {"turn": first.turn_id, "reason": "edited", "diverged_at": 1}
    check_invariant(running.store, episode["id"], running.engine.calls, agent.received)


@pytest.mark.parametrize("dialect", sorted(TOOL_AGENTS))
def test_a_reply_without_calls_is_recognised_by_its_text_or_handle(
    running: RunningProxy, dialect: str
) -> None:
    """Although the template starts a new root at each question, the fork names the turn before."""
    running.engine.reset()
    running.engine.script = lambda call: "<think>\nhm\n</think>\n\nIn France."
    episode = running.open_episode()
    agent = TOOL_AGENTS[dialect](running, episode, "Where?")
    rng = random.Random(0)
    try:
        for index in range(3):
            [reply] = agent.ask(streamed=rng.random() < 0.5)
            agent.take(reply)
            agent.say(f"and {index}?")
    finally:
        agent.close()
    turns = running.tokens(episode)["turns"]
    # This template strips the reasoning of earlier turns, so each turn is a root with that reason.
    reasons = [turn["forked_from"] and turn["forked_from"]["reason"] for turn in turns]
    assert reasons == [None, "template strips reasoning", "template strips reasoning"]
    assert [turn["forked_from"]["turn"] for turn in turns[1:]] == [turn["id"] for turn in turns[:2]]
    check_invariant(running.store, episode["id"], running.engine.calls, agent.received)
