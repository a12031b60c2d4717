"""The key of an engine: every server refuses requests without it, and no command line or log contains it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from real_sglang import running_sglang
from real_vllm import running_vllm

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference import EmbeddedEngineConfig, EngineProcess
from areal_agents.inference.clients import Protocol, connect
from areal_agents.launch.ready import wait_until_any_ready
from areal_agents.secret_variables import ENGINE_KEY

KEY = "-" + secrets.token_urlsafe(24)  # keys may begin like an option
GUARDED = {
    "sglang": [
        ("POST", "/generate"), ("POST", "/pause_generation"), ("POST", "/update_weights_from_disk"),
        ("POST", "/init_weights_update_group"), ("POST", "/abort_request"), ("GET", "/model_info"),
        ("GET", "/get_server_info"),
    ],
    "vllm": [
        ("POST", "/inference/v1/generate"), ("POST", "/pause"), ("POST", "/collective_rpc"),
        ("POST", "/abort_requests"), ("GET", "/weight_info"), ("GET", "/v1/models"),
    ],
}  # fmt: skip


@contextmanager
def embedded(folder: Path, log: Path) -> Iterator[str]:
    config = EmbeddedEngineConfig(model=str(folder), port=0, threads=1, slots=2, kernel="torch")
    with EngineProcess(config, key=KEY, log_path=log) as engine:
        yield engine.url


@pytest.fixture(
    scope="module",
    params=[
        "embedded",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def guarded(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Protocol, Path]]:
    """The URL, the protocol and the log of a server with a key."""
    log = tmp_path_factory.mktemp("engine") / "log"
    if request.param == "embedded":
        with embedded(model_folder, log) as url:
            yield url, "sglang", log
        return
    python = request.getfixturevalue(f"{request.param}_python")
    running = running_sglang if request.param == "sglang" else running_vllm
    with running(python, model_folder, key=KEY, log_path=log) as url:
        yield url, request.param, log


def test_requests_without_the_key_are_refused(guarded: tuple[str, Protocol, Path]) -> None:
    url, protocol, log = guarded
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        for method, path in GUARDED[protocol]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                assert client.request(method, path, json={}, headers=headers).status_code == 401, path
        assert client.get("/health").status_code == 200

    async def sample(key: str) -> int:
        async with connect(url, protocol, key=key) as engine:
            return len(await engine.generate("r", [3, 4, 5], SamplingParams(max_new_tokens=3)))

    assert asyncio.run(sample(KEY)) == 3
    with pytest.raises(EngineUnavailable, match=f"another key than the engine or none .*{ENGINE_KEY}"):
        asyncio.run(sample(""))
    assert KEY not in log.read_text()
    own = psutil.Process()
    lines = [" ".join(child.cmdline()) for child in own.children(recursive=True)]
    assert lines and not any(KEY in line for line in lines)


def test_waiting_for_engines_with_another_key_fails_at_once(
    guarded: tuple[str, Protocol, Path],
) -> None:
    url, protocol, _ = guarded
    path = "/model_info" if protocol == "sglang" else "/weight_info"
    assert wait_until_any_ready([url + path], key=KEY) == (url + path,)
    with pytest.raises(ConfigError, match=ENGINE_KEY):
        wait_until_any_ready([url + path], key="another")
