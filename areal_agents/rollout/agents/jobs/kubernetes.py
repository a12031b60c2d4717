"""Agents as Jobs of Kubernetes, through kubectl.

A Job is created from the user's manifest, and then a Secret of the same name with the variables of the
episode, which the manifest refers to and for which the pod waits. The Job owns the Secret, which is removed
with it. A Job has one pod, which is never replaced, because a second one would play its episode again.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.jobs.commands import QueueFull, SchedulerCommands, SchedulerError, Unanswered
from areal_agents.rollout.agents.jobs.queue import TAIL, JobState, NewJob
from areal_agents.rollout.agents.jobs.template import check_places, fill, read_template

PLACES = ("name", "command", "seconds")
OWNER = "areal-agents/jobs-of"  # the label of an agent's Jobs and pods, by which network policies select
_LONGEST_LOG = 1 << 20  # bytes
_LAST_LINES = 10_000
_TAIL_LINES = 50  # of an output that is cut off at its greatest length
_SHORTEST_KEPT_S = 60  # of a Job that has ended
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The API server is starting, cannot be reached, or has too much to do.
_AWAY = re.compile(
    r"Unable to connect to the server|connection refused|was refused - did you specify|i/o timeout|"
    r"etcdserver:|\((ServiceUnavailable|ServerTimeout|Timeout|TooManyRequests)\)"
)
_LATE = "did not end within"  # of a command that may have done what it was asked for
_MARGIN_S = 300  # the limit of the pod ends only what no rollout process follows any more


class KubernetesJobs:
    """The Jobs of one owner, which have its name as a label."""

    def __init__(self, template: str, *, owner: str) -> None:
        """Args:
        template: the path of a manifest of a Job.
        owner: the value of the label of its Jobs.

        Raises:
            AgentError: the template cannot be used, or this machine has no kubectl.
        """
        self.commands = SchedulerCommands()
        self._manifest = read_manifest(template)
        self._owner = owner
        self._container = next(_containers_with_the_command(self._manifest))["name"]
        namespace = self._manifest["metadata"].get("namespace")
        self._kubectl = ("kubectl", *(["--namespace", namespace] if namespace else []))
        if shutil.which("kubectl") is None:
            raise AgentError(
                "agent.job: kubectl is not installed on this machine, where the rollout process runs"
            )

    def submit(self, job: NewJob) -> str:
        """Create the Job and its Secret, and return the name of both.

        Raises QueueFull, Unanswered or SchedulerError.
        """
        try:
            return self._submit(job)
        except SchedulerError as error:
            if "exceeded quota" in str(error):
                raise QueueFull(f"Kubernetes takes no further Job for now: {error}") from None
            raise

    def _submit(self, job: NewJob) -> str:
        manifest = filled_manifest(self._manifest, job, self._owner)
        try:
            created = self._read("create", "-f", "-", "-o", "json", stdin=json.dumps(manifest))
        except SchedulerError as error:
            if _AWAY.search(str(error)):  # a Job that was created nevertheless waits for its Secret
                raise QueueFull(f"Kubernetes takes no further Job for now: {error}") from None
            if _LATE in str(error):
                raise Unanswered(f"Kubernetes did not answer whether it takes the Job: {error}") from None
            raise
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job.name,
            "uid": created["metadata"]["uid"],
        }
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": job.name, "labels": _labels(self._owner), "ownerReferences": [owner]},
            "type": "Opaque",
            "stringData": dict(job.variables),
        }
        try:
            self._run("create", "-f", "-", stdin=json.dumps(secret))
        except SchedulerError as error:
            with contextlib.suppress(SchedulerError):  # then it is cancelled as one whose submission failed
                self.cancel([job.name])
            if _AWAY.search(str(error)) or _LATE in str(error):
                raise Unanswered(
                    f"Kubernetes did not answer whether it takes the Secret of Job {job.name}: {error}"
                ) from None
            raise
        return job.name

    def states(self) -> Mapping[str, JobState]:
        """Return the states of the Jobs that are left. Raises SchedulerError."""
        listed = self._read("get", "jobs,pods", "--selector", f"{OWNER}={self._owner}", "-o", "json")
        items = listed.get("items", ())
        pods = {
            owner["name"]: item
            for item in items
            if item["kind"] == "Pod"
            for owner in item["metadata"].get("ownerReferences", ())
        }
        jobs = {item["metadata"]["name"]: item for item in items if item["kind"] == "Job"}
        return {name: _state(job, pods.get(name)) for name, job in jobs.items()}

    def cancel(self, ids: Collection[str]) -> None:
        """Delete Jobs with their pods and Secrets, by one command. Raises SchedulerError."""
        self._run("delete", "jobs", *ids, "--ignore-not-found", "--cascade=background", "--wait=false")

    def output(self, id: str, log: Path | None) -> str:
        """Write what the container has written into the log, and return the end. Raises SchedulerError."""
        text = self._last_lines(id, _LAST_LINES)
        if len(text.encode()) >= _LONGEST_LOG:  # the limit cuts off the end
            text += f"\n[…]\n{self._last_lines(id, _TAIL_LINES)}"
        if log is not None:
            try:
                log.write_text(text)
            except OSError as error:
                raise SchedulerError(f"the log of job {id} cannot be written: {error.strerror}") from None
        return text[-TAIL:].strip()

    def _last_lines(self, id: str, lines: int) -> str:
        return self._run(
            "logs",
            f"job/{id}",
            f"--container={self._container}",
            f"--tail={lines}",
            f"--limit-bytes={_LONGEST_LOG}",
        )

    def _read(self, *arguments: str, stdin: str = "") -> dict[str, Any]:
        """Return the object that a command writes. Raises SchedulerError."""
        written = self._run(*arguments, stdin=stdin)
        try:
            found = json.loads(written)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SchedulerError(
                f"kubectl {arguments[0]} wrote no object of Kubernetes, but {written[:200]!r}"
            )
        return found

    def _run(self, *arguments: str, stdin: str = "") -> str:
        return self.commands.run((*self._kubectl, *arguments), stdin=stdin)


def read_manifest(template: str) -> dict[str, Any]:
    """Return the manifest of a Job with places. Raises AgentError if it cannot be used."""
    try:
        made = yaml.load(read_template(template), _Loader)
    except yaml.YAMLError as error:
        raise AgentError(
            f"agent.job.template: {template} is not valid YAML (a place such as {{{{command}}}} needs quotes "
            f"around it): {error}"
        ) from None
    check_places(template, _texts(made), PLACES)
    for fault in _faults(made):
        raise AgentError(f"agent.job.template: {template}: {fault} (docs/clusters.md)")
    assert isinstance(made, dict), "else there is a fault"
    return made


def filled_manifest(manifest: Mapping[str, Any], job: NewJob, owner: str) -> dict[str, Any]:
    """Return the manifest of an episode's Job, from a manifest with places."""
    seconds = math.ceil(job.time_s) + _MARGIN_S
    values = {
        "name": job.name,
        "command": job.command.replace("$", "$$"),  # which Kubernetes reads as a $ in commands
        "seconds": str(seconds),
    }

    made: dict[str, Any] = _with_texts(manifest, lambda text: fill(text, values))
    template = made["spec"]["template"]
    for spec in (made["spec"], template["spec"]):  # elsewhere, as in the value of a variable, it is a string
        if spec.get("activeDeadlineSeconds") == str(seconds):
            spec["activeDeadlineSeconds"] = seconds
    template["metadata"] = template.get("metadata") or {}  # an empty key of YAML is null
    for metadata in (made["metadata"], template["metadata"]):
        metadata["labels"] = {**(metadata.get("labels") or {}), **_labels(owner)}
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            "areal-agents/episode": job.episode,
        }
    return made


