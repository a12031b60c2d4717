"""Sub-agents and auxiliary calls are labelled by their headers, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_support import RunningProxy

from areal_agents.proxy.calls.labels import label_of, session_of

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1beta/models/x:generateContent": {"contents": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_calls_of_an_episode_are_labelled_by_their_headers(proxy: RunningProxy, path: str) -> None:
    """A session after the first is a sub-agent; an agent id overrides it, and x-episode-label both."""
    episode = proxy.open_episode()
    sent: list[dict[str, str]] = [
        {},
        {"session-id": "main"},
        {"session-id": "other"},
        {"session-id": "main", "X-Claude-Code-Agent-Id": "scout"},
        {"session-id": "other", "x-claude-code-agent-id": "scout", "X-Episode-Label": "title"},
        {"x-episode-label": ""},
        {"x-episode-label": "l" * 300},
    ]
    for headers in sent:
        proxy.http.post(f"/e/{episode['key']}{path}", json=PATHS[path], headers=headers).raise_for_status()
    labels = [turn.label for turn in proxy.store.load_episode(episode["id"]).turns]
    assert labels == ["", "", "sub-agent/other", "sub-agent/scout", "title", "", "l" * 200]


@pytest.mark.parametrize(
    ("headers", "main", "label"),
    [
        ({}, "", ""),
        ({"session-id": "a"}, "", ""),
        ({"session-id": "a"}, "a", ""),
        ({"session-id": ""}, "a", ""),
        ({"session-id": "b"}, "a", "sub-agent/b"),
        ({"session-id": "b" * 300}, "a", "sub-agent/" + "b" * 190),
        ({"x-claude-code-agent-id": "s" * 300}, "", "sub-agent/" + "s" * 190),
        ({"x-episode-label": "t", "x-claude-code-agent-id": "s"}, "", "t"),
    ],
)
def test_labels_by_example(headers: dict[str, str], main: str, label: str) -> None:
    assert label_of(headers, main) == label
    assert session_of(headers) == headers.get("session-id", "")
