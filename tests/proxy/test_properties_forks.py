"""Examples of each reason for a fork, through the real clients, and of changes that cause none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents_support import AGENTS, Agent, ChatAgent
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine, check_invariant

from areal_agents.core.messages import Message
from areal_agents.rendering import ChatRenderer

LOOPS = ["chat", "messages", "responses"]


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("forks") / "store.db"
    with running_proxy(path, ObservedEngine(renderer)) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: RunningProxy) -> RunningProxy:
    running.engine.reset()
    return running


def after_a_loop(proxy: RunningProxy, dialect: str, calls: int = 3) -> tuple[Agent, dict[str, Any]]:
    """Return an agent whose `calls` tool calls are one path. Its units: question, reply, result, reply, …"""
    counter = iter(range(99))
    proxy.engine.script = lambda call: tool_call(query=f"query {next(counter)}")
    episode = proxy.open_episode()
    agent = AGENTS[dialect](proxy, episode, "Where is Lyon?", "Answer.")
    for index in range(calls):
        [reply] = agent.ask()
        agent.take(reply)
        agent.results(reply, f"result of {index}")
    return agent, episode


def forked(proxy: RunningProxy, agent: Agent, episode: dict[str, Any]) -> tuple[str | None, str, int]:
    """Make one more call; return the turn that it forked from, the reason, and where it diverged."""
    turns = proxy.tokens(episode)["turns"]
    agent.ask()
    agent.close()
    check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received)
    new = proxy.tokens(episode)["turns"][len(turns) :]
    assert len(new) == 1 and new[0]["parent"] is None
    fork = new[0]["forked_from"]
    names = {turn["id"]: f"turn {index}" for index, turn in enumerate(turns)}
    return names.get(fork["turn"]), fork["reason"], fork["diverged_at"]


def parents(proxy: RunningProxy, episode: dict[str, Any]) -> list[int | None]:
    """Return the index of each turn's parent."""
    turns = proxy.tokens(episode)["turns"]
    places: dict[str | None, int | None] = {turn["id"]: index for index, turn in enumerate(turns)}
    return [places.get(turn["parent"]) for turn in turns]


@pytest.mark.parametrize("dialect", LOOPS)
def test_an_unrelated_question_is_a_new_conversation(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect)
    agent.history = []
    agent.say("What is the capital of Spain?")
    assert forked(proxy, agent, episode) == (None, "new conversation", 1)  # the system prompt is shared


@pytest.mark.parametrize("dialect", LOOPS)
def test_a_second_sample_of_the_first_turn_is_a_fork(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect, 1)
    agent.history = agent.history[:1]
    assert forked(proxy, agent, episode) == ("turn 0", "resampled", 2)


@pytest.mark.parametrize("dialect", LOOPS)
def test_a_second_sample_in_mid_conversation_is_a_branch(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect)
    agent.history = agent.history[:3]
    agent.ask()
    agent.close()
    assert parents(proxy, episode) == [None, 0, 1, 0]


@pytest.mark.parametrize("dialect", LOOPS)
def test_an_edited_reply_is_a_fork(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect, 1)
    agent.history[1:] = [
        [{"role": "assistant", "content": "It is in Spain."}],
        [{"role": "user", "content": "No."}],
    ]
    assert forked(proxy, agent, episode) == ("turn 0", "edited", 2)


@pytest.mark.parametrize("dialect", LOOPS)
def test_an_edited_question_is_a_fork(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect)
    agent.edit(0, "Where is Nice?")
    where, reason, diverged = forked(proxy, agent, episode)
    assert (where, reason, diverged) == ("turn 0", "edited", 1)


@pytest.mark.parametrize("dialect", LOOPS)
def test_an_edit_in_the_middle_continues_from_the_unchanged_beginning(
    proxy: RunningProxy, dialect: str
) -> None:
    """A different tool result is a branch from the call that it answers."""
    agent, episode = after_a_loop(proxy, dialect)
    proxy.engine.script = lambda call: tool_call(query="query 1")
    other = json.loads(json.dumps(agent.history[2]).replace("result of 0", "another result"))
    agent.history = [*agent.history[:2], other]
    agent.ask()
    agent.close()
    assert parents(proxy, episode) == [None, 0, 1, 0]


def test_a_reordered_history_is_a_fork(proxy: RunningProxy) -> None:
    agent, episode = after_a_loop(proxy, "chat", 2)
    question, *rest = agent.history
    agent.history = [rest[0], question, *rest[1:]]
    assert forked(proxy, agent, episode)[:2] == ("turn 0", "reordered")


def test_an_answer_before_the_calls_that_led_to_it_is_reordered(proxy: RunningProxy) -> None:
    """camel-ai moves the answer to before the second of two rounds of calls."""
    agent, episode = after_a_loop(proxy, "chat", 2)
    proxy.engine.script = lambda call: "In France."
    [reply] = agent.ask()
    agent.take(reply)
    question, *first_round, call, result, answer = agent.history
    agent.history = [question, *first_round, answer, call, result]
    agent.say("And Nice?")
    assert forked(proxy, agent, episode) == ("turn 1", "reordered", 4)


