"""The proxy as a process, with the embedded engine behind it: killed, started again, and ended cleanly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from proxy_support import MODEL, SEARCH

from areal_agents.inference import running_engine
from areal_agents.store import Store

SERVE = """
import json, sys
from areal_agents.proxy import ProxyConfig, serve
options = json.loads(sys.argv[1])
serve(options.pop("model"), ProxyConfig(port=0), announce=lambda line: print(line, flush=True), **options)
"""


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with running_engine(MODEL, threads=1, kernel="torch") as url:
        yield url


class ProxyProcess:
    """`serve` in a process of its own, which is killed at the end of the with-block if it still runs."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-c", SERVE, json.dumps({"model": str(MODEL), **options})]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line, self.notice = (self.process.stdout.readline() for _ in range(2))
        self.url = self.line.partition(" at ")[2].partition("/v1")[0]

    def end(self, number: signal.Signals) -> str:
        """Send a signal, wait, and return the rest of the output."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[0]

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its output, and waits
            self.process.kill()


def test_kill_9_and_a_restart_lose_nothing(engine_url: str, tmp_path: Path) -> None:
    """What a client has seen is recorded, and the conversation continues from its exact tokens."""
    options = {"store": str(tmp_path / "store.db"), "engine_urls": [engine_url]}
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    opened: dict[str, Any] = {}
    seen = []
    for _ in range(2):
        with ProxyProcess(**options) as proxy:
            opened = opened or open_group(proxy.url)
            with OpenAI(base_url=f"{proxy.url}/e/{opened['key']}/v1", api_key=opened["key"]) as client:
                for _ in range(2):
                    answer = client.chat.completions.create(
                        model="p", messages=messages, tools=[SEARCH], max_tokens=12
                    )
                    seen.append(answer.id)
                    messages.append(answer.choices[0].message.to_dict())
                    messages.append({"role": "tool", "content": "nothing found"})
            proxy.end(signal.SIGKILL)
    with ProxyProcess(**options) as proxy:
        url = f"{proxy.url}/episodes/{opened['id']}"
        shown = httpx.get(url, params={"tokens": 1}, timeout=60).json()
        assert proxy.end(signal.SIGTERM).strip() == ""
    assert shown["status"] == "open" and [turn["id"] for turn in shown["turns"]] == seen
    with Store.open(tmp_path / "store.db") as store:
        (trajectory,) = store.load_episode(opened["id"]).forest.trajectories()
    last = shown["turns"][-1]
    np.testing.assert_array_equal(trajectory.token_ids, last["prompt_ids"] + last["token_ids"])
    assert [turn["parent"] for turn in shown["turns"]] == [None, *seen[:-1]]
    assert all(len(turn["logprobs"]) == len(turn["token_ids"]) <= 12 for turn in shown["turns"])
    check_logprobs(engine_url, trajectory.token_ids, trajectory.sampled_mask, trajectory.behavior_logprobs)


def open_group(url: str) -> dict[str, Any]:
    """Open the first episode of a group of two."""
    body = {"group": "g@0", "group_size": 2}
    return httpx.post(f"{url}/episodes", json=body, timeout=60).raise_for_status().json()


def check_logprobs(engine_url: str, ids: Any, sampled: Any, logprobs: Any) -> None:
    """Check the recorded logprobs against those that the engine computes for the whole trajectory at once."""
    body = {
        "input_ids": ids.tolist(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    answer = httpx.post(f"{engine_url}/generate", json=body, timeout=60).raise_for_status().json()
    again = [triple[0] for triple in answer["meta_info"]["input_token_logprobs"]]
    expected = np.array([value if value is not None else 0.0 for value in again])
    np.testing.assert_allclose(logprobs[sampled], expected[sampled], atol=2e-4)


def test_serve_starts_and_ends_its_own_engine(tmp_path: Path) -> None:
    options = {"threads": 1, "kernel": "torch"}
    with ProxyProcess(store=str(tmp_path / "s.db"), engine_options=options) as proxy:
        engine_url = proxy.line.partition("(engine ")[2].partition(")")[0]
        ready = httpx.get(f"{proxy.url}/ready", timeout=60).json()
        assert ready == {"status": "ok", "version": 0}
        assert OpenAI(base_url=f"{proxy.url}/v1", api_key="x").models.list().data[0].id == MODEL.name
        proxy.end(signal.SIGTERM)
        assert proxy.process.returncode == 0
        for url in (engine_url, proxy.url):
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health", timeout=60)


def test_the_proxy_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, areal_agents.proxy, areal_agents.rendering;"
        f"areal_agents.rendering.ChatRenderer.from_folder({str(MODEL)!r});"
        "print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
