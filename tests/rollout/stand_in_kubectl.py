"""A stand-in for kubectl and a cluster: Jobs are processes of this machine, and a folder has the objects.

`install` writes the program, which runs `python stand_in_kubectl.py FOLDER ...`. It accepts the commands and
options that a run uses, and refuses all others. As in a cluster, a pod waits until its Secret exists, has
only the variables of its container, and is deleted with its Job, as are the Secrets that the Job owns.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stand_in_slurm import kill_marked


class StandInKubernetes:
    """The cluster, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"

    def install(self) -> None:
        """Write the program, which a test puts into PATH."""
        self.programs.mkdir(parents=True)
        words = shlex.join([sys.executable, "-S", "-E", __file__, str(self.folder)])
        path = self.programs / "kubectl"
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o755)

    def objects(self, kind: str) -> dict[str, dict[str, Any]]:
        """The objects of a kind, by name."""
        return {path.stem: made for path, made in _all(self.folder, kind)}

    def change(self, kind: str, name: str, status: dict[str, Any]) -> None:
        """Replace fields of the status of an object, as a controller does."""
        _set_status(self.folder, kind, name, status)

    def end_pod(self, name: str) -> None:
        """End the processes of a pod."""
        _end(self.folder, name)

    def calls(self) -> list[list[str]]:
        """The arguments of each command."""
        path = self.folder / "calls"
        return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(folder: Path, arguments: list[str]) -> int:
    if arguments[0] == "run-pod":
        return _run(folder, arguments[1])
    with open(folder / "calls", "a") as calls:
        calls.write(shlex.join(arguments) + "\n")
    parser = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    parser.add_argument("--namespace", default="default")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", allow_abbrev=False)
    create.add_argument("-f", choices=["-"], required=True)
    create.add_argument("-o", choices=["json"])
    get = commands.add_parser("get", allow_abbrev=False)
    get.add_argument("kinds", choices=["jobs,pods"])
    get.add_argument("--selector", required=True)
    get.add_argument("-o", choices=["json"], required=True)
    delete = commands.add_parser("delete", allow_abbrev=False)
    delete.add_argument("kind", choices=["jobs"])
    delete.add_argument("names", nargs="+")
    delete.add_argument("--ignore-not-found", action="store_true")
    delete.add_argument("--cascade", choices=["background"], required=True)
    delete.add_argument("--wait", choices=["false"], required=True)
    logs = commands.add_parser("logs", allow_abbrev=False)
    logs.add_argument("job")
    logs.add_argument("--container", required=True)
    logs.add_argument("--tail", type=int, required=True)
    logs.add_argument("--limit-bytes", type=int, required=True)
    given = parser.parse_args(arguments)
    return {"create": _create, "get": _get, "delete": _delete, "logs": _logs}[given.command](folder, given)


def _create(folder: Path, given: argparse.Namespace) -> int:
    made = json.load(sys.stdin)
    kind, name = made["kind"], made["metadata"]["name"]
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        return _refuse(f'The {kind} "{name}" is invalid: metadata.name')
    if (refusal := folder / f"refuse-{kind}").exists():
        why = refusal.read_text() or 'User "agents" cannot create resource'
        return _refuse(f'{kind.lower()}s "{name}" is forbidden: {why}')
    made["metadata"] |= {"uid": f"uid-of-{name}", "namespace": given.namespace}
    if kind == "Secret":
        texts = made.pop("stringData")
        made["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    _write(folder, kind, made)
    if kind == "Job":
        pod = made["spec"]["template"]
        owner = {"kind": "Job", "name": name, "uid": made["metadata"]["uid"]}
        metadata = {**pod["metadata"], "name": f"{name}-pod", "ownerReferences": [owner]}
        _write(folder, "Pod", {"kind": "Pod", "metadata": metadata, "spec": pod["spec"], "status": _PENDING})
        subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(folder), "run-pod", name],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    print(json.dumps(made) if given.o else f"{kind.lower()}/{name} created")
    return 0


_PENDING = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}


