"""Checks of runs whose agents are cluster jobs: addresses, templates, schedulers and owners."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.cli import train
from areal_agents.config import Config, load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.launch.agent_jobs import check_jobs, owner_of_jobs, refuse_jobs
from areal_agents.launch.fingerprint import Fingerprint
from areal_agents.launch.run_folder import ClusterPlace
from areal_agents.rollout.config import CommandAgentConfig, job_of_agent

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "examples/search_agent/config.yaml"
MANIFEST = ROOT / "examples/agent_jobs/agent-job.yaml"
TEMPLATE = ROOT / "examples/agent_jobs/agent.sbatch"


def loaded(*overrides: str, template: Path = TEMPLATE, **job: Any) -> Config:
    agent = {"command": "python agent.py", "job": {"kind": "slurm", "template": str(template), **job}}
    return load_config(QUICK_START, [f"agent={json.dumps(agent)}", "ablation=null", *overrides])


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins for Slurm's programs into PATH, which succeed and print nothing."""
    for program in ("sbatch", "squeue", "scancel"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("settings", "key", "address"),
    [
        ([], "proxy.host", "127.0.0.1"),
        (["proxy.host=localhost"], "proxy.host", "localhost"),
        (["proxy.host=0.0.0.0"], "proxy.host", "0.0.0.0"),
        (["proxy.public_url=http://127.0.0.1:80"], "proxy.public_url", "http://127.0.0.1:80"),
        (["proxy.public_url='http://[::1]:80'"], "proxy.public_url", r"http://\[::1\]:80"),
    ],
)
def test_an_address_that_jobs_cannot_reach_is_refused(settings: list[str], key: str, address: str) -> None:
    message = f"^{key}: the agent's jobs run on other machines, which do not reach {address};"
    with pytest.raises(ConfigError, match=message):
        check_jobs(loaded(*settings))


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    "settings", [["proxy.host=10.0.0.1"], ["proxy.host=0.0.0.0", "proxy.public_url=http://login1:8100"]]
)
def test_an_address_that_jobs_can_reach_is_accepted(settings: list[str]) -> None:
    check_jobs(loaded(*settings))


def test_in_a_cluster_jobs_need_a_public_url() -> None:
    with pytest.raises(
        ConfigError, match=r"^proxy\.public_url: the agent's jobs do not reach the address at"
    ):
        check_jobs(loaded("proxy.host=10.0.0.1"), launcher="ray")
    check_jobs(loaded("proxy.public_url=http://balancer:8000"), launcher="ray")


def test_a_wrong_template_and_a_missing_program_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(TEMPLATE.read_text().replace("{{log}}", "log.txt"))
    with pytest.raises(ConfigError, match=r"^agent\.job\.template: .*agent\.sbatch has no \{\{log\}\}"):
        check_jobs(loaded("proxy.public_url=http://balancer:8000", template=template), launcher="ray")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^agent\.job: sbatch is not installed on this machine"):
        check_jobs(loaded("proxy.host=10.0.0.1"))


def test_the_local_launcher_needs_the_commands_of_the_scheduler_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^agent\.job: sbatch is not installed on this machine"):
        check_jobs(loaded("proxy.public_url=http://node1:8000"), launcher="local")


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("launcher", ["", "local"])
def test_a_scheduler_that_does_not_answer_is_reported_before_anything_starts(
    tmp_path: Path, launcher: str
) -> None:
    config = loaded("proxy.host=0.0.0.0", "proxy.public_url=http://login1:8100")
    check_jobs(config, launcher=launcher)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'squeue: no configuration source' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"^agent\.job\.kind: slurm: squeue failed: .* such as a login"):
        check_jobs(config, launcher=launcher)
    check_jobs(config, launcher=launcher, dry_run=True)
    check_jobs(config, launcher="ray")


@pytest.mark.parametrize("launcher", ["kubernetes", "skypilot"])
def test_slurm_jobs_are_refused_with_a_launcher_outside_of_slurm(launcher: str) -> None:
    settings = ["proxy.public_url=http://balancer:8000"]
    with pytest.raises(ConfigError, match=f"^agent.job.kind: slurm with --launcher {launcher}: the rollout"):
        check_jobs(loaded(*settings), launcher=launcher)


def test_slurm_jobs_are_accepted_if_skypilot_uses_a_slurm_cluster() -> None:
    settings = ["proxy.public_url=http://balancer:8000", "cluster.skypilot.resources.infra=slurm/main"]
    check_jobs(loaded(*settings), launcher="skypilot")


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_dry_run_shows_the_job_of_an_episode(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"kind": kind, "template": str(TEMPLATE if kind == "slurm" else MANIFEST)}
    agent = {"command": "python 'my agent.py'", "job": job}
    arguments = [f"agent={json.dumps(agent)}", "ablation=null", "proxy.host=10.0.0.1", "run_dir=/runs/one"]
    train(QUICK_START, arguments, dry_run=True)
    config, shown = capsys.readouterr().out.split("# agent.job.template, filled in for an episode:\n")
    assert yaml.safe_load(config)["run_dir"] == "/runs/one"
    filled = "".join(f"{line[2:]}\n" for line in shown.splitlines())
    if kind == "slurm":
        assert filled.startswith("#!/bin/bash\n#SBATCH --job-name=areal-12345678-episode-0000\n")
        assert '--output="/runs/one/logs/episodes/EPISODE.log"' in filled
        assert shlex.split(filled.splitlines()[-1])[-1] == "my agent.py"
    else:
        made = yaml.safe_load(filled)
        assert made["metadata"]["labels"]["areal-agents/jobs-of"] == "areal-12345678"
        assert made["metadata"]["name"] == "areal-12345678-episode-0000" and "{{" not in filled


