"""After kill -9 of the proxy in the middle of episodes, every dialect continues from its exact tokens."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from agents_support import AGENTS, Agent, MessagesAgent
from mutation_support import Mutation
from proxy_support import MODEL, RunningProxy, tool_call
from record_support import check_trajectory
from scripted_sampler import EngineCall

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.inference.sglang.client import RID_END
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ScriptedReply, ServedCall, running

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/policy:streamGenerateContent?alt=sse",
    "completions": "/v1/completions",
}
SERVE = """
import json, sys
from areal_agents.proxy import ProxyConfig, serve
options = json.loads(sys.argv[1])
config = ProxyConfig(port=0, **options.pop("config"))
serve(options.pop("model"), config, announce=lambda line: print(line, flush=True), **options)
"""


@contextmanager
def proxy_process(**options: Any) -> Iterator[RunningProxy]:
    """`serve` in a process of its own, which is killed with SIGKILL at the end of the block."""
    command = [sys.executable, "-c", SERVE, json.dumps({"model": str(MODEL), **options})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().partition(" at ")[2].partition("/v1")[0]
        assert url
        with httpx.Client(base_url=url, timeout=30) as http:
            yield RunningProxy(url, None, None, http)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)


def wait_for_turns(path: Path, count: int) -> None:
    """Read the database file until it has `count` turns."""
    deadline = time.monotonic() + 30
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        while database.execute("SELECT count(*) FROM turns").fetchone()[0] < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def moved(agent: Agent, proxy: RunningProxy) -> None:
    """Connect an agent to the proxy that took over."""
    agent.close()
    agent.episode = {**agent.episode, "base_url": f"{proxy.url}/e/{agent.episode['key']}/v1"}
    agent.client = agent.connect(proxy)


def step(agent: Agent, *, streamed: bool) -> None:
    """Make one call, and add its reply and the results of its tools."""
    [reply] = agent.ask(streamed=streamed)
    agent.take(reply)
    agent.results(reply, "result")


@contextmanager
def half_an_answer(proxy: RunningProxy, agent: Agent) -> Iterator[None]:
    """Make a streamed call, and run the block after its first piece, while the client waits for more."""
    path = PATHS.get(agent.dialect, "/v1/responses")
    body = {**agent.body({}), "stream": True}
    with httpx.stream(
        "POST", f"{proxy.url}/e/{agent.episode['key']}{path}", json=body, timeout=30
    ) as response:
        text = ""
        for part in response.iter_text():
            text += part
            if "one" in text:
                yield
                return
        raise AssertionError(text)


def as_call(exchange: ServedCall) -> EngineCall:
    """Return what the engine received and returned, according to the engine."""
    finish = exchange.finish["type"]
    versions = [int(version) if version.isdigit() else 0 for version in exchange.versions]
    completion = Completion(exchange.token_ids, exchange.logprobs, versions, finish)
    return EngineCall(exchange.rid.removesuffix(RID_END), exchange.input_ids, SamplingParams(1), completion)


def check_record(store: Store, agent: Agent, exchanges: list[ServedCall]) -> None:
    """Check that all calls of an agent are one path, exactly as the engine saw it."""
    episode = store.load_episode(agent.episode["id"])
    assert [turn.id for turn in episode.turns] == agent.received
    assert [turn.parent for turn in episode.turns] == [None, *agent.received[:-1]]
    calls = {call.rid: call for call in map(as_call, exchanges)}
    for turn in episode.turns:
        np.testing.assert_array_equal(turn.completion.token_ids, calls[turn.id].completion.token_ids)
        np.testing.assert_array_equal(turn.completion.logprobs, calls[turn.id].completion.logprobs)
        np.testing.assert_array_equal(episode.forest.prompt_ids(turn.id), calls[turn.id].input_ids)
        assert turn.discarded == ""
    [trajectory] = episode.forest.trajectories()
    check_trajectory(trajectory, calls[agent.received[-1]])


@pytest.mark.parametrize("durability", ["turn", "batched"])
def test_every_dialect_continues_after_a_kill(tmp_path: Path, durability: str) -> None:
    counter = iter(range(999))
    app = ScriptedApp.from_folder(
        MODEL, lambda call: "<think>\nhm\n</think>\n\n" + tool_call(query=f"query {next(counter)}")
    )
    path = tmp_path / "store.db"
    with running(app) as engine_url, ExitStack() as streams:
        options = {"store": str(path), "engine_urls": [engine_url], "config": {"durability": durability}}
        with proxy_process(**options) as proxy:
            agents = [
                kind(proxy, proxy.open_episode(), f"Where is {name}?", "Answer.")
                for name, kind in AGENTS.items()
            ]
            for agent in agents:
                agent.limit = 8  # of text completions: such a prompt continues only a reply that was cut off
            for index in range(2):
                for agent in agents:
                    step(agent, streamed=index == 1)
            if durability == "batched":
                wait_for_turns(path, 2 * len(agents))
            script, app.script = (
                app.script,
                lambda call: ScriptedReply("one two three", chunk_delay_s=60, chunk_tokens=3),
            )
            for agent in agents:  # one more call each; the proxy is killed in the middle of the replies
                streams.enter_context(half_an_answer(proxy, agent))
        streams.close()
        app.script = script
        with proxy_process(**options) as proxy:
            for agent in agents:
                moved(agent, proxy)
                step(agent, streamed=False)
                agent.ask(streamed=True)
            if durability == "batched":
                wait_for_turns(path, 4 * len(agents))
        with Store.open(path) as store:
            for agent in agents:
                agent.close()
                check_record(store, agent, app.exchanges)


def test_siblings_are_told_apart_by_their_signature_after_a_kill(tmp_path: Path) -> None:
    """With two equal samples and the client's own call ids, only the signature identifies the sample."""
    app = ScriptedApp.from_folder(MODEL, lambda call: "<think>\nhm\n</think>\n\n" + tool_call(query="Lyon"))
    options = {"store": str(tmp_path / "s.db"), "config": {}}
    with running(app) as engine_url:
        options["engine_urls"] = [engine_url]
        with proxy_process(**options) as proxy:
            agent = MessagesAgent(proxy, proxy.open_episode(), "Where?")
            [first] = agent.ask()
            unit = agent.replayed(first, Mutation())
            agent.ask()
        with proxy_process(**options) as proxy:
            moved(agent, proxy)
            result = [{"type": "tool_result", "tool_use_id": "toolu_own", "content": "France"}]
            unit[0]["content"][-1]["id"] = "toolu_own"
            agent.history += [unit, [{"role": "user", "content": result}]]
            agent.ask()
        agent.close()
    with Store.open(tmp_path / "s.db") as store:
        turns = store.load_episode(agent.episode["id"]).turns
    assert [turn.parent for turn in turns] == [None, None, first.turn_id]
