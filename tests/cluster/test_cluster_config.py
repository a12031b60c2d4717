"""The configurations that a launcher accepts, and the processes that it starts for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agents.cluster.launchers.by_name import launcher_of
from areal_agents.cluster.launchers.local import LocalLauncher
from areal_agents.cluster.role import engine_gpus, run_role
from areal_agents.cluster.run_record import RunRecord, text_of
from areal_agents.cluster.train import check_config, processes_of
from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.process_control import RUN_MARK
from areal_agents.secret_variables import RUN_TOKEN
from areal_agents.store import Store

QUICK_START = Path(__file__).parents[2] / "examples/search_agent/config.yaml"


class Elsewhere(LocalLauncher):
    """A launcher whose processes are on other machines."""

    name = "elsewhere"


def config_of(*overrides: str) -> Config:
    return load_config(QUICK_START, overrides)


def test_a_run_has_the_configured_number_of_processes_of_each_role() -> None:
    config = config_of(
        "engine.replicas=2",
        "cluster.proxies=2",
        "cluster.rollouts=3",
        "cluster.sandboxes=1",
        "trainer.ranks=4",
        "cluster.cpus.proxy=1",
    )
    found = processes_of(config, "postgresql://db/x", nodes=2)
    assert [process.name for process in found] == [
        "engine-0", "engine-1", "proxy-0", "proxy-1", "sandbox-0", "trainer-0", "trainer-1", "rollout-0",
        "rollout-1", "rollout-2",
    ]  # fmt: skip
    assert found[2].command[-6:] == ("role", "proxy", "--run", "postgresql://db/x", "--index", "0")
    assert [process.cpus for process in found if process.role == "proxy"] == [1, 1]
    assert not any(process.gpus for process in found[:4])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("store.url=/tmp/store.db", "store.url: the machines of a cluster share a store in PostgreSQL"),
        ("store.url=postgresql://me:hush@db/x", "store.url: the command lines of the processes would show"),
        ("store.url=postgresql://db/x?password=hush", "store.url: the command lines of the processes would"),
        ("proxy.workers=2", "proxy.workers: in a cluster each proxy is one process"),
        ("cluster.sandboxes=1", "cluster.sandboxes: the agent of this run runs in no sandbox"),
        ("trainer.start=false", "trainer.start: with --launcher"),
    ],
)
def test_settings_that_cannot_work_on_several_machines_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_of("store.url=postgresql://db/x", override), Elsewhere())


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (["engine.kind=vllm", "engine.python=python", "engine.tensor_parallel=2"], 2),
        (["engine.kind=sglang", "engine.python=python", "engine.tensor_parallel=4"], 4),
        (["engine.kind=sglang", "engine.python=python", "engine.device=cpu"], 0),
        (["engine.kind=sglang", "engine.python=python", "cluster.gpus_per_node=0"], 0),
        (["engine.device=cuda"], 1),
        ([], 0),
    ],
)
def test_the_gpus_of_an_engine_follow_from_its_kind_and_device(overrides: list[str], gpus: int) -> None:
    assert engine_gpus(config_of(*overrides)) == gpus


def test_a_launcher_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--launcher must be one of local"):
        launcher_of("nomad", config_of())


def test_every_process_reads_the_configuration_from_the_store(tmp_path: Path) -> None:
    config = config_of("trainer.steps=7")
    record = RunRecord.of(text_of(config, tmp_path), nodes=2, first_version=3, epoch=1)
    with Store.open(tmp_path / "store.db") as store:
        with pytest.raises(ConfigError, match="areal-agents train CONFIG --launcher"):
            RunRecord.read(store)
        record.write(store)
        found = RunRecord.read(store)

        keys = found.keys("", config)
        assert found == record and len({keys.admin, keys.view, keys.secret, keys.engine}) == 4
        assert found.resolved(tmp_path)[0] == config
        store.write_run({"config": "", "future": 1})
        with pytest.raises(ConfigError, match="another release"):
            RunRecord.read(store)


def test_proc_does_not_show_the_token_of_a_process_that_passes_it_to_its_child() -> None:
    """It does show the mark by which leftover processes are found."""
    command = (
        "import os; shown = open(f'/proc/{os.getppid()}/environ').read(); "
        f"print(os.environ['{RUN_TOKEN}'], 'secret' in shown, '{RUN_MARK}=log' in shown)"
    )
    shim = (sys.executable, "-m", "areal_agents.cluster.launchers.ray.shim", "--grace-s=5", "--")
    with subprocess.Popen(
        [*shim, sys.executable, "-c", command],
        env={**os.environ, RUN_TOKEN: "secret" * 5, RUN_MARK: "log"},
        stdin=subprocess.PIPE,  # stays open until the command has ended
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["secret" * 5, "False", "True"]


def test_only_a_process_with_the_token_gets_the_keys_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, config = "t" * 32, config_of(f"run_dir={tmp_path / 'run'}")
    text = text_of(config, tmp_path)
    url = str(tmp_path / "store.db")
    with Store.open(url) as store:
        record = RunRecord.of(text, nodes=1, first_version=0, epoch=1, token=token)
        record.write(store)
        found, stored = RunRecord.read(store), str(store.read_run())
        keys = found.keys(token, config)
        assert keys == record.keys(token, config)
        assert not any(secret in stored for secret in (token, keys.admin, keys.secret, keys.engine))
        assert keys != RunRecord.of(text, nodes=1, first_version=0, epoch=1, token=token).keys(token, config)
    with pytest.raises(ConfigError, match="needs the token of the run: set AREAL_AGENTS_RUN_TOKEN"):
        run_role("engine", 0, url)
    monkeypatch.setenv(RUN_TOKEN, "f" * 32)
    with pytest.raises(ConfigError, match="is not the token of the run in this store"):
        run_role("engine", 0, url)
    assert RUN_TOKEN not in os.environ, "children of the process do not get it"
    with Store.open(url) as store:
        assert not store.role_rows(), "no place was taken"
    with pytest.raises(ConfigError, match="at least 20 characters"):
        RunRecord.of(text, nodes=1, first_version=0, epoch=1, token="short")
