"""A proxy with recorded episodes: one with branches, one that failed, and one of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from inspection_support import MODEL, SEARCH, Recorded, running_proxy, tool_call
from scripted_sampler import ScriptedSampler

from areal_agents.rendering import ChatRenderer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    path = tmp_path_factory.mktemp("inspection") / "store.db"
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    engine.script = lambda call: "Lyon"
    with running_proxy(path, engine) as proxy:
        ids = []
        for split, task in (("train", "t1"), ("train", "t2"), ("eval", "t1")):
            episode = proxy.open_episode(task={"id": task, "input": {"q": "Where?"}}, split=split)
            ids.append(episode["id"])
            messages: list[Any] = [{"role": "user", "content": "Where is Lyon?"}]
            client = proxy.openai(episode)
            if not ids[1:]:  # the first episode calls the tool, and answers
                engine.script = lambda call: tool_call(query="Lyon")
                ask = client.chat.completions.create
                called = ask(model="p", messages=messages, tools=[SEARCH]).choices[0].message
                messages.append(called.model_dump(exclude_none=True))
                result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "In France"}
                engine.script = lambda call: "Lyon"
                ask(model="p", messages=[*messages, result], tools=[SEARCH])
                engine.script = lambda call: "Lyon\x1b[2J"  # would clear a terminal
                client.chat.completions.create(model="p", messages=[{"role": "user", "content": "Other"}])
                engine.script = lambda call: "Lyon"
            else:
                client.chat.completions.create(model="p", messages=messages)
        proxy.http.post(f"/episodes/{ids[0]}/reward", json={"reward": 0.75})
        proxy.http.post(f"/episodes/{ids[0]}/finish", json={})
        proxy.http.post(f"/episodes/{ids[1]}/fail", json={"error": "no such tool"})
        proxy.http.post(f"/episodes/{ids[2]}/reward", json={"reward": 0.25})
        proxy.http.post(f"/episodes/{ids[2]}/finish", json={})
        yield Recorded(proxy, path, *ids)
