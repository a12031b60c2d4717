"""Runs a process of the run as a job step, in the foreground.

`python -m areal_agents.cluster.launchers.slurm.step --name=NAME --node=NUMBER … -- COMMAND`

The step has the GPUs that it asks for to itself (`--exact`); without GPUs, it shares all cores of its node
with the other steps (`--overlap`). SIGTERM is passed on to the process, by scancel, because srun itself would
kill it. This program ends as the process did: with its exit code or by its signal, and by SIGKILL if the node
of the process was lost, after which srun says 0. When the supervisor ends in any way, standard input of the
process closes, and this program ends too, at the latest when the process has had its time to end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from areal_agents.cluster.launchers.slurm.allocation import (
    Allocation,
    SlurmError,
    Step,
    slurm,
    srun_environment,
)
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.supervision import EXIT_STOPPED, GRACE_S, SUPERVISED
from areal_agents.process_control import end_as
from areal_agents.secret_variables import hide_token

LOOK_S = 1.0  # how often the controller is asked for the step until it has one
ANSWER_S = 30  # longest time in seconds in which a node that answers starts a step
LINGER_S = 60.0  # longest wait for the end of an earlier step of the same name
CONTROLLER_S = 60.0  # in which a controller that is restarted answers again
_POLL_S = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT)
_BY_SIGNAL = 128  # srun's exit code for a process that a signal ended is this and the signal's number


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to run.

    Attributes:
        node: the node that was chosen for it, as a number among those with which the job started.
        cpus: the number of cores of a step with GPUs.
        wait_s: the longest wait for free GPUs.
    """

    name: str
    node: int
    gpus: int
    cpus: int
    wait_s: int
    command: Sequence[str]


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="step")
    parser.add_argument("--name", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--wait-s", type=int, default=60)
    parser.add_argument("command", nargs="+")
    hide_token()
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: told.append(number))
    try:
        code = _run(_Wanted(**vars(parser.parse_args(arguments))), Allocation.of(os.environ), told)
    except SlurmError as error:
        print(error, flush=True)
        code = 1
    # As srun says that the process ended.
    ended_by = code - _BY_SIGNAL
    end_as(-ended_by if ended_by in _SIGNALS else code)


def _run(wanted: _Wanted, allocation: Allocation, told: list[int]) -> int:
    """Run the process to its end, and return its exit code."""
    supervisor = os.getppid()
    earlier = _end_earlier(allocation, wanted.name)
    where = _nodes_for(wanted, allocation)
    if told:
        return EXIT_STOPPED
    process = subprocess.Popen(
        [*_srun(wanted.name), *where, *wanted.command],
        env=srun_environment(os.environ),
        start_new_session=True,  # a signal to the group of this process must not reach srun
    )
    try:
        step = _follow(process, wanted.name, earlier, allocation, told, supervisor)
        code = _wait(process, supervisor)
    finally:
        process.kill()  # it has ended, unless this program fails
    if told:
        return code
    if code == 0 and step is not None and step.node in _lost_nodes(allocation):
        print(f"{step.node} was lost, and {wanted.name} with it", flush=True)
        return _BY_SIGNAL + signal.SIGKILL
    if code and step is None and wanted.gpus and (lost := _lost_nodes(allocation)):
        print(
            f"there is no room for {wanted.name} with {wanted.gpus} GPUs in what is left of job "
            f"{allocation.job_id}, which lost {', '.join(lost)}",
            flush=True,
        )
        return EXIT_REFUSED
    return code


def _lost_nodes(allocation: Allocation) -> tuple[str, ...]:
    """Return the nodes that the job no longer has; none if the controller does not answer for a while."""
    deadline = time.monotonic() + CONTROLLER_S
    while True:
        try:
            return allocation.lost_nodes()
        except SlurmError as error:  # the controller may be restarting
            if time.monotonic() > deadline:
                print(f"{error}; whether a node was lost is not known", flush=True)
                return ()
        time.sleep(LOOK_S)


