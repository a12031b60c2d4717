"""The processes of a run reach each other although the environment names an HTTP proxy that is down."""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass_environment

import pytest

import areal_agents
from areal_agents.client import AsyncClient, Client
from areal_agents.direct_http import bypassing_proxies
from areal_agents.doctor import examine
from areal_agents.inference import EmbeddedEngineConfig, EngineConfig, EngineProcess, SGLangEngine
from areal_agents.inference.ports import reserved_ports
from areal_agents.inference.sglang.server import GpuPlacement, server_environment
from areal_agents.launch.engine_busy import EngineBusy
from areal_agents.launch.ready import wait_until_any_ready, wait_until_ready
from areal_agents.rollout.agents.command import CommandAgent
from benchmarks.proxy.processes import Server

PACKAGE = Path(areal_agents.__file__).parent
HELPER = PACKAGE / "direct_http.py"
PLAYER = PACKAGE / "doctor" / "rewards" / "edit_tests.py"  # an agent's program, which needs only Python
EXAMPLE = PACKAGE.parent / "examples" / "search_agent"
COMMAND = [sys.executable, str(PACKAGE.parent / "tests" / "doctor" / "doctor_agents.py"), "openai"]
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NO_PROXY = ("NO_PROXY", "no_proxy")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set an environment that sends all HTTP to an address where nothing answers; yield its URL."""
    for name in NO_PROXY:
        monkeypatch.delenv(name, raising=False)
    with reserved_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        for name in PROXIES:
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.lower(), url)
        yield url


@contextmanager
def server_that_says(answer: object) -> Iterator[tuple[str, list[str]]]:
    """Run a server; yields its URL and the targets of the requests that it receives."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


@pytest.mark.usefixtures("dead_proxy")
async def test_engine_proxy_and_clients_work_on_a_machine_with_an_http_proxy(tmp_path: Path) -> None:
    """A small installation: an engine, `serve` in front of it, and clients of both."""
    model = EXAMPLE / "model"
    with EngineProcess(EmbeddedEngineConfig(model=str(model), port=0, threads=1)) as engine:
        wait_until_ready(engine.url + "/health", timeout_s=60)
        assert wait_until_any_ready([engine.url + "/model_info"], timeout_s=60)
        busy = EngineBusy((engine.url,), timeout_s=60)
        busy.follow(1, 9)
        busy.follow(2, 9)
        assert busy.idle_share() is not None
        async with SGLangEngine(engine.url) as sampler:
            assert (await sampler.model_info()).version == 0
        command = [sys.executable, "-m", "areal_agents.cli", "serve", "--port", "0", "--model", str(model)]
        command += ["--engine-url", engine.url, "--store", f"{tmp_path}/store.db"]
        with Server(command, ready="/ready") as serve:
            with Client(serve.url) as client:
                opened = client.open_episode({"id": "t", "input": {}})
            async with AsyncClient(serve.url) as client:
                assert (await client.get_episode(opened.id))["status"] == "open"


@pytest.mark.usefixtures("dead_proxy")
def test_the_doctor_and_a_command_work_on_a_machine_with_an_http_proxy() -> None:
    report = examine(command=COMMAND, timeout_s=60)
    assert report.agent_error is None and report.facts.turns == 1
    assert not [finding for finding in report.findings if "sends HTTP through" in finding.what]


@pytest.mark.usefixtures("dead_proxy")
def test_an_http_proxy_that_a_client_is_given_is_used() -> None:
    with (
        server_that_says({"version": 7}) as (proxy, seen),
        Client("http://a.example", http_proxy=proxy) as client,
    ):
        assert client.served_version() == 7
    assert seen == ["http://a.example/ready"]


async def test_an_http_proxy_that_an_async_client_is_given_is_used() -> None:
    with server_that_says({"version": 7}) as (proxy, seen):
        async with AsyncClient("http://a.example", http_proxy=proxy) as client:
            assert await client.served_version() == 7
    assert seen == ["http://a.example/ready"]


@pytest.mark.parametrize(
    ("given", "urls", "expected"),
    [
        ({}, ["http://127.0.0.1:8000/v1"], "127.0.0.1"),
        ({}, ["http://localhost:1", "http://[::1]:1", "https://10.2.3.4"], "localhost,::1,10.2.3.4"),
        ({"NO_PROXY": ".corp, a.example"}, ["http://127.0.0.1"], ".corp,a.example,127.0.0.1"),
        ({"NO_PROXY": "a", "no_proxy": "b,127.0.0.1"}, ["http://127.0.0.1"], "a,b,127.0.0.1"),
        ({"no_proxy": "*"}, ["http://127.0.0.1"], "*"),
        ({"NO_PROXY": "a"}, ["https://proxy.example.com/v1", "http://8.8.8.8"], "a"),
        ({}, ["https://proxy.example.com/v1"], None),
    ],
)
def test_a_child_process_calls_local_hosts_without_an_http_proxy(
    given: dict[str, str], urls: list[str], expected: str | None
) -> None:
    others = {"HTTP_PROXY": "http://proxy.example:3128", "PATH": "/bin"}
    environment = bypassing_proxies({**others, **given}, *urls)
    assert {name: value for name, value in environment.items() if name not in NO_PROXY} == others
    assert [environment.get(name) for name in NO_PROXY] == [expected, expected]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.9.8.7"])
