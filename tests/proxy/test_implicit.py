"""Implicit episodes: their retries are one sample, and calls that are refused leave none of them behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import ObservedEngine

from areal_agents.rendering import ChatRenderer

USER = {"role": "user", "content": "Where is Lyon?"}
BODY: dict[str, Any] = {"messages": [USER]}
CHAT = "/v1/chat/completions"
RETRIED = {"x-stainless-retry-count": "1"}
NAMED = {"session-id": "s1"}


@pytest.fixture
def proxy(renderer: ChatRenderer, tmp_path: Path) -> Iterator[RunningProxy]:
    samples = iter(range(999))
    engine = ObservedEngine(renderer, script=lambda call: f"sample {next(samples)}")
    with running_proxy(tmp_path / "s.db", engine) as running:
        yield running


def episodes(proxy: RunningProxy) -> list[dict[str, Any]]:
    """The summaries of all episodes, oldest first."""
    listed: list[dict[str, Any]] = proxy.http.get("/episodes").json()["episodes"]
    return listed


def ask(
    proxy: RunningProxy, headers: dict[str, str] | None = None, body: dict[str, Any] = BODY
) -> httpx.Response:
    return proxy.http.post(CHAT, json=body, headers=headers)


def finish(proxy: RunningProxy, episode_id: str) -> None:
    done = proxy.http.post(f"/episodes/{episode_id}/finish")
    assert (done.status_code, done.json()["status"]) == (200, "finished"), done.text


# -- ends


@pytest.mark.parametrize("named", [NAMED])
def test_an_episode_with_retried_calls_can_be_finished(proxy: RunningProxy, named: dict[str, str]) -> None:
    proxy.engine.script = lambda call: tool_call(query="Lyon")
    body = BODY | {"tools": [SEARCH]}
    first = ask(proxy, named, body).json()
    for headers in (RETRIED, RETRIED):
        assert ask(proxy, named | headers, body).json()["id"] == first["id"]
    [episode] = episodes(proxy)
    finish(proxy, episode["id"])
    # Nothing of it is found any more: the same name, and its conversation, open another episode.
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}
    assert ask(proxy, named, {"messages": [USER, message, result], "tools": [SEARCH]}).status_code == 200
    assert [item["turns"] for item in episodes(proxy)] == [1, 1]


def test_two_episodes_of_one_conversation_end_apart(proxy: RunningProxy) -> None:
    """Both were told the same; the end of the later one does not hide the earlier one."""
    proxy.engine.script = lambda call: "ok"
    ask(proxy)
    ask(proxy)
    first, second = episodes(proxy)
    finish(proxy, second["id"])
    follow_up = {"messages": [USER, {"role": "assistant", "content": "ok"}, USER]}
    assert ask(proxy, body=follow_up).status_code == 200
    assert [(item["id"], item["turns"]) for item in episodes(proxy)] == [(first["id"], 2), (second["id"], 1)]
