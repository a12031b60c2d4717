"""Agents as batch jobs of Slurm, through sbatch, squeue and scancel.

The variables of the episode travel in the environment of sbatch, which Slurm gives to the job, so the key of
the episode is in no command line and in no script. Slurm never requeues a job, because that would play its
episode a second time; a lost job is a failed attempt.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from areal_agents.direct_http import bypassing_proxies
from areal_agents.errors import AgentError
from areal_agents.process_control import AGENT_MARK, INNER_AGENT_MARK, RUN_MARK
from areal_agents.rollout.agents.jobs.commands import QueueFull, SchedulerCommands, SchedulerError, Unanswered
from areal_agents.rollout.agents.jobs.queue import TAIL, JobState, NewJob
from areal_agents.rollout.agents.jobs.template import check_places, fill, read_template
from areal_agents.secret_variables import without_password, without_secrets

PLACES = ("name", "command", "minutes", "log")
_MARGIN_MINUTES = 5  # Slurm's own limit ends only jobs that no rollout process follows any more
_PROGRAMS = ("sbatch", "squeue", "scancel")
# Options that a template must leave to the run, or that make more than one job of it.
_REFUSED = (
    *("--export", "--export-file", "--array", "-a", "--requeue", "--wait", "-W", "hetjob"),
    *("--clusters", "-M"),  # of which squeue and scancel would have to know
)
# Prefixes of variables that describe the job in which this process may run, or change what the commands do.
_OF_THE_RUN = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_")
_MARKS = (RUN_MARK, AGENT_MARK, INNER_AGENT_MARK)  # by which processes of this machine are found and ended
_CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_BY_THE_COMMAND = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT")
_LOST = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED")
# Of a shell script, from left to right: what is quoted, where # begins no comment, and comments.
_QUOTED_OR_COMMENT = re.compile(
    r"""'[^']*' | "(?:\\.|[^"\\])*" | \\. | (?<![^\s;&|()<>])(?P<comment>\#[^\n]*)""", re.VERBOSE | re.DOTALL
)
_SPECIAL_IN_PATHS = re.compile(r"[\"\\\n]")
# Limits of an account, a user or a QOS, such as AssocMaxSubmitJobLimit and MaxSubmitJobsPerAccount, and that
# of the whole controller, which may also be starting.
_FULL = re.compile(
    r"SubmitJobs?(Per|Limit)|temporarily unable to accept job|Unable to contact slurm controller"
)
_UNANSWERED = re.compile(r"timed out on send/recv|Zero Bytes were transmitted|did not end within")