@pytest.mark.parametrize("dialect", LOOPS)
def test_a_template_that_strips_reasoning_causes_a_fork(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect, 1)
    proxy.engine.script = lambda call: "<think>\nhm\n</think>\n\nIn France."
    [reply] = agent.ask()
    agent.take(reply)
    agent.say("And Nice?")
    where, reason, diverged = forked(proxy, agent, episode)
    assert (where, reason, diverged) == ("turn 1", "template strips reasoning", 5)


def test_changed_tools_cause_a_fork(proxy: RunningProxy) -> None:
    agent, episode = after_a_loop(proxy, "chat", 2)
    other = {"type": "function", "function": {**SEARCH["function"], "name": "find"}}
    body = {**agent.body({}), "tools": [SEARCH, other]}
    agent.client.chat.completions.create(**body)
    agent.close()
    fork = proxy.tokens(episode)["turns"][-1]["forked_from"]
    assert fork["reason"] == "tools changed" and fork["diverged_at"] == 5
    check_invariant(proxy.store, episode["id"], proxy.engine.calls)


@pytest.mark.parametrize("dialect", LOOPS)
def test_a_compacted_context_is_a_fork(proxy: RunningProxy, dialect: str) -> None:
    agent, episode = after_a_loop(proxy, dialect)
    agent.history[1:5] = []  # the two older calls
    assert forked(proxy, agent, episode)[1] == "context compacted"


@pytest.mark.parametrize("dialect", LOOPS)
def test_a_summary_in_place_of_earlier_messages_is_a_compacted_context(
    proxy: RunningProxy, dialect: str
) -> None:
    agent, episode = after_a_loop(proxy, dialect)
    agent.history[:5] = [[{"role": "user", "content": "Summary: it is in France."}]]
    assert forked(proxy, agent, episode)[1] == "context compacted"


def test_a_change_that_the_template_does_not_render_causes_no_fork(proxy: RunningProxy) -> None:
    """The client changes the reasoning of a reply whose reasoning the template leaves out."""
    thought = "<think>\nLyon is a city.\n</think>\n\n"
    proxy.engine.script = lambda call: thought + "In France."
    episode = proxy.open_episode()
    agent = ChatAgent(proxy, episode, "Where is Lyon?")
    [first] = agent.ask()
    agent.take(first)
    agent.say("And Nice?")
    proxy.engine.script = lambda call: thought + tool_call(query="Nice")
    [second] = agent.ask()  # a new root: the template strips the reasoning of the first reply
    agent.take(second)
    agent.results(second, "France")
    # A framework may rewrite the reasoning that the model is no longer shown.
    agent.history[1][0]["reasoning_content"] = "Something else entirely."
    agent.ask()
    agent.close()
    assert parents(proxy, episode) == [None, None, 1]
    assert check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received) == 1


def test_a_change_that_the_template_renders_is_never_ignored(proxy: RunningProxy) -> None:
    """The same change where the reasoning is rendered: the model must see what the client sent."""
    proxy.engine.script = lambda call: "<think>\nLyon is a city.\n</think>\n\n" + tool_call(query="Lyon")
    episode = proxy.open_episode()
    agent = ChatAgent(proxy, episode, "Where is Lyon?")
    [first] = agent.ask()
    agent.take(first)
    agent.results(first, "France")
    agent.history[1][0]["reasoning_content"] = "Something else entirely."
    assert forked(proxy, agent, episode) == ("turn 0", "edited", 1)
    text = proxy.engine.renderer.tokenizer.decode(proxy.engine.calls[1].input_ids.tolist())
    assert "Something else entirely." in text and "Lyon is a city." not in text


def test_the_prompt_of_a_fork_is_what_a_plain_server_renders(proxy: RunningProxy) -> None:
    agent, episode = after_a_loop(proxy, "chat", 1)
    agent.history[1:] = [
        [{"role": "assistant", "content": "It is in Spain."}],
        [{"role": "user", "content": "No."}],
    ]
    forked(proxy, agent, episode)
    messages = [
        Message("system", "Answer."),
        Message("user", "Where is Lyon?"),
        Message("assistant", "It is in Spain."),
        Message("user", "No."),
    ]
    expected = proxy.engine.renderer.render(messages, [SEARCH])
    assert proxy.engine.calls[-1].input_ids.tolist() == list(expected)


def test_each_of_several_choices_is_a_branch(proxy: RunningProxy) -> None:
    """Whichever of the n replies a client continues, the exact tokens of that reply are continued."""
    counter = iter(range(99))
    proxy.engine.script = lambda call: tool_call(query=f"query {next(counter)}")
    episode = proxy.open_episode()
    agent = ChatAgent(proxy, episode, "Where?")
    replies = agent.ask(n=3)
    start = list(agent.history)
    for reply in reversed(replies):
        agent.history = list(start)
        agent.take(reply)
        agent.results(reply, "result")
        agent.ask()
    agent.close()
    turns = proxy.tokens(episode)["turns"]
    assert [turn["forked_from"] and turn["forked_from"]["reason"] for turn in turns] == [
        None, "resampled", "resampled", None, None, None,
    ]  # fmt: skip
    queries = [
        [call.arguments for call in proxy.store.load_episode(episode["id"]).forest[id].reply.tool_calls]
        for id in (turn["parent"] for turn in turns[3:])
    ]
    assert queries == [[reply.calls[0].arguments] for reply in reversed(replies)]
    check_invariant(proxy.store, episode["id"], proxy.engine.calls, agent.received)
