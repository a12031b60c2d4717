"""A stand-in for sbatch, squeue and scancel: jobs are processes of this machine, and a folder is the queue.

`install` writes the three programs, which run `python stand_in_slurm.py PROGRAM FOLDER ...`. A job is a
folder with its script and its state, as squeue shows it: the state, the wait status and the reason. While the
file `held` exists, new jobs wait; while `full` exists, they are refused with its content; while `unanswered`
exists, they are accepted, but sbatch fails. Every query and cancellation is a line of `calls`. When a job
ends, all processes that have its number in their environment are killed, as by Slurm's control groups.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "squeue", "scancel")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")


class StandInSlurm:
    """The queue, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"

    def install(self) -> None:
        """Write the programs, which a test puts into PATH."""
        self.programs.mkdir(parents=True)
        for program in PROGRAMS:
            path = self.programs / program
            words = shlex.join([sys.executable, "-S", "-E", __file__, program, str(self.folder)])
            path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            path.chmod(0o755)

    def states(self) -> dict[str, str]:
        """The state of each job, by its name."""
        return {_read(job, "name"): _state(job)[0] for job in _jobs(self.folder)}

    def end_as(self, name: str, state: str) -> None:
        """End a job in this state as Slurm does, for example because its node died."""
        (job,) = [job for job in _jobs(self.folder) if _read(job, "name") == name]
        if state != "CANCELLED":
            (job / "nodes").write_text("node1")
        _end(job, state)

    def calls(self) -> list[str]:
        """The recorded commands; those of sbatch are not recorded."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def main(program: str, folder: Path, arguments: list[str]) -> int:
    if program == "run":
        return _run(Path(arguments[0]))
    if program == "sbatch":
        return _submit(folder, arguments)
    with open(folder / "calls", "a") as calls:
        calls.write(shlex.join([program, *arguments]) + "\n")
    if program == "squeue":
        for job in _jobs(folder):
            state, code, reason = _state(job)
            fields = (state, code, reason, *(_read(job, name) for name in ("name", "partition", "nodes")))
            print("|".join((job.name, *fields, "")))
        return 0
    for job in _jobs(folder):
        if job.name in arguments and _state(job)[0] not in _ENDED:
            _end(job, "CANCELLED")
    return 0


def _submit(folder: Path, arguments: list[str]) -> int:
    script = sys.stdin.read()
    directives = script[: script.find("\n\n")].splitlines()  # Slurm reads only those before the first command
    options = dict(
        word.removeprefix("--").split("=", 1)
        for line in directives
        if line.startswith("#SBATCH --")
        for word in shlex.split(line)[1:]
    )
    *fixed, name = arguments
    if options.get("partition") == "full" or fixed != ["--parsable", "--no-requeue", "--ignore-pbs"]:
        print("sbatch: error: Batch job submission failed: Invalid partition", file=sys.stderr)
        return 1
    if (folder / "full").exists():
        print((folder / "full").read_text() or "sbatch: error: QOSMaxSubmitJobPerUserLimit", file=sys.stderr)
        print(
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", file=sys.stderr
        )
        return 1
    job = _new_job(folder)
    (job / "script").write_text(script)
    (job / "script").chmod(0o755)
    (job / "name").write_text(name.removeprefix("--job-name="))
    (job / "minutes").write_text(options["time"])
    (job / "partition").write_text(options.get("partition", "debug"))
    (job / "nodes").touch()
    _write_state(job, "PENDING", reason="Resources")
    runner = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-E",
            __file__,
            "run",
            str(folder),
            str(job),
            options["output"].replace("%%", "%"),
        ],
        env={**os.environ, "SLURM_JOB_ID": f"stand-in-{job}"},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _write(job, "runner", str(runner.pid))
    if (folder / "unanswered").exists():
        print("sbatch: error: Batch job submission failed: Socket timed out on send/recv", file=sys.stderr)
        return 1
    notice = folder / "notice"
    print((notice.read_text() if notice.exists() else "") + job.name)
    return 0


def _run(job: Path) -> int:
    """Run the script of a job, and record how it ended."""
    while (job.parent.parent / "held").exists():
        time.sleep(0.02)
    (job / "nodes").write_text("node1")
    _write_state(job, "RUNNING")
    with open(sys.argv[4], "wb") as output:
        code = subprocess.run(
            [job / "script"], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    _kill(job)
    if code:
        _write_state(job, "FAILED", code=code << 8 if code > 0 else -code, reason="NonZeroExitCode")
    else:
        _write_state(job, "COMPLETED")
    return 0


def _end(job: Path, state: str) -> None:
    runner = int(_read(job, "runner"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner, signal.SIGKILL)
    _kill(job)
    _write_state(job, state)


def _kill(job: Path) -> None:
    """Kill the processes of a job, but not this one, which may be its runner."""
    kill_marked(f"SLURM_JOB_ID=stand-in-{job}", but={os.getpid()})


def kill_marked(variable: str, *, but: set[int]) -> None:
    """Kill every process with a variable of this value in its environment, except some."""
    while True:
        found = 0
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    entry.name.isdigit()
                    and int(entry.name) not in but
                    and variable.encode() in (entry / "environ").read_bytes().split(b"\0")
                ):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.01)


def _new_job(folder: Path) -> Path:
    number = 1
    while True:
        job = folder / "jobs" / str(number)
        try:
            job.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return job


def _jobs(folder: Path) -> list[Path]:
    return [job for job in sorted((folder / "jobs").glob("*")) if (job / "runner").exists()]


def _state(job: Path) -> tuple[str, str, str]:
    state, code, reason = _read(job, "state").split("|")
    return state, code, reason


def _write_state(job: Path, state: str, *, code: int = 0, reason: str = "None") -> None:
    _write(job, "state", f"{state}|{code}|{reason}")


def _write(job: Path, name: str, text: str) -> None:
    """Write a file that another process reads either whole or not at all."""
    whole = job / f"{name}-{os.getpid()}"
    whole.write_text(text)
    whole.replace(job / name)


def _read(job: Path, name: str) -> str:
    return (job / name).read_text()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
