"""Manifests of Jobs for agents, and how the answers of a cluster are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mode_support import KUBERNETES_TEMPLATE, until_ended
from stand_in_kubectl import StandInKubernetes

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.jobs.commands import QueueFull, SchedulerError, Unanswered
from areal_agents.rollout.agents.jobs.kubernetes import KubernetesJobs, read_manifest
from areal_agents.rollout.agents.jobs.queue import JobState, NewJob

MANIFEST = KUBERNETES_TEMPLATE.read_text()
RELEASES = ("1.28", "1.37")
SECRET = {"OPENAI_API_KEY": "key", "OPENAI_BASE_URL": "http://10.0.0.1/e/key/v1"}
DONE = JobState("succeeded")
QUEUE = "the namespace default of Kubernetes"


def new_job(command: str, log: Path | None = None) -> NewJob:
    return NewJob("own-1", "Episode_1", command, SECRET, 59.5, log)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"{{command}}"', "true", r"has no \{\{command\}\}; it needs the places"),
        ('"{{command}}"]', "true]  # {{command}}", r"has no \{\{command\}\}; it needs the places"),
        ("automount", "note: '{{log}}'\n      automount", r"has the unknown place \{\{log\}\}"),
        ('"{{name}}"\nspec', "{{name}}\nspec", "is not valid YAML .*needs quotes"),
        ("kind: Job", "kind: Pod", "it must be one manifest of the kind Job, apiVersion batch/v1"),
        (
            'name: "{{name}}"\nspec',
            'name: "my-{{name}}"\nspec',
            r"metadata\.name must be '\{\{name\}\}', got",
        ),
        ("backoffLimit: 0", "backoffLimit: 3", r"spec\.backoffLimit must be 0, got 3: a second pod would"),
        ("backoffLimit: 0\n", "suspend: false\n", r"spec\.backoffLimit must be 0, got None"),
        ("backoffLimit: 0", "backoffLimit: 0\n  completions: 2", r"spec\.completions must be 1, got 2"),
        (
            "restartPolicy: Never",
            "restartPolicy: OnFailure",
            "restartPolicy must be 'Never', got 'OnFailure'",
        ),
        ('activeDeadlineSeconds: "{{seconds}}"', "x: '{{seconds}}'", "activeDeadlineSeconds must be"),
        ("  ttlSecondsAfterFinished: 600\n", "", r"spec\.ttlSecondsAfterFinished must be a number"),
        (
            "Finished: 600",
            "Finished: 0",
            "AfterFinished must be a number of at least 60, .* got 0",
        ),
        ("Finished: 600", "Finished: true", "AfterFinished must be .* got True"),
        (
            "backoffLimit: 0",
            "backoffLimit: 0\n  podFailurePolicy: {rules: []}",
            r"spec\.podFailurePolicy must",
        ),
        ('name: "{{name}}"\nspec', 'name: "{{name}}"\n  namespace: 7\nspec', r"namespace must be .* got 7"),
        ('name: "{{name}}"\nspec', 'name: "{{name}}"\n  namespace: A b\nspec', "namespace must be .*'A b'"),
        (
            "      containers:\n",
            "      containers:\n        - {name: second, command: ['{{command}}']}\n",
            "only one container may have",
        ),
        (
            '[sh, -c, "{{command}}"]',
            "[sh]\n          tty: '{{command}}'",
            "no container has .* in its command",
        ),
        ('secretRef: {name: "{{name}}"}', "secretRef: {name: keys}", r"needs envFrom: \[\{secretRef: \{name"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MANIFEST
    template = tmp_path / "job.yaml"
    template.write_text(MANIFEST.replace(old, new))
    with pytest.raises(AgentError, match=rf"(?s)^agent\.job\.template: .*job\.yaml:? .*{message}"):
        read_manifest(str(template))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      containers:\n", "      containers:\n        -\n        - 5\n", None),
        ('command: [sh, -c, "{{command}}"]', 'command: "{{command}}"', "which are lists"),
        ('command: [sh, -c, "{{command}}"]', 'command: 5\n          args: ["{{command}}"]', None),
        ("- name: agent\n          image", "- image", "the container with .* needs a name"),
        ('name: "{{name}}"\nspec', 'name: "{{name}}"\n  labels: [a]\nspec', "labels must be a mapping"),
        ("envFrom:\n            - secretRef:", "envFrom:\n            secretRef:", "needs envFrom"),
    ],
)
def test_odd_manifests_cause_no_internal_errors(
    tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    assert old in MANIFEST
    template = tmp_path / "job.yaml"
    template.write_text(MANIFEST.replace(old, new, 1))
    if message is None:
        read_manifest(str(template))
    else:
        with pytest.raises(AgentError, match=message):
            read_manifest(str(template))


def test_kubernetes_jobs_are_refused_if_kubectl_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentError, match=r"agent\.job: kubectl is not installed on this machine"):
        KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")


def made(cluster: StandInKubernetes, command: str, template: Path = KUBERNETES_TEMPLATE) -> dict[str, Any]:
    (cluster.folder / "held").touch()
    queue = KubernetesJobs(str(template), owner="own")
    queue.submit(new_job(command))
    return {kind: cluster.objects(kind)["own-1"] for kind in ("Job", "Secret")}


def test_a_job_is_created_with_a_secret_for_its_variables(kubernetes_programs: StandInKubernetes) -> None:
    found = made(kubernetes_programs, "echo 1")
    job, secret = found["Job"], found["Secret"]
    labels = {"app.kubernetes.io/managed-by": "areal-agents", "areal-agents/jobs-of": "own"}
    pod = job["spec"]["template"]
    assert job["metadata"]["labels"] == pod["metadata"]["labels"] == secret["metadata"]["labels"] == labels
    assert job["metadata"]["annotations"] == {"areal-agents/episode": "Episode_1"}
    assert pod["spec"]["activeDeadlineSeconds"] == 360
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["sh", "-c", "echo 1"]
    assert container["envFrom"] == [{"secretRef": {"name": "own-1"}}]
    assert secret["type"] == "Opaque" and {*secret["data"]} == {*SECRET}
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "own-1", "uid": "uid-of-own-1"}
    shown = json.dumps([job, kubernetes_programs.calls()])
    assert "own-1" in shown and "e/key" not in shown


def test_labels_and_the_namespace_of_the_template_are_kept(
    kubernetes_programs: StandInKubernetes, tmp_path: Path
) -> None:
    template = tmp_path / "job.yaml"
    metadata = 'name: "{{name}}"\n  namespace: training\n  labels: {team: a}'
    template.write_text(MANIFEST.replace('name: "{{name}}"', metadata, 1))
    job = made(kubernetes_programs, "echo 1", template)["Job"]
    assert job["metadata"]["labels"]["team"] == "a" and job["metadata"]["namespace"] == "training"
    KubernetesJobs(str(template), owner="own").states()
    assert all(call[:2] == ["--namespace", "training"] for call in kubernetes_programs.calls())


def test_the_time_limit_is_a_string_as_the_value_of_a_variable(
    kubernetes_programs: StandInKubernetes, tmp_path: Path
) -> None:
    """Kubernetes refuses a variable whose value is a number."""
    template = tmp_path / "job.yaml"
    variable = "env: [{name: LIMIT_S, value: '{{seconds}}'}]\n          envFrom:"
    template.write_text(MANIFEST.replace("envFrom:", variable))
    pod = made(kubernetes_programs, "echo 1", template)["Job"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "LIMIT_S", "value": "360"}]
    assert pod["activeDeadlineSeconds"] == 360


def test_empty_keys_and_dates_in_a_template_are_accepted(
    kubernetes_programs: StandInKubernetes, tmp_path: Path
) -> None:
    """YAML reads an empty value as null, and a date as a date object, which JSON does not have."""
    template = tmp_path / "job.yaml"
    odd = MANIFEST.replace(
        'name: "{{name}}"', 'name: "{{name}}"\n  labels:\n  annotations: {of: 2026-01-02}', 1
    )
    template.write_text(odd.replace("  template:\n", "  template:\n    metadata:\n", 1))
    job = made(kubernetes_programs, "echo 1", template)["Job"]
    assert job["metadata"]["annotations"] == {"of": "2026-01-02", "areal-agents/episode": "Episode_1"}
    assert job["spec"]["template"]["metadata"]["labels"] == job["metadata"]["labels"]


@pytest.mark.parametrize("written", ["", "Unauthorized", "[]"])
def test_an_answer_that_is_not_an_object_is_an_error_of_the_scheduler(
    kubernetes_programs: StandInKubernetes, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """The jobs are still followed after such an error."""
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", lambda *_, **__: written)
    for asked in (queue.states, lambda: queue.submit(new_job("true"))):
        with pytest.raises(SchedulerError, match="wrote no object of Kubernetes"):
            asked()


def test_the_end_of_a_long_output_is_kept(kubernetes_programs: StandInKubernetes, tmp_path: Path) -> None:
    """`kubectl logs --limit-bytes` cuts off the end."""
    queue, log = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own"), tmp_path / "job.log"
    id = queue.submit(new_job("yes \"$(printf '%0200d' 0)\" | head -n 8000; echo the reason", log))
    until_ended(queue, id)
    assert queue.output(id, log).endswith("\nthe reason")
    assert log.read_text().endswith("\nthe reason\n") and log.stat().st_size < 1_200_000


def test_a_log_that_cannot_be_written_is_an_error_of_the_scheduler(
    kubernetes_programs: StandInKubernetes, tmp_path: Path
) -> None:
    """The caller logs a SchedulerError as a warning."""
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    id = queue.submit(new_job("echo said"))
    until_ended(queue, id)
    with pytest.raises(SchedulerError, match="the log of job own-1 cannot be written: No such file"):
        queue.output(id, tmp_path / "removed" / "job.log")


@pytest.mark.cluster
@pytest.mark.parametrize("release", RELEASES)
def test_the_schemas_of_kubernetes_accept_what_is_created(
    kubernetes_programs: StandInKubernetes, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed here: make test-cluster"
    )
    created = []

    def run_command(command: Any, *, stdin: str = "") -> str:
        created.append(json.loads(stdin))
        return json.dumps({"metadata": {"uid": "1"}})

    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", run_command)
    queue.submit(new_job("echo $1"))
    assert [one["kind"] for one in created] == ["Job", "Secret"]
    for one in created:
        kubernetes_validate.validate(one, release, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # the placeholders are not valid values
        kubernetes_validate.validate(yaml.safe_load(MANIFEST), release, strict=True)


def test_dollar_signs_of_a_command_reach_the_shell(
    kubernetes_programs: StandInKubernetes, tmp_path: Path
) -> None:
    queue, log = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own"), tmp_path / "job.log"
    command = "printf %s, \"$OPENAI_API_KEY\" '$$' '$(OPENAI_API_KEY)' $(echo inner); exit 3"
    id = queue.submit(new_job(command, log))
    until_ended(queue, id)
    assert queue.states()[id] == JobState("failed", "exited with status 3")
    assert queue.output(id, log) == log.read_text() == "key,$$,$(OPENAI_API_KEY),inner,"


def test_a_job_that_is_cancelled_leaves_no_objects(kubernetes_programs: StandInKubernetes) -> None:
    (kubernetes_programs.folder / "held").touch()
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    id = queue.submit(new_job("sleep 600"))
    assert queue.states() == {id: JobState("waiting", queue=QUEUE)}
    assert KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="other").states() == {}
    queue.cancel([id, "gone"])
    assert queue.states() == {}
    assert not any(kubernetes_programs.objects(kind) for kind in ("Job", "Pod", "Secret"))


def test_a_job_whose_secret_is_refused_is_deleted(kubernetes_programs: StandInKubernetes) -> None:
    (kubernetes_programs.folder / "refuse-Secret").touch()
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    with pytest.raises(SchedulerError, match="kubectl failed: Error from server: secrets .* is forbidden"):
        queue.submit(new_job("true"))
    assert not kubernetes_programs.objects("Job")


@pytest.mark.parametrize(("kind", "error"), [("Job", QueueFull), ("Secret", Unanswered)])
def test_the_error_of_an_unavailable_api_server_says_whether_a_job_may_run(
    kubernetes_programs: StandInKubernetes, kind: str, error: type[SchedulerError]
) -> None:
    """A Job begins only with its Secret, so it may run if the creation of the Secret is not answered."""
    (kubernetes_programs.folder / f"refuse-{kind}").write_text("(ServiceUnavailable): the server is starting")
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    with pytest.raises(error, match="^Kubernetes .* the server is starting"):
        queue.submit(new_job("true"))
    assert not kubernetes_programs.objects("Job")


@pytest.mark.parametrize("kind", ["Job", "Secret"])
def test_a_quota_that_is_used_up_is_a_full_queue(kubernetes_programs: StandInKubernetes, kind: str) -> None:
    (kubernetes_programs.folder / f"refuse-{kind}").write_text("exceeded quota: agents, used: count=8")
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    with pytest.raises(
        QueueFull, match="^Kubernetes takes no further Job for now: .* exceeded quota: agents"
    ):
        queue.submit(new_job("true"))
    assert not kubernetes_programs.objects("Job")


@pytest.mark.parametrize(
    ("pod", "phase"),
    [(None, "unstarted"), ({"phase": "Pending"}, "unstarted"), ({"phase": "Running"}, "lost")],
)
def test_a_job_that_is_deleted_is_unstarted_or_lost(
    kubernetes_programs: StandInKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    pod: dict[str, Any] | None,
    phase: str,
) -> None:
    """The deletion of a Job that has not begun says nothing about the agent."""
    metadata = {"name": "own-1", "deletionTimestamp": "2026-01-02T03:04:05Z"}
    items: list[dict[str, Any]] = [{"kind": "Job", "metadata": metadata}]
    if pod is not None:
        owners = [{"kind": "Job", "name": "own-1"}]
        items.append({"kind": "Pod", "metadata": {"ownerReferences": owners}, "status": pod})
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", lambda *_, **__: json.dumps({"items": items}))
    assert queue.states() == {"own-1": JobState(phase, "was deleted")}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("containers", "phase"),
    [
        (None, "unstarted"),
        ([{"state": {"waiting": {"reason": "ContainerCreating"}}}], "unstarted"),
        ([{"state": {"terminated": {"exitCode": 137}}}], "lost"),
    ],
)
def test_a_job_whose_pod_is_disrupted_is_unstarted_or_lost(
    kubernetes_programs: StandInKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    containers: list[dict[str, Any]] | None,
    phase: str,
) -> None:
    """A pod that was never scheduled ends in the phase Failed, too."""
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    status: dict[str, Any] = {"phase": "Failed", "conditions": [disruption]}
    if containers is not None:
        status["containerStatuses"] = containers
    owners = [{"kind": "Job", "name": "own-1"}]
    items = [
        {"kind": "Job", "metadata": {"name": "own-1"}, "status": failed()},
        {"kind": "Pod", "metadata": {"ownerReferences": owners}, "status": status},
    ]
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    monkeypatch.setattr(queue.commands, "run", lambda *_, **__: json.dumps({"items": items}))
    assert queue.states() == {"own-1": JobState(phase, "was disrupted (PreemptionByScheduler)")}  # type: ignore[arg-type]


def failed(reason: str = "BackoffLimitExceeded") -> dict[str, Any]:
    return {"conditions": [{"type": "Failed", "status": "True", "reason": reason}]}


def terminated(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]}


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}


@pytest.mark.parametrize(
    ("job", "pod", "state"),
    [
        ({}, {"conditions": [UNPLACED]}, JobState("waiting", "0/3 nodes are available", QUEUE)),
        (
            {},
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            JobState("waiting", "ImagePullBackOff", QUEUE),
        ),
        ({}, {"phase": "Running"}, JobState("running")),
        ({}, {"phase": "Failed", **terminated(3)}, JobState("running")),  # its Job is still active
        ({"conditions": [{"type": "Complete", "status": "True"}]}, {"phase": "Succeeded"}, DONE),
        (failed(), {"phase": "Failed", **terminated(3)}, JobState("failed", "exited with status 3")),
        (
            failed(),
            {"phase": "Failed", **terminated(137, "OOMKilled")},
            JobState("failed", "exited with status 137 (OOMKilled)"),
        ),
        (
            failed(),
            {"phase": "Failed", "conditions": [DISRUPTED], **terminated(137)},
            JobState("lost", "was disrupted (PreemptionByScheduler)"),
        ),
        (failed(), {"phase": "Failed", "reason": "Evicted"}, JobState("lost", "lost its pod (Evicted)")),
        (
            failed(),
            {"phase": "Failed", "reason": "DeadlineExceeded"},
            JobState("failed", "reached its activeDeadlineSeconds"),
        ),
        (failed(), None, JobState("lost", "failed without its pod (BackoffLimitExceeded)")),
    ],
)
def test_the_state_of_a_job_follows_from_its_status_and_that_of_its_pod(
    kubernetes_programs: StandInKubernetes, job: dict[str, Any], pod: dict[str, Any] | None, state: JobState
) -> None:
    (kubernetes_programs.folder / "held").touch()
    queue = KubernetesJobs(str(KUBERNETES_TEMPLATE), owner="own")
    id = queue.submit(new_job("true"))
    kubernetes_programs.change("Job", id, job)
    if pod is None:
        (kubernetes_programs.folder / f"Pod/{id}-pod.json").unlink()
    else:
        kubernetes_programs.change("Pod", f"{id}-pod", pod)
    assert queue.states() == {id: state}
    kubernetes_programs.end_pod(id)
