"""A whole run with TLS and a token on this machine: its secrets are in no log, command line or metrics.

It takes about two minutes of processor time, most of it to start the processes.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from run_support import MANY, REPOSITORY, STOP_S, SupervisedRun, supervised
from tls_files import made_tls_files

from areal_agents.cluster.run_record import RunKeys, RunRecord
from areal_agents.direct_http import direct_client
from areal_agents.secret_variables import RUN_TOKEN, bearer
from areal_agents.store import Store
from areal_agents.tls import TlsConfig, trusting

QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
RUN_S = 1200.0
VERIFY_S = 600.0
TOKEN = "token-" + "t0k3n" * 6
PASSWORD = "password-of-the-database"
SECRET_VARIABLES = {RUN_TOKEN: TOKEN, "PGPASSWORD": PASSWORD}

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(RUN_S + VERIFY_S + 2 * STOP_S)]


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    return made_tls_files(tmp_path / "tls")


@pytest.fixture
def running(tmp_path: Path, tls: TlsConfig) -> Iterator[SupervisedRun]:
    """A run that serves HTTPS, and has a token and the password of a database."""
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", "local",
        f"run_dir={run}", f"trainer.steps={MANY}", "rollout.groups=2", "rollout.group_size=4", "eval=null",
        "trial=false", "cluster.proxies=2", *(f"cluster.tls.{name}={path}" for name, path in tls),
    ]  # fmt: skip
    log = tmp_path / "supervisor.log"
    with supervised(command, run, log, within_s=RUN_S, environment=SECRET_VARIABLES) as started:
        yield started


def test_the_secrets_of_a_run_are_in_no_log_no_command_line_and_no_metrics(
    running: SupervisedRun, tls: TlsConfig
) -> None:
    run = running.folder
    running.wait_for_step(1)
    with Store.open(run / "store.db") as store:
        record = RunRecord.read(store)
        config, _ = record.resolved(run)
        keys = record.keys(TOKEN, config)
        engines, proxies = store.addresses("engine"), store.addresses("proxy")
    secrets = [TOKEN, PASSWORD, keys.admin, keys.secret, keys.engine]
    commands = _command_lines(running.supervisor.pid)
    assert len(commands) > 5 and not _found(secrets, str(commands))
    served = _metrics_over_https(tls, keys, engines[0], proxies[0])
    assert not _found(secrets, served)
    verified = subprocess.run(
        [sys.executable, "-m", "areal_agents", "verify", str(run)],
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
    )
    # Weights may have been swapped between the responses that `verify` compares.
    assert f"{engines[0]}: " in verified.stdout and "version" in verified.stdout, verified.stdout
    endpoints = run / "endpoints.json"
    assert stat.S_IMODE(endpoints.stat().st_mode) == 0o600 and keys.engine in endpoints.read_text()
    running.stop()
    texts = [
        running.log,
        run / "metrics.jsonl",
        run / "config.yaml",
        run / "store.db",
        *run.glob("logs/**/*"),
    ]
    for path in (path for path in texts if path.is_file()):
        assert not _found(secrets, path.read_bytes().decode(errors="replace")), path


def _command_lines(supervisor: int) -> list[list[str]]:
    """Return the command lines of the processes of a run, some of which may end meanwhile."""
    found = []
    for process in psutil.Process(supervisor).children(recursive=True):
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found


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
