"""The task of a run for SkyPilot: its contents, and that SkyPilot's own parser accepts it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.rendered import render
from areal_agents.cluster.launchers.skypilot.config import SkyPilotConfig
from areal_agents.cluster.launchers.skypilot.task import as_yaml, task
from areal_agents.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "examples/search_agent/config.yaml"
SKY = ROOT / ".venv-skypilot" / "bin" / "python"
PARSE = """
import json, sys, yaml, sky
text = sys.stdin.read()
given = [("PGPASSWORD", "from --secret"), ("HF_TOKEN", "from --secret")]
task = sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=given)
[resources] = task.resources
try:
    sky.Task.from_yaml_config({**yaml.safe_load(text), "num_node": 2})
except Exception as error:
    refused = str(error)
found = task.name, task.num_nodes, resources.accelerators, sorted(task.secrets), task.run, refused
print(json.dumps(found))
"""
SETTINGS = SkyPilotConfig(
    accelerator="H100",
    resources={"infra": "kubernetes", "use_spot": True},
    volumes={"/runs": "runs"},
    secrets=("PGPASSWORD", "HF_TOKEN"),
)
PROCESSES = [
    *(RoleProcess("engine", index, (), gpus=4) for index in range(4)),
    RoleProcess("trainer", 0, (), gpus=8),
    RoleProcess("proxy", 0, ()),
    RoleProcess("rollout", 0, ()),
]


def made(folder: Path, settings: SkyPilotConfig = SETTINGS, **given: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "name": "my-run",
        "folder": str(folder),
        "config_file": "config.yaml",
        "config": "model: Qwen/Qwen3-0.6B\n",
        "overrides": ("trainer.steps=10", "eval=null"),
        "store_url": "postgresql://areal@db/areal?schema=my_run",
        "processes": PROCESSES,
        "gpus_per_node": 8,
    }
    return task(settings=settings, **{**defaults, **given})


def test_every_node_runs_its_processes_and_the_first_one_also_the_supervisor(tmp_path: Path) -> None:
    read = yaml.safe_load(as_yaml(made(tmp_path)))
    assert read["num_nodes"] == 3  # for four engines with four GPUs each, and a trainer with eight
    assert read["resources"] == {"accelerators": "H100:8", "infra": "kubernetes", "use_spot": True}
    assert (read["workdir"], read["secrets"]) == (str(tmp_path), {"PGPASSWORD": None, "HF_TOKEN": None})
    assert read["run"] == (
        'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n'
        "  exec python -m areal_agents.cluster.node --run 'postgresql://areal@db/areal?schema=my_run'"
        ' --node "$SKYPILOT_NODE_RANK" --nodes "$SKYPILOT_NUM_NODES"'
        " -- areal-agents train config.yaml --launcher external trainer.steps=10 eval=null name=my-run"
        " run_dir=/runs/my-run\n"
        "fi\n"
        "exec python -m areal_agents.cluster.node --run 'postgresql://areal@db/areal?schema=my_run'"
        ' --node "$SKYPILOT_NODE_RANK" --nodes "$SKYPILOT_NUM_NODES"\n'
    )


def test_a_run_on_cpus_names_no_accelerator(tmp_path: Path) -> None:
    alone = [RoleProcess("engine", 0, ()), RoleProcess("trainer", 0, ())]
    assert made(tmp_path, SkyPilotConfig(nodes=2), processes=alone)["resources"] == {}
    with pytest.raises(ConfigError, match=r"^cluster\.skypilot\.accelerator: name the GPU"):
        made(tmp_path, SkyPilotConfig())


def test_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^store\.url: manifests contain no passwords"):
        made(tmp_path, overrides=("store.url=postgresql://me:hush@db/areal",))


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        ({}, False),
        ({"volumes": {"/runs": "runs"}}, True),
        ({"volumes": {"/data": "runs"}}, False),
        ({"volumes": {"/data": "runs"}, "runs": "/data/runs"}, True),
        ({"volumes": {"/data/runs/old": "runs"}, "runs": "/data/runs"}, False),
        ({"file_mounts": {"/runs": {"source": "s3://bucket"}}}, True),
        ({"file_mounts": {"/runs": {"source": "s3://bucket", "mode": "MOUNT_CACHED"}}}, True),
        ({"file_mounts": {"/runs": {"source": "s3://bucket", "mode": "COPY"}}}, False),
        ({"file_mounts": {"/runs": "s3://bucket"}}, False),
        ({"file_mounts": {"/runs": "./runs"}}, False),
    ],
)
def test_a_warning_is_shown_unless_the_nodes_are_known_to_share_the_folder_of_runs(
    settings: dict[str, Any], is_shared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "store.url=postgresql://areal@db/areal",
        *("cluster.skypilot.secrets=[PGPASSWORD]", "cluster.skypilot.accelerator=H100"),
        *(f"cluster.skypilot.{name}={json.dumps(value)}" for name, value in settings.items()),
    ]
    shown = render("skypilot", QUICK_START, overrides)
    assert "num_nodes" in shown.text
    said = capsys.readouterr().err
    assert ("the nodes share no folder of runs: name one in volumes" in said) is not is_shared
    assert (said == "") is is_shared


@pytest.mark.cluster
@pytest.mark.skipif(not SKY.exists(), reason="SkyPilot is not installed here: make skypilot")
def test_the_parser_of_skypilot_accepts_the_task(tmp_path: Path) -> None:
    text = as_yaml(made(tmp_path))
    done = subprocess.run(
        [str(SKY), "-c", PARSE], input=text, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    name, nodes, accelerators, secrets, run, refused = json.loads(done.stdout.splitlines()[-1])
    assert (name, nodes, accelerators) == ("my-run", 3, {"H100": 8})
    assert secrets == ["HF_TOKEN", "PGPASSWORD"]
    assert run.splitlines() == yaml.safe_load(text)["run"].splitlines()
    assert "did you mean 'num_nodes'" in refused