def _get(folder: Path, given: argparse.Namespace) -> int:
    key, _, value = given.selector.partition("=")
    items = [
        made
        for kind in ("Job", "Pod")
        for _, made in _all(folder, kind)
        if made["metadata"]["labels"].get(key) == value
    ]
    print(json.dumps({"kind": "List", "items": items}))
    return 0


def _delete(folder: Path, given: argparse.Namespace) -> int:
    for name in given.names:
        with _locked(folder):
            if (folder / f"Job/{name}.json").exists():
                (folder / f"Job/{name}.json").unlink()
                _end(folder, name)
                (folder / f"Pod/{name}-pod.json").unlink(missing_ok=True)
                for path, made in _all(folder, "Secret"):
                    if made["metadata"]["ownerReferences"][0]["uid"] == f"uid-of-{name}":
                        path.unlink(missing_ok=True)
            elif not given.ignore_not_found:
                return _refuse(f'jobs.batch "{name}" not found')
    return 0


def _logs(folder: Path, given: argparse.Namespace) -> int:
    path = folder / f"{given.job.removeprefix('job/')}.output"
    if not path.exists():
        return _refuse(f"container {given.container!r} is waiting to start: PodInitializing")
    lines = path.read_text().splitlines(keepends=True)[-given.tail :]
    sys.stdout.write("".join(lines)[: given.limit_bytes])
    return 0


def _run(folder: Path, name: str) -> int:
    """Run the pod of a Job: wait for its Secret, run the container, and record how it ended."""
    pod = f"{name}-pod"
    whole = folder / f"{name}.pid-{os.getpid()}"
    whole.write_text(str(os.getpid()))
    whole.replace(folder / f"{name}.pid")
    job = _read(folder / f"Job/{name}.json")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (source,) = container["envFrom"]
    secret = folder / f"Secret/{source['secretRef']['name']}.json"
    while not secret.exists() or (folder / "held").exists():
        if not (folder / f"Job/{name}.json").exists():
            return 0
        time.sleep(0.02)
    variables = {key: base64.b64decode(text).decode() for key, text in _read(secret)["data"].items()}
    words = [_expanded(word, variables) for word in container["command"]]
    _set_status(folder, "Pod", pod, {"phase": "Running"})
    with open(folder / f"{name}.output", "wb") as output:
        code = subprocess.run(
            words,
            env={"PATH": os.environ["PATH"], "HOSTNAME": f"{folder}/{name}", **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ).returncode
    kill_marked(f"HOSTNAME={folder}/{name}", but={os.getpid()})
    code = code if code >= 0 else 128 - code
    state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    ended = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": state}]}
    _set_status(folder, "Pod", pod, ended)
    condition = {"type": "Failed" if code else "Complete", "status": "True"}
    reason = {"reason": "BackoffLimitExceeded"} if code else {}
    _set_status(folder, "Job", name, {"conditions": [{**condition, **reason}]})
    return 0


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Expand a word of a command as Kubernetes does: $(NAME) to the variable, and $$ to $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((\w+)\)", value, word)


def _end(folder: Path, name: str) -> None:
    """Kill a pod: the process that runs it, and those of its container."""
    path = folder / f"{name}.pid"
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    kill_marked(f"HOSTNAME={folder}/{name}", but={os.getpid()})


def _set_status(folder: Path, kind: str, name: str, status: dict[str, Any]) -> None:
    path = folder / f"{kind}/{name}.json"
    with _locked(folder):
        if path.exists():
            made = _read(path)
            made["status"] = {**made.get("status", {}), **status}
            _write(folder, kind, made)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other process change or delete an object; a process that is killed loses the lock."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _all(folder: Path, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """The objects of a kind in the order of their names, without those that are deleted meanwhile."""
    found = []
    for path in sorted(folder.glob(f"{kind}/*.json")):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, _read(path)))
    return found


def _write(folder: Path, kind: str, made: dict[str, Any]) -> None:
    path = folder / kind / f"{made['metadata']['name']}.json"
    path.parent.mkdir(exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(made))
    whole.replace(path)


def _refuse(message: str) -> int:
    print(f"Error from server: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