class SlurmJobs:
    """The jobs of one owner, whose names begin with that of the owner."""

    def __init__(self, template: str, *, owner: str, passed: Collection[str] = ()) -> None:
        """Args:
        template: the path of a batch script.
        owner: how the names of its jobs begin.
        passed: (PGPASSWORD,) if the jobs get the password of the store, else empty.

        Raises:
            AgentError: the template cannot be used, or the commands of Slurm are not installed here.
        """
        self.commands = SchedulerCommands()
        self._script = read_script(template)
        self._owner = owner
        self._passed = tuple(passed)
        if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
            raise AgentError(
                f"agent.job: {missing[0]} is not installed on this machine, where the rollout process runs; "
                "run it on a machine that submits jobs to Slurm"
            )

    def submit(self, job: NewJob) -> str:
        """Submit a batch script, and return the number of the job.

        Raises QueueFull, Unanswered or SchedulerError.
        """
        try:
            answer = self.commands.run(
                # Jobs are found by their names, wherever the template has them. Slurm reads #PBS lines too,
                # of which -J would make more than one job.
                ("sbatch", "--parsable", "--no-requeue", "--ignore-pbs", f"--job-name={job.name}"),
                stdin=filled_script(self._script, job),
                environment={
                    **bypassing_proxies(self._environment(), job.variables["OPENAI_BASE_URL"]),
                    **job.variables,
                },
            )
        except SchedulerError as error:
            if _UNANSWERED.search(str(error)):
                raise Unanswered(f"Slurm did not answer whether it takes the job: {error}") from None
            if _FULL.search(str(error)):
                raise QueueFull(f"Slurm takes no further job for now: {error}") from None
            raise
        number = answer.strip().rpartition("\n")[2].partition(";")[0]  # some sites print notices before it
        if not number.isdecimal():
            raise SchedulerError(f"sbatch --parsable wrote no number of a job, but {answer[:200]!r}")
        return number

    def states(self) -> Mapping[str, JobState]:
        """Return the states of the jobs that Slurm still knows. Raises SchedulerError."""
        fields = "JobID:|,State:|,exit_code:|,Reason:|,Name:|,Partition:|,NodeList:|"
        query = ("squeue", "--me", "--noheader", "--states=all", f"--Format={fields}")
        listed = self.commands.run(query, environment=self._environment())
        found = {}
        for line in listed.splitlines():
            number, state, code, reason, name, partition, nodes, *_ = [*line.split("|"), *[""] * 6]
            if name.startswith(f"{self._owner}-"):
                found[number] = _state(state, code, reason, partition, nodes)
        return found

    def cancel(self, ids: Collection[str]) -> None:
        """End jobs, by one command. Raises SchedulerError."""
        self.commands.run(("scancel", "--quiet", *ids), environment=self._environment())

    def output(self, id: str, log: Path | None) -> str:
        """Return the end of the log, which the job itself has written."""
        if log is None:
            return ""
        try:
            with open(log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                return file.read().decode(errors="replace").strip()
        except OSError as error:
            raise SchedulerError(f"the log of job {id} cannot be read: {error.strerror}") from None

    def _environment(self) -> dict[str, str]:
        """Return the variables of this process that the commands of Slurm get, and with sbatch its job.

        Secrets of the run are left out, as for other commands, and so is the name of a temporary file with
        the authorities of `cluster.tls`, because no other machine has that file.
        """
        temporary = f"{tempfile.gettempdir()}/"
        return {
            name: value
            for name, value in without_password(without_secrets(os.environ), passed=self._passed).items()
            if name not in _MARKS
            and (name == "SLURM_CONF" or not name.startswith(_OF_THE_RUN))
            and not (name in _CERTIFICATES and value.startswith(temporary))
        }


def read_script(template: str) -> str:
    """Return the text of a batch script with places. Raises AgentError if it cannot be used."""
    text = read_template(template)
    parts = [part for part, is_comment in _parts(text) if not is_comment]
    check_places(template, parts, PLACES)
    if not text.startswith("#!"):
        raise AgentError(f"agent.job.template: {template} must begin with a line such as #!/bin/bash")
    given = {
        word.partition("=")[0] if word.startswith("--") or not word.startswith("-") else word[:2]
        for line in "".join(parts).splitlines()
        if line.startswith("#SBATCH")
        for word in line.split()[1:]
    }
    if refused := [option for option in _REFUSED if any(_means(word, option) for word in given)]:
        raise AgentError(
            f"agent.job.template: {template} has the option {refused[0]}; leave it out: an episode is one "
            "job, which runs once and gets its variables from the run"
        )
    return text


def filled_script(script: str, job: NewJob) -> str:
    """Return the batch script of an episode's job, from a script with places.

    Raises:
        AgentError: the path of the log has a character by which Slurm reads another path.
    """
    if job.log is not None and (special := _SPECIAL_IN_PATHS.search(str(job.log))):
        raise AgentError(
            f"agent.job: Slurm cannot write the log {str(job.log)!r}, whose path has {special[0]!r}; put the "
            "run into another folder (run_dir)"
        )
    values = {
        "name": job.name,
        "command": job.command,
        "minutes": str(math.ceil(job.time_s / 60) + _MARGIN_MINUTES),
        "log": "/dev/null" if job.log is None else str(job.log).replace("%", "%%"),
    }
    return "".join(part if is_comment else fill(part, values) for part, is_comment in _parts(script))


def _parts(script: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a script in order, each with whether it is a comment.

    The options on lines that begin with #SBATCH are not comments, but only before the first command, because
    Slurm reads no later ones.
    """
    begin = 0
    for line in script.splitlines(keepends=True):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        begin += len(line)
        if line.startswith("#SBATCH"):
            yield "#SBATCH", False
            yield from _shell_parts(line.removeprefix("#SBATCH"))
        else:
            yield line, True
    yield from _shell_parts(script[begin:])


def _shell_parts(text: str) -> Iterator[tuple[str, bool]]:
    begin = 0
    for found in _QUOTED_OR_COMMENT.finditer(text):
        if found["comment"] is not None:
            yield text[begin : found.start()], False
            yield found["comment"], True
            begin = found.end()
    yield text[begin:], False


def _means(word: str, option: str) -> bool:
    """Whether an option of a script is this one, perhaps shortened."""
    return word == option or (len(word) > len("--a") and word.startswith("--") and option.startswith(word))


def _state(state: str, code: str, reason: str, partition: str, nodes: str) -> JobState:
    why = "" if reason == "None" else reason
    if state == "COMPLETED":
        return JobState("succeeded")
    if state == "FAILED" and why == "NonZeroExitCode" and code.isdigit():
        return JobState("failed", f"exited with status {_exit_status(int(code))}")
    if state in _BY_THE_COMMAND:
        return JobState("failed", f"ended as {state}" + (f" ({why})" if why else ""))
    if state in _LOST:
        return JobState("lost" if nodes else "unstarted", f"ended as {state}")
    if state in _RUNNING:
        return JobState("running", why)
    return JobState("waiting", why, queue=f"the partition {partition} of Slurm")


def _exit_status(wait_status: int) -> int:
    """Return the exit status, or -N if signal N ended the command; no value is an error."""
    return wait_status >> 8 if wait_status > 255 else -(wait_status & 127)
