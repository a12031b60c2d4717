"""Calls are refused if their episode ended while they ran, or was aborted because its group is complete."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_support import RunningProxy, running_proxy
from scripted_sampler import ScriptedSampler

from areal_agents.proxy.calls.prompts import Prompts
from areal_agents.rendering import ChatRenderer


@pytest.fixture(params=["turn", "batched"])
def durable(request: pytest.FixtureRequest, renderer: ChatRenderer, tmp_path: Path) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path / "s.db", ScriptedSampler(renderer), durability=request.param) as running:
        yield running


def ask(proxy: RunningProxy, episode: dict[str, Any], text: str = "hi") -> str:
    reply = proxy.openai(episode).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}]
    )
    return reply.id


def turns_when_written(proxy: RunningProxy, episode: dict[str, Any]) -> int:
    time.sleep(0.2)  # `durability: batched` writes within 50 ms
    return len(proxy.tokens(episode)["turns"])


@pytest.mark.parametrize("ending", ["finish with a reward", "late reward"])
def test_aborted_episodes_of_a_group_take_no_calls(durable: RunningProxy, ending: str) -> None:
    first = durable.open_episode(group="g@0", group_size=1, surplus=1)
    second = durable.open_episode(group="g@0")
    ask(durable, first)
    ask(durable, second)
    if ending == "finish with a reward":
        body = {"rewards": [{"reward": 1.0}]}
        assert durable.http.post(f"/episodes/{first['id']}/finish", json=body).status_code == 200
    else:
        assert durable.http.post(f"/episodes/{first['id']}/finish").status_code == 200
        assert durable.http.post(f"/episodes/{first['id']}/reward", json={"reward": 1}).status_code == 200
    assert durable.tokens(second)["status"] == "aborted"
    sampled = len(durable.engine.calls)
    for n in range(3):
        with pytest.raises(openai.ConflictError) as caught:
            ask(durable, second, f"after the end {n}")
        assert caught.value.code == "episode_sealed"
    assert len(durable.engine.calls) == sampled  # nothing was sampled
    assert turns_when_written(durable, second) == 1


def test_a_call_whose_prompt_is_being_built_is_refused_when_its_episode_ends(
    durable: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, ended = threading.Event(), threading.Event()
    build = Prompts.prompt

    async def slow(self: Prompts, *given: Any, **more: Any) -> Any:
        built = await build(self, *given, **more)
        if len(durable.engine.calls) == 1:  # the second call
            building.set()
            while not ended.is_set():
                await asyncio.sleep(0.01)
        return built

    monkeypatch.setattr(Prompts, "prompt", slow)
    episode = durable.open_episode()
    ask(durable, episode)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, durable, episode, "too late")
        try:
            assert building.wait(60)
            assert durable.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "finished"
        finally:
            ended.set()  # otherwise the call would not end
        with pytest.raises(openai.ConflictError):
            late.result(60)
    assert len(durable.engine.calls) == 1
    assert turns_when_written(durable, episode) == 1