def _nodes_for(wanted: _Wanted, allocation: Allocation) -> list[str]:
    """Return the options of srun that say where the step runs, and with what.

    That is the chosen node, if the job still has it and it starts steps. Otherwise Slurm finds another one
    for a step with GPUs, and for one without it is the next that does.
    """
    left = allocation.nodes()
    first = wanted.node % len(allocation.first_nodes)
    order = [node for node in allocation.first_nodes[first:] + allocation.first_nodes[:first] if node in left]
    chosen = allocation.first_nodes[first]
    if wanted.gpus:
        gpus = [
            "--exact", f"--gpus-per-node={wanted.gpus}", f"--cpus-per-task={wanted.cpus}",
            f"--immediate={wanted.wait_s}",
        ]  # fmt: skip
        if chosen in left and (len(left) == 1 or _answers(chosen)):
            return [*gpus, f"--nodelist={chosen}"]
        return [*gpus, *([f"--exclude={chosen}"] if chosen in left else [])]
    node = order[0] if len(order) == 1 else next((node for node in order if _answers(node)), None)
    if node is None:
        raise SlurmError(
            f"no node of job {allocation.job_id} starts a step: {', '.join(order) or 'none left'}"
        )
    return ["--overlap", "--gres=none", "--cpu-bind=none", f"--nodelist={node}"]


def _answers(node: str) -> bool:
    """Whether a step can be started on a node; Slurm finds out minutes later that it is lost."""
    probe = [
        *_srun("probe"),
        "--overlap",
        "--gres=none",
        f"--immediate={ANSWER_S}",
        f"--nodelist={node}",
        "true",
    ]
    try:
        done = subprocess.run(
            probe,
            env=srun_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=ANSWER_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _srun(name: str) -> list[str]:
    return ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--mem=0", "--mpi=none"]


def _follow(
    process: subprocess.Popen[bytes],
    name: str,
    earlier: set[str],
    allocation: Allocation,
    told: list[int],
    supervisor: int,
) -> Step | None:
    """Wait until srun has ended, or its process was told to end; return the step, None if it had none."""
    step: Step | None = None
    next_look = time.monotonic()
    while process.poll() is None:
        if os.getppid() != supervisor:
            told.append(signal.SIGTERM)
        if step is None and (told or time.monotonic() >= next_look):
            try:
                step = next((step for step in allocation.steps(name) if step.id not in earlier), None)
            except SlurmError as error:  # the controller may be restarting
                print(error, flush=True)
            next_look = time.monotonic() + LOOK_S
        if told:
            _pass_on(process, step)
            return step
        time.sleep(_POLL_S)
    return step


def _wait(process: subprocess.Popen[bytes], supervisor: int) -> int:
    """Wait for the end of srun. Without a supervisor that would kill this program, the wait has a limit."""
    while True:
        try:
            return process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if os.getppid() == supervisor:
                continue
        try:
            return process.wait(float(os.environ.get(SUPERVISED, GRACE_S)))
        except subprocess.TimeoutExpired:  # its node, or all of Slurm, is lost
            process.kill()


def _pass_on(process: subprocess.Popen[bytes], step: Step | None) -> None:
    """Tell the process of a step to end; without a step, end srun, which waits for resources."""
    if step is None:
        process.terminate()
        return
    try:  # by the controller; without it, scancel tells the node, and then fails on a step
        slurm("scancel", "--ctld", "--signal=TERM", step.id)
    except SlurmError as error:  # the supervisor kills this process in time, which also ends the step
        print(error, flush=True)


def _end_earlier(allocation: Allocation, name: str) -> set[str]:
    """End what is left of earlier steps of that name, whose srun was killed; return their ids.

    Steps of lost nodes stay in Slurm's list for a while, and have nothing of the job any more.
    """
    deadline = time.monotonic() + LINGER_S
    ended: set[str] = set()
    while steps := allocation.steps(name):
        for step in steps:
            if step.id not in ended:
                slurm("scancel", "--ctld", step.id)
                ended.add(step.id)
        left = allocation.nodes()
        if not any(step.node in left for step in steps):
            break
        if time.monotonic() > deadline:  # its node does not answer, and Slurm will find out
            print(f"an earlier step of {name} is still ending on {steps[0].node}", flush=True)
            break
        time.sleep(_POLL_S)
    return ended


if __name__ == "__main__":
    main(sys.argv[1:])
