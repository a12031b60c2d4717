"""The arguments of docker and the manifests for Kubernetes, tested without an engine or a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.docker import DockerIsolation, run_arguments, start_arguments
from areal_agents.sandbox.docker_images import DockerImages
from areal_agents.sandbox.isolations import check_isolation
from areal_agents.sandbox.kubernetes import ProxyPods, job_manifests
from areal_agents.sandbox.sandbox import Limits, SandboxSpec
from tests.sandbox.conftest import has_engine

LIMITS = Limits(memory_mb=512, processes=64, cpus=1.5, disk_mb=100)
SPEC = SandboxSpec(image="python:3.11-slim", limits=LIMITS, environment={"A": "1"}, writable=("/logs",))


def test_the_container_has_every_limit_and_no_network() -> None:
    words = start_arguments(SPEC, name="box", owner="1-2", sockets=Path("/tmp/sockets"))
    text = " ".join(words)
    for wanted in (
        "run --interactive --rm --name box --label areal-agents.owner=1-2 --security-opt no-new-privileges",
        "--network none",
        "--read-only --cap-drop ALL --user 1000:1000",
        "--memory 512m --memory-swap 512m --pids-limit 64 --cpus 1.5",
        "--tmpfs /workspace:rw,exec,nosuid,nodev,mode=1777,uid=1000,gid=1000,size=100m",
        "--tmpfs /logs:rw,exec,nosuid,nodev,mode=1777,uid=1000,gid=1000,size=100m",
        "--mount type=bind,source=/tmp/sockets,target=/run/areal-agents,readonly python:3.11-slim -c",
    ):
        assert wanted in text, wanted
    assert not {"--privileged", "--volume", "--pid"} & set(words)


def test_a_sandbox_that_is_a_machine_has_its_limits_and_the_requested_network() -> None:
    spec = replace(SPEC, as_machine=True)
    words = start_arguments(spec, name="box", owner="1-2", sockets=Path("/tmp/sockets"))
    text = " ".join(words)
    assert "--user 0:0" in text and "--network none" in text and "no-new-privileges" in text
    assert "--memory 512m --memory-swap 512m --pids-limit 64 --cpus 1.5" in text
    assert not {"--read-only", "--tmpfs", "--cap-drop", "--privileged"} & set(words)
    online = start_arguments(replace(spec, network=True), name="box", owner="1-2", sockets=Path("/tmp"))
    assert "--network" not in online


@pytest.mark.parametrize("asked", [{"as_machine": True}, {"network": True}])
async def test_only_docker_supports_a_machine_or_a_network(asked: dict[str, bool]) -> None:
    with pytest.raises(
        SandboxError, match="isolation: process gives a sandbox no network.*isolation: docker"
    ):
        await check_isolation("process", SandboxSpec(limits=Limits(None, None, None, None), **asked))


def test_no_key_is_in_the_arguments_of_docker() -> None:
    passed = "AREAL_AGENTS_GIVEN_OPENAI_API_KEY"
    given = ["exec", "--interactive", "--workdir", "/workspace", "--env", passed, "box"]
    words = run_arguments("box", ["env"], ["OPENAI_API_KEY"], workdir="/workspace", forwards=False)
    script = f'export OPENAI_API_KEY="${passed}"; unset {passed}; exec "$@"'
    assert words == [*given, "/bin/sh", "-c", script, "run", "env"]
    forwarding = run_arguments("box", ["env"], ["OPENAI_API_KEY"], workdir="/workspace", forwards=True)
    assert forwarding[:9] == words[:9] and forwarding[-2:] == ["run", "env"]


async def test_an_option_of_docker_is_refused_as_the_name_of_an_image() -> None:
    with pytest.raises(SandboxError, match="an image cannot be called '--privileged'"):
        await DockerIsolation("docker").start(SandboxSpec(image="--privileged"))
    with pytest.raises(SandboxError, match="an image cannot be called '-v/:/host'"):
        await DockerImages().named("-v/:/host", timeout_s=1)


def test_docker_knows_every_option() -> None:
    """The real command line accepts the arguments, and fails only when it calls its engine."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    started = start_arguments(SPEC, name="box", owner="1-2", sockets=Path("/tmp"))
    ran = run_arguments("box", ["env"], ["A"], workdir="/workspace", forwards=True)
    for words in (started, ran):
        argv = ["docker", "--host", "unix:///nowhere.sock", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and "Cannot connect to the Docker daemon" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_command_does_not_start_without_its_connection_to_the_model() -> None:
    argv = run_arguments("box", ["echo", "started"], [], workdir="/workspace", forwards=True)
    shell = argv[argv.index("box") + 1 :]
    environment = {**os.environ, "AREAL_AGENTS_FORWARD": "raise SystemExit"}
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (126, "")
    assert done.stderr == "nothing forwards to the model after 10 s\n"


def test_a_readable_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="readable: .*/none does not exist"):
        SandboxSpec(readable=(tmp_path, tmp_path / "none"))


async def test_without_an_engine_docker_is_refused() -> None:
    if has_engine():
        pytest.skip("a Docker engine answers")
    with pytest.raises(SandboxUnavailable, match="isolation: docker.*or set isolation: none"):
        await check_isolation("docker", SPEC)


def test_an_agents_job_reaches_only_the_proxy_and_a_graders_job_nothing() -> None:
    proxy = ProxyPods({"app": "proxy"}, 8000)
    policy, job = job_manifests(SPEC, ["agent"], name="e1", timeout_s=60, proxy=proxy, secret="key-e1")
    pods = {"podSelector": {"matchLabels": {"app": "proxy"}}}
    assert policy["spec"]["egress"] == [{"to": [pods], "ports": [{"protocol": "TCP", "port": 8000}]}]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"] and policy["spec"]["ingress"] == []
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "key-e1"}}]
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["resources"]["limits"] == {
        "memory": "512Mi",
        "cpu": "1500m",
        "ephemeral-storage": "100Mi",
    }
    policy, job = job_manifests(SPEC, ["grader"], name="g1", timeout_s=60, proxy=None)
    assert (
        policy["spec"]["egress"] == [] and "envFrom" not in job["spec"]["template"]["spec"]["containers"][0]
    )
    with pytest.raises(SandboxError, match="a grader, which has no proxy, gets no secret"):
        job_manifests(SPEC, ["grader"], name="g1", timeout_s=60, proxy=None, secret="key-e1")


def test_kubernetes_knows_every_field() -> None:
    """kubectl parses the Job and writes it again, without the fields that it does not know."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    _, job = job_manifests(
        SPEC, ["agent"], name="e1", timeout_s=60, proxy=ProxyPods({"a": "b"}, 80), secret="k"
    )
    argv = ["kubectl", "set", "env", "--local", "--filename", "-", "--output", "json", "ADDED=1"]
    done = subprocess.run(argv, input=json.dumps(job), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    environment = read["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment.pop() == {"name": "ADDED", "value": "1"}
    assert _lost(job, read) == []


def _lost(given: object, read: object, path: str = "") -> list[str]:
    """Return the paths of what is in `given` and not in `read`."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [lost for key, value in given.items() for lost in _lost(value, read.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [lost for one, other in zip(given, read, strict=True) for lost in _lost(one, other, path)]
    return [] if given == read else [path]
