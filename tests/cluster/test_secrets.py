"""A whole run with TLS and a token on this machine: its secrets are in no log, command line or metrics.

It takes about two minutes of processor time, most of it to start the processes.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tls_files import made_tls_files

from areal_agents.cluster.run_record import RunKeys, RunRecord
from areal_agents.direct_http import direct_client
from areal_agents.secret_variables import RUN_TOKEN, bearer
from areal_agents.store import Store
from areal_agents.tls import TlsConfig, trusting

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
RUN_S = 1200.0
TOKEN = "token-" + "t0k3n" * 6
PASSWORD = "password-of-the-database"
SECRET_VARIABLES = {RUN_TOKEN: TOKEN, "PGPASSWORD": PASSWORD}


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    return made_tls_files(tmp_path / "tls")


@pytest.fixture
def supervised(tmp_path: Path, tls: TlsConfig) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """The supervisor of a run, the folder of the run, and the file with the supervisor's output."""
    run, log = tmp_path / "run", tmp_path / "supervisor.log"
    command = [
        sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", "local",
        f"run_dir={run}", "trainer.steps=12", "rollout.groups=2", "rollout.group_size=4", "eval=null",
        "trial=false", "cluster.proxies=2", *(f"cluster.tls.{name}={path}" for name, path in tls),
    ]  # fmt: skip
    with open(log, "wb") as output:
        supervisor = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY,
            env={**os.environ, **SECRET_VARIABLES},
        )  # fmt: skip
    try:
        yield supervisor, run, log
    finally:
        supervisor.terminate()
        supervisor.wait(120)


def test_the_secrets_of_a_run_are_in_no_log_no_command_line_and_no_metrics(
    supervised: tuple[subprocess.Popen[bytes], Path, Path], tls: TlsConfig
) -> None:
    supervisor, run, log = supervised
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + RUN_S
    while not metrics.exists():
        assert supervisor.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    with Store.open(run / "store.db") as store:
        record = RunRecord.read(store)
        config, _ = record.resolved(run)
        keys = record.keys(TOKEN, config)
        engines, proxies = store.addresses("engine"), store.addresses("proxy")
    secrets = [TOKEN, PASSWORD, keys.admin, keys.secret, keys.engine]
    commands = [one.cmdline() for one in psutil.Process(supervisor.pid).children(recursive=True)]
    assert len(commands) > 5 and not _found(secrets, str(commands))
    served = _metrics_over_https(tls, keys, engines[0], proxies[0])
    assert not _found(secrets, served)
    verified = subprocess.run(
        [sys.executable, "-m", "areal_agents", "verify", str(run)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    # Weights may have been swapped between the responses that `verify` compares.
    assert f"{engines[0]}: " in verified.stdout and "version" in verified.stdout, verified.stdout
    endpoints = run / "endpoints.json"
    assert stat.S_IMODE(endpoints.stat().st_mode) == 0o600 and keys.engine in endpoints.read_text()
    assert supervisor.wait(RUN_S) == 0, log.read_text()
    texts = [
        log,
        metrics,
        run / "config.yaml",
        run / "summary.json",
        run / "store.db",
        *run.glob("logs/**/*"),
    ]
    for path in (path for path in texts if path.is_file()):
        assert not _found(secrets, path.read_bytes().decode(errors="replace")), path


def _metrics_over_https(tls: TlsConfig, keys: RunKeys, engine: str, proxy: str) -> str:
    """Check that clients without the authority or a key are refused; return the metrics of the proxies."""
    assert engine.startswith("https://") and proxy.startswith("https://")
    with direct_client(timeout_s=30) as client, pytest.raises(httpx.ConnectError, match="VERIFY_FAILED"):
        client.get(engine + "/health")
    with trusting(tls), direct_client(timeout_s=30) as client:
        for url in (engine + "/model_info", proxy + "/metrics"):
            assert client.get(url).status_code == 401
        hop = {"x-areal-agents-hop": "guessed", "x-areal-agents-address": "127.0.0.1 1"}
        assert client.get(proxy + "/metrics", headers=hop).status_code == 403
        assert client.get(engine + "/model_info", headers=bearer(keys.engine)).status_code == 200
        return client.get(proxy + "/metrics", headers=bearer(keys.admin)).raise_for_status().text


def test_rendered_runs_contain_no_secrets(tmp_path: Path) -> None:
    for launcher in ("kubernetes", "skypilot"):
        shown = subprocess.run(
            [
                sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", launcher,
                "--dry-run", "store.url=postgresql://areal@db.example/areal?schema=run_1",
                "cluster.kubernetes.image=registry.example/agent:1", "cluster.kubernetes.project=/workspace",
                "cluster.kubernetes.secret=my-agent", f"cluster.skypilot.secrets=[PGPASSWORD, {RUN_TOKEN}]",
                "cluster.skypilot.accelerator=H100", "cluster.skypilot.volumes={/runs: volume}",
            ],
            env={**os.environ, **SECRET_VARIABLES}, capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert "areal" in shown.stdout and not _found([TOKEN, PASSWORD], shown.stdout + shown.stderr)


def _found(secrets: list[str], text: str) -> list[str]:
    return [secret for secret in secrets if secret in text]
