"""Text that a client changes at every call (`proxy.volatile`) causes no branch, and is read as first seen."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents_support import AGENTS, Agent
from anthropic import Anthropic
from proxy_support import MODEL, RunningProxy, running_proxy, tool_call
from scripted_sampler import EngineCall, ScriptedSampler
from workers_support import workers_of

from areal_agents.core.messages import Message
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, running

CLAUDE_CODE = "claude-cli/2.1.197 (external, sdk-cli)"
BASH = {
    "name": "Bash",
    "description": "Executes a bash command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
TIME = {"time": {"pattern": r"The time is \d\d:\d\d:\d\d"}}


def billing(call: int) -> str:
    """The first system block of claude-code; the end of the version and cch are hashes of the request."""
    digest = hashlib.sha256(str(call).encode()).hexdigest()
    return (
        "x-anthropic-billing-header: "
        f"cc_version=2.1.197.{digest[:3]}; cc_entrypoint=sdk-cli; cch={digest[3:8]};"
    )


class ClaudeCode:
    """Calls like claude-code 2.1: streamed, with tools, reminders, and a cache_control that moves."""

    def __init__(self, episode: dict[str, Any], client: str = CLAUDE_CODE) -> None:
        self.key = episode["key"]
        self.headers = {"User-Agent": client, "X-Claude-Code-Session-Id": "2ac976ea-4f2f"}
        reminder = "<system-reminder>\nToday's date is 2026-11-25.\n</system-reminder>\n"
        question = [{"type": "text", "text": text} for text in (reminder, "List the files.")]
        self.messages: list[Any] = [{"role": "user", "content": question}]

    def call(self, proxy: RunningProxy, *calls: int) -> None:
        """Make calls with the hashes of the given numbers; add each reply and the results of its tools."""
        with Anthropic(
            base_url=f"{proxy.url}/e/{self.key}",
            api_key=self.key,
            max_retries=0,
            default_headers=self.headers,
        ) as anthropic:
            for call in calls:
                *earlier, last = self.messages
                last = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **CACHED}]}
                with anthropic.messages.stream(
                    model="claude-sonnet-5",
                    max_tokens=100,
                    system=system_blocks(call),
                    messages=[*earlier, last],
                    tools=[BASH],
                ) as stream:
                    said = stream.get_final_message()
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": f"file-{call}"}
                    for block in said.content
                    if block.type == "tool_use"
                ]
                self.messages += [
                    {"role": "assistant", "content": said.content},
                    {"role": "user", "content": results},
                ]


def system_blocks(call: int) -> list[Any]:
    agent = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
    return [
        {"type": "text", "text": billing(call)},
        {"type": "text", "text": agent, **CACHED},
        {"type": "text", "text": "\nYou are an interactive agent that helps users.", **CACHED},
    ]


@pytest.fixture(scope="module")
def timed(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A proxy with a rule for the time of day, besides the built-in ones."""
    path = tmp_path_factory.mktemp("timed") / "store.db"
    with running_proxy(path, ScriptedSampler(renderer), volatile=TIME) as proxy:
        yield proxy


def reset(proxy: RunningProxy, script: Any = lambda call: CALL) -> None:
    proxy.engine.calls.clear()
    proxy.engine.script = script