def _labels(owner: str) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "areal-agents", OWNER: owner}


class _Loader(yaml.SafeLoader):
    """Reads YAML as kubectl does: a date is a string."""

    yaml_implicit_resolvers = {
        first: [one for one in found if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _faults(made: Any) -> Iterator[str]:
    if not isinstance(made, dict) or made.get("kind") != "Job" or made.get("apiVersion") != "batch/v1":
        yield "it must be one manifest of the kind Job, apiVersion batch/v1"
        return
    spec, pod = _at(made, "spec"), _at(made, "spec", "template", "spec")
    again = "a second pod would play the episode again"
    for path, found, expected, why in (
        ("metadata.name", _at(made, "metadata").get("name"), "{{name}}", "each episode has a Job of its own"),
        ("spec.backoffLimit", spec.get("backoffLimit"), 0, again),
        ("spec.completions", spec.get("completions", 1), 1, again),
        ("spec.parallelism", spec.get("parallelism", 1), 1, again),
        ("spec.backoffLimitPerIndex", spec.get("backoffLimitPerIndex"), None, again),
        ("spec.podFailurePolicy", spec.get("podFailurePolicy"), None, again),
        ("spec.template.spec.restartPolicy", pod.get("restartPolicy"), "Never", again),
        (
            "spec.template.spec.activeDeadlineSeconds",
            pod.get("activeDeadlineSeconds"),
            "{{seconds}}",
            "it ends a Job whose rollout process is lost",
        ),
    ):
        if found != expected:
            yield f"{path} must be {expected!r}, got {found!r}: {why}"
    kept_s = spec.get("ttlSecondsAfterFinished")
    if type(kept_s) is not int or kept_s < _SHORTEST_KEPT_S:
        yield (
            f"spec.ttlSecondsAfterFinished must be a number of at least {_SHORTEST_KEPT_S}, such as 600, got "
            f"{kept_s!r}: it removes Jobs that have ended, of which the run must first see how they ended"
        )
    namespace = _at(made, "metadata").get("namespace") or "default"
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        yield f"metadata.namespace must be the name of a namespace, got {namespace!r}"
    for metadata in (_at(made, "metadata"), _at(made, "spec", "template", "metadata")):
        for field in ("labels", "annotations"):
            if not isinstance(metadata.get(field) or {}, dict):
                yield f"{field} must be a mapping, got {metadata[field]!r}"
    container = next(_containers_with_the_command(made), None)
    if container is None:
        yield "no container has {{command}} in its command or its args, which are lists"
        return
    if len([*_containers_with_the_command(made)]) > 1:
        yield "only one container may have {{command}}: another one would play the episode again"
    if not isinstance(container.get("name"), str):
        yield "the container with {{command}} needs a name"
    sources = [_at(source, "secretRef").get("name") for source in _list(container.get("envFrom"))]
    if "{{name}}" not in sources:
        yield (
            "the container with {{command}} needs envFrom: [{secretRef: {name: '{{name}}'}}], the Secret "
            "with the variables of the episode"
        )


def _containers_with_the_command(made: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for container in _list(_at(made, "spec", "template", "spec").get("containers")):
        if isinstance(container, dict):
            words = [*_list(container.get("command")), *_list(container.get("args"))]
            if any("{{command}}" in str(word) for word in words):
                yield container


def _list(tree: Any) -> list[Any]:
    """Return a list as it is; an empty one for anything else."""
    return tree if isinstance(tree, list) else []


def _at(tree: Any, *path: str) -> dict[str, Any]:
    """Return the mapping at a path; an empty one if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _texts(tree: Any) -> Iterator[str]:
    """Yield all strings of a tree but the names of fields."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def _with_texts(tree: Any, changed: Callable[[str], Any]) -> Any:
    """Return a copy of a tree with all its strings changed."""
    if isinstance(tree, dict):
        return {name: _with_texts(value, changed) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_with_texts(value, changed) for value in tree]
    return changed(tree) if isinstance(tree, str) else tree


def _state(job: Mapping[str, Any], pod: Mapping[str, Any] | None) -> JobState:
    """Return the state of a Job and its pod; pod None: it has none, or none any more."""
    ended = {
        condition["type"]: condition
        for condition in job.get("status", {}).get("conditions") or ()
        if condition["status"] == "True"
    }
    if "Complete" in ended:
        return JobState("succeeded")
    if "deletionTimestamp" in job["metadata"]:
        return JobState("lost" if _has_begun(pod) else "unstarted", "was deleted")
    status = {} if pod is None else pod.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    containers = [one.get("state", {}) for one in status.get("containerStatuses") or ()]
    if "Failed" in ended:
        return _failure(ended["Failed"], pod, status, conditions, containers)
    if status.get("phase") in ("Running", "Succeeded", "Failed"):
        return JobState("running")
    waiting = [one["waiting"].get("reason", "") for one in containers if "waiting" in one]
    scheduled = conditions.get("PodScheduled", {})
    unplaced = scheduled.get("message", "") if scheduled.get("status") == "False" else ""
    namespace = job["metadata"].get("namespace", "default")
    describe = f"kubectl describe job -n {namespace} {job['metadata']['name']}"
    no_pod = f"it has no pod; see {describe}" if pod is None else ""
    return JobState(
        "waiting",
        no_pod or unplaced or ", ".join(filter(None, waiting)),
        queue=f"the namespace {namespace} of Kubernetes",
    )


def _has_begun(pod: Mapping[str, Any] | None) -> bool:
    """Whether a container of a pod has run."""
    status = {} if pod is None else pod.get("status", {})
    if status.get("phase", "Pending") != "Failed":  # which is also the phase of a pod that was never placed
        return status.get("phase", "Pending") != "Pending"
    states = [one.get("state", {}) for one in status.get("containerStatuses") or ()]
    return any("running" in state or "terminated" in state for state in states)


def _failure(
    failed: Mapping[str, Any],
    pod: Mapping[str, Any] | None,
    status: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    containers: list[dict[str, Any]],
) -> JobState:
    if pod is None:
        return JobState("lost", f"failed without its pod ({failed.get('reason', 'no reason is known')})")
    disruption = conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        return JobState(
            "lost" if _has_begun(pod) else "unstarted", f"was disrupted ({disruption.get('reason', '')})"
        )
    if status.get("reason") == "DeadlineExceeded":
        return JobState("failed", "reached its activeDeadlineSeconds")
    if status.get("reason"):  # such as Evicted, NodeLost, Shutdown
        return JobState("lost", f"lost its pod ({status['reason']})")
    codes = [one["terminated"] for one in containers if one.get("terminated", {}).get("exitCode")]
    if not codes:
        return JobState("failed", f"failed ({failed.get('reason', '')})")
    reason = codes[0].get("reason", "Error")
    return JobState(
        "failed", f"exited with status {codes[0]['exitCode']}" + (f" ({reason})" if reason != "Error" else "")
    )
