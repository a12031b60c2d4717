"""Roles that are reached by a host name: their certificate is valid for the name, and for no address.

The name is `localhost`, which every machine resolves to itself, just as the name servers of a cluster resolve
the name of a pod to its address.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from tls_files import made_tls_files

from areal_agents.cluster import role as role_module
from areal_agents.cluster.proxy_forwarder import forwarding_to_proxies
from areal_agents.cluster.role import run_role
from areal_agents.cluster.run_record import RunKeys, RunRecord, text_of
from areal_agents.config import load_config
from areal_agents.direct_http import direct_client
from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.supervision import EXIT_STOPPED
from areal_agents.rollout.sandbox_hosts import hosts_of_run
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.secret_variables import RUN_TOKEN, bearer
from areal_agents.store import Store
from areal_agents.tls import TlsConfig, trusting
from tests.sandbox.conftest import spec_for

REPOSITORY = Path(__file__).parents[2]
QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
TOKEN = "t" * 32
START_S = 240.0
AGENT = "agent={command: play, isolation: process, limits: {memory_mb: 256, processes: 64}}"


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    return made_tls_files(tmp_path / "tls", names="DNS:localhost")


@contextlib.contextmanager
def run_of(folder: Path, tls: TlsConfig, *overrides: str) -> Iterator[tuple[Store, RunKeys]]:
    """Yield the store and the keys of a run whose supervisor has written its record."""
    files = [f"cluster.tls.{name}={path}" for name, path in tls]
    own = [f"run_dir={folder / 'run'}", f"store.url={folder / 'store.db'}"]
    config = load_config(QUICK_START, [*own, *files, *overrides], weights=False)
    with Store.open(folder / "store.db") as store:
        record = RunRecord.of(text_of(config, folder), nodes=1, first_version=0, epoch=1, token=TOKEN)
        record.write(store)
        yield store, record.keys(TOKEN, config)


@contextlib.contextmanager
def roles(store: Store, folder: Path, *names: str) -> Iterator[Mapping[str, str]]:
    """Start processes of roles with `--host localhost`, and yield their addresses once they have them."""
    with contextlib.ExitStack() as started:
        processes = {}
        for name in names:
            log = started.enter_context(open(folder / f"{name}.log", "wb"))
            command = [sys.executable, "-m", "areal_agents", "role", name, "--run", str(store.path)]
            processes[name] = subprocess.Popen(
                [*command, "--host", "localhost"], stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, RUN_TOKEN: TOKEN},
            )  # fmt: skip
            started.callback(processes[name].wait, 60)
            started.callback(processes[name].terminate)
        deadline = time.monotonic() + START_S
        while not all(store.addresses(name) for name in names):
            for name, process in processes.items():
                assert process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield {name: store.addresses(name)[0] for name in names}


async def test_a_sandbox_host_is_reached_by_name_and_not_by_address(tmp_path: Path, tls: TlsConfig) -> None:
    with (
        run_of(tmp_path, tls, AGENT, "cluster.sandboxes=1") as (store, keys),
        roles(store, tmp_path, "sandbox") as found,
        trusting(tls),
    ):
        assert found["sandbox"].startswith("https://localhost:")
        with direct_client(timeout_s=30) as client:
            assert client.get(f"{found['sandbox']}/health").status_code == 200
            with pytest.raises(httpx.ConnectError, match="VERIFY_FAILED"):
                client.get(f"{found['sandbox'].replace('localhost', '127.0.0.1')}/health")
        isolation = RemoteIsolation("process", hosts_of_run(store, keys.secret))
        sandbox = await isolation.start(spec_for("process"))
        assert (await sandbox.run(["echo", "here"], timeout_s=60)).status == 0
        await sandbox.end()
        await isolation.close()


@pytest.mark.cluster
def test_a_proxy_and_its_engine_are_reached_by_their_names(tmp_path: Path, tls: TlsConfig) -> None:
    with (
        run_of(tmp_path, tls, "engine.replicas=1") as (store, keys),
        roles(store, tmp_path, "engine", "proxy") as found,
        trusting(tls),
        reserved_ports(1) as [port],
        forwarding_to_proxies(store, "127.0.0.1", port, count=1, preferred=0),
        direct_client(timeout_s=20, base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert all(url.startswith("https://localhost:") for url in found.values())
        deadline = time.monotonic() + START_S
        metrics = ""
        while not re.search(r"^areal_agents_engine_healthy\{.*\} 1\.0$", metrics, re.MULTILINE):
            assert time.monotonic() < deadline, (tmp_path / "proxy.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                metrics = client.get("/metrics", headers=bearer(keys.admin)).text
            time.sleep(0.1)
        with direct_client(timeout_s=30) as own:
            info = own.get(f"{found['engine']}/model_info", headers=bearer(keys.engine))
            assert info.status_code == 200


def test_a_role_without_a_certificate_for_its_address_ends_at_once(
    tmp_path: Path, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_of(tmp_path, tls) as (store, _):
        monkeypatch.setenv(RUN_TOKEN, TOKEN)
        message = r"is not valid for 127\.0\.0\.1, where this process will be called: .*; it is for localhost"
        with pytest.raises(ConfigError, match=message):
            run_role("engine", 0, str(store.path))
        assert store.addresses("engine") == {}


@pytest.mark.parametrize("knows_at", [3, 100])
def test_a_role_waits_until_its_name_resolves_to_its_machine(
    tmp_path: Path, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch, knows_at: int
) -> None:
    """The process gets SIGTERM during its third lookup, whether that lookup succeeds or not."""
    asked: list[str] = []

    def is_this_machine(host: str) -> bool:
        asked.append(host)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(asked) == knows_at

    monkeypatch.setattr(role_module, "is_this_machine", is_this_machine)
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    with run_of(tmp_path, tls) as (store, _):
        assert run_role("proxy", 0, str(store.path), host="localhost") == EXIT_STOPPED
    assert asked == ["localhost"] * 3
    # The configuration is the first file that a process writes.
    assert RunFolder(tmp_path / "run").config.exists() == (knows_at == 3)


def test_a_role_whose_name_never_resolves_ends_with_advice(
    tmp_path: Path, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_module, "is_this_machine", lambda host: False)
    monkeypatch.setattr(role_module, "LONGEST_NAME_S", 0.0)
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    with run_of(tmp_path, tls) as (store, _):
        message = "^--host localhost has not become a name of this machine within 0 s; give a name"
        with pytest.raises(ConfigError, match=message):
            run_role("proxy", 0, str(store.path), host="localhost")


def test_a_role_with_an_address_does_not_wait_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = made_tls_files(tmp_path / "tls", names="IP:127.0.0.1")

    def check_certificate(tls: TlsConfig, host: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # handled before the process checks its name

    monkeypatch.setattr(role_module, "check_certificate", check_certificate)
    monkeypatch.setattr(role_module, "is_this_machine", lambda host: pytest.fail(f"{host} is no name"))
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    with run_of(tmp_path, tls) as (store, _):
        assert run_role("proxy", 0, str(store.path), host="127.0.0.1") == EXIT_STOPPED
    assert RunFolder(tmp_path / "run").config.exists()