def turns_of(proxy: RunningProxy, episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recorded turns; each must have exactly the prompt and the completion of the engine."""
    turns = proxy.tokens(episode)["turns"]
    for turn, call in zip(turns, proxy.engine.calls, strict=True):
        assert turn["prompt_ids"] == call.input_ids.tolist()
        assert turn["token_ids"] == call.completion.token_ids.tolist()
    return turns


def reused_share(turns: list[dict[str, Any]]) -> float:
    """Return the share of tokens known from the turn before that the prompt reused as recorded."""
    known = reused = 0
    for before, turn in itertools.pairwise(turns):
        context = before["prompt_ids"] + before["token_ids"]
        known += len(context)
        if turn["parent"] == before["id"]:
            assert turn["prompt_ids"][: len(context)] == context
            reused += len(context)
    return reused / known


def told(proxy: RunningProxy, call: EngineCall) -> str:
    return proxy.engine.renderer.tokenizer.decode(call.input_ids.tolist())


def test_the_hash_of_claude_code_causes_no_branch(timed: RunningProxy) -> None:
    reset(timed)
    episode = timed.open_episode()
    ClaudeCode(episode).call(timed, *range(8))
    turns = turns_of(timed, episode)
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
    assert reused_share(turns) == 1
    assert [turn["volatile_as_first_seen"] for turn in turns] == [0] + 7 * [1]
    last = told(timed, timed.engine.calls[-1])
    assert last.count(billing(0)) == 1 and not any(billing(call) in last for call in range(1, 8))
    assert "areal_agents_volatile_as_first_seen_total 7.0" in timed.http.get("/metrics").text


@pytest.mark.parametrize(
    ("volatile", "client"),
    [({"claude-code-billing": False}, CLAUDE_CODE), ({}, "another/1.0"), ({}, "")],
    ids=["switched off", "another client", "no client"],
)
def test_without_the_rule_every_call_is_a_branch(
    tmp_path: Path, renderer: ChatRenderer, volatile: dict[str, Any], client: str
) -> None:
    with running_proxy(
        tmp_path / "store.db", ScriptedSampler(renderer, lambda call: CALL), volatile=volatile
    ) as proxy:
        episode = proxy.open_episode()
        ClaudeCode(episode, client).call(proxy, *range(8))
        turns = turns_of(proxy, episode)
        assert reused_share(turns) == 0 and [turn["parent"] for turn in turns] == 8 * [None]
        assert {turn["forked_from"]["reason"] for turn in turns[1:]} == {"edited"}
        assert all(turn["volatile_as_first_seen"] == 0 for turn in turns)
        assert all(billing(index) in told(proxy, call) for index, call in enumerate(proxy.engine.calls))


def clock(call: int) -> str:
    return f"Be brief. The time is 12:00:{call:02d}. Answer in French."


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_configured_rule_applies_in_every_dialect(
    timed: RunningProxy, dialect: str, streamed: bool
) -> None:
    reset(timed, lambda call: tool_call(query="Lyon"))
    episode = timed.open_episode()
    agent: Agent = AGENTS[dialect](timed, episode, "Where is Lyon?", clock(0))
    with contextlib.closing(agent):
        for call in range(4):
            agent.system = clock(call)
            (reply,) = agent.ask(streamed=streamed)
            agent.take(reply)
            agent.results(reply, f"result {call}")
    turns = turns_of(timed, episode)
    assert reused_share(turns) == 1 and [turn["volatile_as_first_seen"] for turn in turns] == [0, 1, 1, 1]
    assert clock(0) in told(timed, timed.engine.calls[-1])
    assert timed.store.load_episode(episode["id"]).turns[0].new_messages[0].content == clock(0)


def test_a_change_outside_the_volatile_text_is_a_fork(timed: RunningProxy) -> None:
    reset(timed, lambda call: tool_call(query="Lyon"))
    episode = timed.open_episode()
    agent = AGENTS["chat"](timed, episode, "Where is Lyon?", clock(0))
    with contextlib.closing(agent):
        for system in (clock(0), clock(1), clock(2).replace("French", "Dutch"), f"At 12:00:03. {clock(3)}"):
            agent.system = system
            (reply,) = agent.ask()
            agent.take(reply)
            agent.results(reply, "In France.")
    turns = turns_of(timed, episode)
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], None, None]
    assert [turn["forked_from"]["reason"] for turn in turns[2:]] == ["edited", "edited"]
    assert "The time is 12:00:02. Answer in Dutch." in told(timed, timed.engine.calls[2])
    assert [turn["volatile_as_first_seen"] for turn in turns] == [0, 1, 0, 0]


def test_a_new_message_keeps_its_own_text(renderer: ChatRenderer, tmp_path: Path) -> None:
    """A message that is like an earlier one, but at another index, is read as it was sent."""
    rule = {"time": {"pattern": r"The time is [0-9:]{8}", "roles": ["tool"]}}
    engine = ScriptedSampler(renderer, lambda call: tool_call(query="Lyon"))
    with running_proxy(tmp_path / "store.db", engine, volatile=rule) as proxy:
        episode = proxy.open_episode()
        agent = AGENTS["chat"](proxy, episode, "Where is Lyon?")
        with contextlib.closing(agent):
            for call in range(3):
                (reply,) = agent.ask()
                agent.take(reply)
                agent.results(reply, clock(10 + call))
                agent.history[2][0]["content"] = clock(20 + call)  # the first result is rewritten
        turns = turns_of(proxy, episode)
        assert reused_share(turns) == 1
        assert [turn["volatile_as_first_seen"] for turn in turns] == [0, 0, 1]
        last = told(proxy, engine.calls[-1])
        assert [clock(call) in last for call in (10, 11, 20, 21)] == [False, True, True, False]


def test_a_new_root_is_rendered_with_the_text_as_first_seen(timed: RunningProxy) -> None:
    """The template drops earlier reasoning at a user message, so the second prompt is rendered in full."""
    reset(timed, lambda call: "<think>\nHm.\n</think>\n\nOui.")
    episode = timed.open_episode()
    agent = AGENTS["chat"](timed, episode, "Where is Lyon?", clock(0))
    with contextlib.closing(agent):
        (reply,) = agent.ask()
        agent.take(reply)
        agent.say("And Paris?")
        agent.system = clock(1)
        agent.ask()
        agent.system = clock(2)
        agent.ask()
    turns = turns_of(timed, episode)
    reasons = [turn["forked_from"] and turn["forked_from"]["reason"] for turn in turns]
    assert reasons == [None, "template strips reasoning", "template strips reasoning"]
    assert [turn["volatile_as_first_seen"] for turn in turns] == [0, 1, 1]
    assert turns[1]["prompt_ids"] == turns[2]["prompt_ids"]
    messages = [
        Message("system", clock(0)),
        Message("user", "Where is Lyon?"),
        Message("assistant", "Oui."),
        Message("user", "And Paris?"),
    ]
    schema = [{"type": "function", "function": t["function"]} for t in agent.body({})["tools"]]
    expected = timed.engine.renderer.render(messages, schema)
    assert turns[2]["prompt_ids"] == expected.tolist()


def test_the_first_text_is_known_after_a_restart(renderer: ChatRenderer, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with running_proxy(store, ScriptedSampler(renderer, lambda call: CALL)) as proxy:
        episode = proxy.open_episode()
        agent = ClaudeCode(episode)
        agent.call(proxy, 0, 1)
        before = turns_of(proxy, episode)
    with running_proxy(store, ScriptedSampler(renderer, lambda call: CALL)) as proxy:
        agent.call(proxy, 2)
        ClaudeCode(episode).call(proxy, 3)  # starts over, so its prompt is rendered anew
        turns = proxy.tokens(episode)["turns"]
        sent = [call.input_ids.tolist() for call in proxy.engine.calls]
    assert sent == [turn["prompt_ids"] for turn in turns[2:]]
    assert turns[2]["parent"] == before[1]["id"] and turns[3]["forked_from"]["reason"] == "resampled"
    assert turns[3]["prompt_ids"] == before[0]["prompt_ids"]
    assert [turn["volatile_as_first_seen"] for turn in turns] == [0, 1, 1, 1]


def test_an_implicit_episode_is_found_by_any_worker(tmp_path: Path) -> None:
    """Without a key or a session name, a conversation is found by its messages, in whichever worker."""
    app = ScriptedApp.from_folder(MODEL, lambda call: "ok")
    store, rule = tmp_path / "store.db", "{time: {pattern: 'The time is [0-9:]{8}'}}"
    with running(app) as engine_url, workers_of(engine_url, store, volatile=rule) as (serving, _):
        for first in range(6):  # different questions lead to different workers
            messages: list[Any] = [{"role": "user", "content": f"question {first}"}]
            for call in range(3):
                body = {"model": "p", "messages": [{"role": "system", "content": clock(call)}, *messages]}
                url = f"{serving.own[(first + call) % 2]}/v1/chat/completions"
                answer = httpx.post(url, json=body, timeout=30).raise_for_status().json()
                result = {"role": "tool", "content": f"result {call}"}
                messages += [answer["choices"][0]["message"], result]
        with Store.open(store) as opened:
            rows = [opened.episode_row(summary.id) for summary in opened.episodes()]
            turns = [opened.load_episode(row.id).turns for row in rows]
    assert [len(each) for each in turns] == 6 * [3] and len({row.owner for row in rows}) == 2
    for each in turns:
        assert [turn.parent for turn in each] == [None, each[0].id, each[1].id]
        assert [turn.volatile_as_first_seen for turn in each] == [0, 1, 1]
        assert each[0].new_messages[0].content == clock(0)


def test_a_retry_with_another_hash_gets_the_same_sample(timed: RunningProxy) -> None:
    reset(timed)
    episode = timed.open_episode()
    first, again = ClaudeCode(episode), ClaudeCode(episode)
    first.call(timed, 0)
    again.headers["x-stainless-retry-count"] = "1"
    again.call(timed, 1)
    assert len(turns_of(timed, episode)) == 1 and again.messages[1] == first.messages[1]


def test_a_rule_that_matches_nothing_changes_nothing(renderer: ChatRenderer, tmp_path: Path) -> None:
    rules = {"other": {"pattern": "no such text: .*", "roles": ["system", "user", "tool"]}}
    rows = []
    for index, volatile in enumerate(({}, rules)):
        store = tmp_path / f"{index}.db"
        with running_proxy(store, ScriptedSampler(renderer, lambda call: CALL), volatile=volatile) as proxy:
            episode = proxy.open_episode()
            agent = AGENTS["chat"](proxy, episode, "Where is Lyon?", clock(0))
            with contextlib.closing(agent):
                for _ in range(3):
                    (reply,) = agent.ask()
                    agent.take(reply)
                    agent.results(reply, "result")
            turns = proxy.store.load_episode(episode["id"]).turns
            rows.append([(t.new_prompt_ids.tolist(), [m.digest for m in t.new_messages][:1]) for t in turns])
    assert rows[0] == rows[1]


def test_tokens_are_counted_with_the_text_as_first_seen(timed: RunningProxy) -> None:
    """count_tokens uses the first text as well, so that a much longer one is not counted."""
    reset(timed)
    episode = timed.open_episode()
    agent = ClaudeCode(episode)
    agent.call(timed, 0)
    system = [{"type": "text", "text": billing(1) + " and" * 50}, *system_blocks(1)[1:]]
    with Anthropic(
        base_url=f"{timed.url}/e/{episode['key']}", api_key=episode["key"], default_headers=agent.headers
    ) as anthropic:
        counted = anthropic.messages.count_tokens(
            model="x", system=system, messages=agent.messages, tools=[BASH]
        ).input_tokens
    agent.call(timed, 2)
    assert counted == len(timed.engine.calls[-1].input_ids)
