"""Agents that drop parts of replies: over several turns, and across a root that the template starts."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_support import SEARCH, RunningProxy, tool_call

THOUGHT = "<think>\nhm\n</think>\n\nLet me look. "


def play(proxy: RunningProxy, base_url: str, *, keep: tuple[str, ...], questions: int = 2) -> None:
    """Play a tool loop of five calls with one or two questions; replies are sent back with `keep` only."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"first of {base_url}"}]
    for call in range(5):
        body = {"messages": messages, "tools": [SEARCH]}
        reply = proxy.http.post(f"{base_url}/chat/completions", json=body).json()["choices"][0]["message"]
        messages.append({"role": "assistant", **{name: reply.get(name) for name in keep}})
        call_id = reply["tool_calls"][0]["id"]
        messages.append({"role": "tool", "tool_call_id": call_id, "content": f"result {call}"})
        if call == 1 and questions == 2:
            messages.append({"role": "user", "content": "second"})


@pytest.mark.parametrize(
    "keep",
    [
        ("content", "tool_calls"),
        ("tool_calls",),
        ("content", "tool_calls", "reasoning_content"),
        ("tool_calls", "reasoning_content"),
    ],
)
def test_only_the_template_starts_a_new_root(proxy: RunningProxy, keep: tuple[str, ...]) -> None:
    proxy.engine.script = lambda call: THOUGHT + tool_call(query="a")
    episode = proxy.open_episode(split="eval")
    play(proxy, episode["base_url"], keep=keep)
    turns = proxy.tokens(episode)["turns"]
    assert [turn["parent"] is not None for turn in turns] == [False, True, False, True, True]
    assert turns[2]["forked_from"]["reason"] == "template strips reasoning"


def test_an_agent_without_an_episode_key_that_drops_content_stays_in_one_episode(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "Let me look. " + tool_call(query="a")
    before = {episode["id"] for episode in proxy.http.get("/episodes").json()["episodes"]}
    play(proxy, f"{proxy.url}/v1", keep=("tool_calls",), questions=1)
    after = proxy.http.get("/episodes").json()["episodes"]
    assert [episode["turns"] for episode in after if episode["id"] not in before] == [5]


def test_a_client_that_fills_in_the_defaults_of_a_tool_continues_the_recorded_call(
    proxy: RunningProxy,
) -> None:
    """Claude Code does this: its tool for edits has such an argument."""
    proxy.engine.script = lambda call: tool_call(query="a")
    count = {"type": "integer", "default": 3}
    schema = {"type": "object", "properties": {"query": {"type": "string"}, "count": count}}
    tools = [{"name": "search", "input_schema": schema}]
    episode = proxy.open_episode()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for number in range(3):
        body = {"messages": messages, "tools": tools, "max_tokens": 300}
        sent = proxy.http.post(f"{episode['base_url']}/messages", json=body)
        (block,) = sent.json()["content"]
        assert block["input"] == {"query": "a"}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": f"result {number}"}
        filled = {**block, "input": {"count": 3, **block["input"]}}
        messages += [{"role": "assistant", "content": [filled]}, {"role": "user", "content": [result]}]
    turns = proxy.tokens(episode)["turns"]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], turns[1]["id"]]


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "se\\ud800", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"query": "\\ud800"}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": {"query": '
        + "[" * 300
        + "]" * 300
        + "}}\n</tool_call>",
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_no_client_could_read_is_returned_as_content(
    proxy: RunningProxy, call: str, path: str, stream: bool
) -> None:
    proxy.engine.script = lambda _: call
    episode = proxy.open_episode()
    question = [{"role": "user", "content": "q"}]
    body = {"input" if path == "/responses" else "messages": question, "max_tokens": 3000, "stream": stream}
    response = proxy.http.post(episode["base_url"] + path, json=body)
    assert response.status_code == 200, response.text
    [turn] = proxy.tokens(episode)["turns"]
    assert "tool_calls" not in turn["reply"] and turn["reply"]["content"]