def test_sglang_reaches_itself_on_a_machine_with_an_http_proxy(
    monkeypatch: pytest.MonkeyPatch, dead_proxy: str, host: str
) -> None:
    environment = server_environment(EngineConfig(kind="sglang", python=sys.executable), GpuPlacement(), host)
    for name in NO_PROXY:
        monkeypatch.setenv(name, environment[name])
    for address in (host, "127.0.0.1", "localhost"):
        assert proxy_bypass_environment(address)
    assert getproxies_environment()["http"] == dead_proxy and not proxy_bypass_environment("a.example")


async def test_a_command_bypasses_the_http_proxy_only_for_its_own_proxy(
    tmp_path: Path, dead_proxy: str
) -> None:
    code = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
    ep = areal_agents.Episode("e", "http://127.0.0.1:8000/e/k/v1", "k")
    await CommandAgent([sys.executable, "-c", code]).run({}, ep)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["NO_PROXY"] == seen["no_proxy"] == "127.0.0.1"
    assert {seen[name] for name in PROXIES} == {dead_proxy}
    assert all(os.environ[name] == dead_proxy for name in PROXIES)


STARTERS = PACKAGE / "starter" / "files"  # agents, which create their clients themselves


def test_the_package_makes_its_http_clients_in_one_place() -> None:
    """The failure message for a client that would trust the environment points to `direct_http`."""
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {what}; use areal_agents.direct_http"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, what in _own_clients(path.read_text())
        if path not in (HELPER, PLAYER) and path.parents[1] != STARTERS
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import httpx; httpx.get(url)",
        "import httpx\nwith httpx.AsyncClient() as c: pass",
        "import httpx; httpx.HTTPTransport()",
        "from httpx import Client",
        "import httpx as h",
        "import urllib.request",
        "from urllib import request",
        "from urllib.request import urlopen",
        "import requests",
        "from requests.sessions import Session",
        "import http.client",
        "from openai import AsyncOpenAI",
        "import anthropic",
        "from websockets.asyncio.client import connect",
        "aiohttp.ClientSession(trust_env=True)",
        "session.get(url, trust_env=x)",
    ],
)
def test_a_client_that_trusts_the_environment_is_found(code: str) -> None:
    assert _own_clients(code)


@pytest.mark.parametrize(
    "code",
    [
        "import httpx\ndef f(e: httpx.HTTPError, c: httpx.Client) -> httpx.Response: ...",
        "from urllib.parse import quote",
        "from starlette.requests import Request",
        "from openai.types import Completion",
        "import aiohttp; aiohttp.ClientSession()",
        "from websockets.asyncio.server import serve",
    ],
)
def test_code_that_creates_no_client_is_allowed(code: str) -> None:
    assert not _own_clients(code)


_HTTPX_CALLS = {
    *("get", "post", "put", "patch", "delete", "head", "options", "request", "stream"),
    *("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport"),
}
# aiohttp trusts the environment only where `trust_env` is given, which is looked for everywhere.
_CLIENT_MODULES = (
    "urllib.request",
    "urllib3",
    "requests",
    "http.client",
    "openai",
    "anthropic",
    "websockets",
)
_NO_CLIENTS = ("websockets.asyncio.server", "websockets.exceptions", "websockets.http11")


def _own_clients(code: str) -> list[tuple[int, str]]:
    """(line, what) for each use of an HTTP library that may go through a proxy of the environment."""
    found = []
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [
                (node.lineno, "httpx under another name")
                for a in node.names
                if a.name == "httpx" and a.asname
            ]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module == "httpx":
                found.append((node.lineno, "a name of httpx"))
        elif isinstance(node, ast.Call):
            function = node.func
            if (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and function.value.id == "httpx"
                and function.attr in _HTTPX_CALLS
            ):
                found.append((node.lineno, f"httpx.{function.attr}"))
            found += [(node.lineno, "trust_env") for word in node.keywords if word.arg == "trust_env"]
        found += [
            (node.lineno, name)
            for name in names
            if any(name == module or name.startswith(module + ".") for module in _CLIENT_MODULES)
            and not name.startswith(_NO_CLIENTS)
            and not name.startswith(("openai.types", "anthropic.types"))
        ]
    return found
