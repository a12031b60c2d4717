"""Helpers of all integration tests: a scripted engine, and a proxy in front of it.

`check` compares the recorded turns with those that a case expects, and with what the engine read and sampled.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop

from areal_agents.inference import SGLangEngine
from areal_agents.proxy import ProxyConfig, create_app
from areal_agents.proxy.server import build_server, make_renderer
from areal_agents.sockets import listen, url_of
from areal_agents.store import Store
from areal_agents.testing import Script, ScriptedApp, ScriptedReply, ServedCall, running
from integrations.cases import Case, Expected
from integrations.conversations import in_order
from integrations.environments import FOLDER


@dataclass
class Stack:
    """A running proxy with a scripted engine behind it."""

    engine: ScriptedApp
    url: str
    http: httpx.Client

    def open_episode(self, replies: Sequence[str | ScriptedReply] | Script) -> dict[str, Any]:
        """Open an episode, on an engine that sends these replies and whose earlier calls are forgotten."""
        self.engine.script = replies if callable(replies) else in_order(replies)
        self.engine.exchanges.clear()
        response = self.http.post("/episodes", json={})
        assert response.status_code == 200, response.text
        return response.json()

    def turns(self, episode: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the recorded turns of an episode, with their tokens."""
        response = self.http.get(f"/episodes/{episode['id']}", params={"tokens": 1})
        assert response.status_code == 200, response.text
        return response.json()["turns"]


@contextmanager
def running_stack(model: Path, store: Path, config: ProxyConfig | None = None) -> Iterator[Stack]:
    """Run one scripted engine and one proxy on real sockets."""
    app = ScriptedApp.from_folder(model, lambda call: "ok", context_length=16_384)
    with (
        running(app) as engine_url,
        serving(engine_url, model, store, config or ProxyConfig()) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield Stack(app, url, http)


@contextmanager
def serving(engine_url: str, model: Path, store_path: Path, config: ProxyConfig) -> Iterator[str]:
    """Run the proxy in a thread until the with-block ends; yields its URL."""
    with Store.open(store_path) as store, listen("127.0.0.1", 0) as listener:
        engine = SGLangEngine(engine_url, request_timeout_s=30)
        renderer = make_renderer(model, config)
        server = build_server(create_app(store=store, engine=engine, renderer=renderer, config=config))
        server.config.timeout_graceful_shutdown = 1

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve(sockets=[listener]))
                runner.run(engine.aclose())

        thread = threading.Thread(target=run, name="proxy")
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def run_script(folder: str, question: str, environment: Mapping[str, str], *, timeout_s: float = 120) -> str:
    """Run `python agent.py QUESTION` as a user does; return its standard output."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / folder / "agent.py"), question],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(case: Case, turns: Sequence[Mapping[str, Any]], sent: Sequence[ServedCall]) -> None:
    """Compare the recorded turns with the expected tree and with what the engine saw."""
    places = {turn["id"]: index for index, turn in enumerate(turns)}
    found = [
        places[turn["parent"]] if turn["parent"] else turn["forked_from"] and turn["forked_from"]["reason"]
        for turn in turns
    ]
    if callable(case.conversation.replies):  # calls were concurrent, so any order is right
        assert shape(found) == shape(case.turns)
    else:
        assert found == list(case.turns)

    recorded = sorted((turn["prompt_ids"], turn["token_ids"], turn["logprobs"]) for turn in turns)
    assert recorded == sorted((e.input_ids.tolist(), list(e.token_ids), _float32(e.logprobs)) for e in sent)

    reused = total = 0
    for turn in turns:
        total += len(turn["prompt_ids"])
        if turn["parent"]:
            parent = turns[places[turn["parent"]]]
            before = parent["prompt_ids"] + parent["token_ids"]
            assert turn["prompt_ids"][: len(before)] == before
            reused += len(before)
    assert reused / total > case.reused


def shape(turns: Sequence[Expected]) -> list[Any]:
    """Return the trees that a list of turns describes, whatever the order in which they were recorded."""

    def subtree(index: int, label: str) -> tuple[str, list[Any]]:
        return label, sorted(subtree(i, "") for i, turn in enumerate(turns) if turn == index)

    return sorted(subtree(i, str(turn)) for i, turn in enumerate(turns) if not isinstance(turn, int))


def _float32(values: Sequence[float]) -> list[float]:
    """Return the values as they are in the JSON of a recorded turn."""
    return [float(str(value)) for value in np.array(values, np.float32)]