def test_a_dry_run_finds_a_wrong_template_and_a_wrong_launcher(tmp_path: Path) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(TEMPLATE.read_text().replace("{{log}}", "log.txt"))
    agent = json.dumps({"command": "a", "job": {"kind": "slurm", "template": str(template)}})
    arguments = [f"agent={agent}", "ablation=null", "proxy.host=10.0.0.1"]
    with pytest.raises(ConfigError, match=r"agent\.sbatch has no \{\{log\}\}"):
        train(QUICK_START, arguments, dry_run=True)
    with pytest.raises(ConfigError, match="--launcher must be one of .*, got 'slrum'"):
        train(QUICK_START, [], dry_run=True, launcher="slrum")


def test_a_job_without_a_command_is_refused() -> None:
    agent = json.dumps({"job": {"kind": "slurm", "template": "t"}})
    with pytest.raises(ConfigError, match="a job runs a command, and agent.command is missing"):
        load_config(QUICK_START, [f"agent={agent}", "ablation=null"])


def test_finished_kubernetes_jobs_must_be_kept_for_at_least_two_polls() -> None:
    job = {"kind": "kubernetes", "poll_s": 400.0}
    with pytest.raises(ConfigError, match="ttlSecondsAfterFinished is 600, and must be at least twice"):
        check_jobs(loaded("proxy.public_url=http://balancer:8000", template=MANIFEST, **job), launcher="ray")


def test_the_wait_for_a_job_must_end_before_the_proxy_ends_the_episode() -> None:
    with pytest.raises(ConfigError, match=r"agent\.job\.wait_s: 3600 s, but an episode without a call fails"):
        loaded(wait_s=3600)
    with pytest.raises(ConfigError, match="a job that starts last needs 60 s for its first call"):
        loaded(wait_s=3590)
    assert job_of_agent(loaded("proxy.idle_timeout_s=7200", wait_s=3600).agent) is not None


def test_a_job_with_an_isolation_is_refused() -> None:
    agent = {"command": "a", "job": {"kind": "slurm", "template": "t"}, "isolation": "process"}
    with pytest.raises(ConfigError, match="job and isolation: process exclude each other"):
        load_config(QUICK_START, [f"agent={json.dumps(agent)}", "ablation=null"])


def test_passing_variables_of_the_run_to_a_kubernetes_job_is_refused() -> None:
    job = {"kind": "kubernetes", "template": "t"}
    agent = {"command": "a", "job": job, "pass_environment": ["PGPASSWORD"]}
    with pytest.raises(ConfigError, match="pass_environment has no effect on a Job of Kubernetes"):
        load_config(QUICK_START, [f"agent={json.dumps(agent)}", "ablation=null"])


def test_commands_that_play_episodes_on_this_machine_refuse_jobs() -> None:
    with pytest.raises(ConfigError, match=r"^agent\.job: fork plays episodes on this machine"):
        refuse_jobs(loaded(), "fork")
    refuse_jobs(load_config(QUICK_START), "fork")
    check_jobs(load_config(QUICK_START))


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_paths_are_relative_to_the_configuration(tmp_path: Path, kind: str) -> None:
    """Paths in the command are resolved only if the job sees the files of this machine."""
    (tmp_path / "agent.py").touch()
    agent = f"{{command: python agent.py, job: {{kind: {kind}, template: job.txt}}}}"
    config = tmp_path / "config.yaml"
    config.write_text(f"model: quickstart\nagent: {agent}\ndata: {{path: tasks.jsonl}}\n")
    found = load_config(config).agent
    assert isinstance(found, CommandAgentConfig) and found.job is not None
    assert found.job.template == str(tmp_path / "job.txt")
    assert found.command == f"python {tmp_path / 'agent.py' if kind == 'slurm' else 'agent.py'}"
    save_config(load_config(config), tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", []).agent == found


def test_the_fingerprint_includes_the_template(tmp_path: Path) -> None:
    template = tmp_path / "agent.sbatch"
    template.write_text(TEMPLATE.read_text())
    before = Fingerprint.of(loaded(template=template))
    assert Fingerprint.of(loaded(template=template, wait_s=60)).digest == before.digest
    template.write_text(TEMPLATE.read_text() + "\n")
    after = Fingerprint.of(loaded(template=template))
    assert after.changes_since(before.parts) == "the agent (agent.sbatch)"


def test_the_owner_of_jobs_survives_a_restart_and_differs_between_processes(tmp_path: Path) -> None:
    config = loaded("store.url=postgresql://db/areal?schema=run")
    places = [ClusterPlace(index, 2, epoch, "secret") for index, epoch in ((0, 1), (0, 2), (1, 1))]
    first, restarted, second = (owner_of_jobs(config, tmp_path, place) for place in places)
    assert first == restarted != second
    assert len({first, owner_of_jobs(config, tmp_path, None), owner_of_jobs(config, Path("/run"), None)}) == 3
    for url in ("null", "sqlite:///runs/store.db"):  # each folder has its own store
        config = loaded(f"store.url={url}")
        owners = [
            owner_of_jobs(config, folder, place) for folder in (tmp_path, Path("/run")) for place in places
        ]
        assert owners[0] == owners[1] and len({*owners}) == 4
