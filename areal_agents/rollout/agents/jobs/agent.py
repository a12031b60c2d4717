"""Runs a command as `CommandAgent` does, but as a job of a cluster for each episode.

The command gets the same task and variables. The time of the episode begins when the job starts. The loss of
a job (its node died, it was preempted, somebody cancelled it) is not the agent's doing: the attempt fails and
is repeated. A job that does not start in time, or is cancelled before it starts, is not a failed attempt: its
episode is aborted and repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, AgentLost, AgentNotStarted
from areal_agents.rollout.agents.command import LONGEST_VARIABLE, TASK_VARIABLE, command_variables
from areal_agents.rollout.agents.episode_logs import EpisodeLogs
from areal_agents.rollout.agents.jobs.commands import QueueFull, Unanswered
from areal_agents.rollout.agents.jobs.config import JobConfig
from areal_agents.rollout.agents.jobs.followed import FollowedJob, FollowedJobs
from areal_agents.rollout.agents.jobs.queue import NewJob
from areal_agents.rollout.agents.jobs.schedulers import queue_of

logger = logging.getLogger(__name__)

# Gives a program its task on standard input, which a job does not have.
_WITH_TASK = ("sh", "-c", f'printf %s "${TASK_VARIABLE}" | "$@"', "sh")
_LONGEST_PAUSE_S = 60.0  # until a job that a full queue did not take is submitted again
_SHOWN_EPISODE = 24  # characters of the id of the episode in the name of a job


class JobAgent:
    """Runs a command for each episode as a job."""

    capacity: int | None = None
    must_reward = False

    def __init__(
        self,
        command: Sequence[str],
        config: JobConfig,
        *,
        owner: str = "",
        logs: Path | None = None,
        passed: Collection[str] = (),
    ) -> None:
        """Args:
        command: the program and its arguments.
        owner: a name, of lower-case letters, digits and dashes, that no other agent uses at the same time;
            jobs that earlier agents of this name have left are cancelled. "": a new name is made.
        logs, passed: see `CommandAgent`; Jobs of Kubernetes get no variables of this process.

        Raises:
            AgentError: the template cannot be used, or the scheduler's commands are not installed here.
        """
        self._command = command_line(command)
        self._wait_s = config.wait_s
        self._poll_s = config.poll_s
        self._is_full = False  # the scheduler has not taken the last job for want of room
        self._refusals: dict[str, str] = {}  # why it has not taken the job of an episode
        self._owner = owner or f"areal-{secrets.token_hex(5)}"
        self._logs = EpisodeLogs(None if logs is None else logs.absolute())
        self._jobs = FollowedJobs(queue_of(config, owner=self._owner, passed=passed), poll_s=config.poll_s)
        self._prepared: dict[str, tuple[FollowedJob, NewJob]] = {}

    async def prepare(self, task: Mapping[str, Any], ep: Episode, time_s: float) -> None:
        """Submit the job of an episode, and wait for its start.

        Raises:
            AgentNotStarted: the job is not taken, or does not start, within `wait_s`, it is cancelled
                before, or the scheduler does not answer whether it takes it.
            AgentError: the task is too long for a variable, or the job is refused.
        """
        text = json.dumps(dict(task))
        if len(text) > LONGEST_VARIABLE:
            raise AgentError(
                f"the task has {len(text)} bytes, and a job gets at most {LONGEST_VARIABLE}, in a variable; "
                "put what is long into a file that the job can read, and its path into the task"
            )
        new = NewJob(
            name=self._name(ep.id),
            episode=ep.id,
            command=self._command,
            variables=command_variables(text, ep),
            time_s=time_s,
            log=self._logs.create(ep.id),
        )
        job: FollowedJob | None = None
        try:
            async with asyncio.timeout(self._wait_s):
                job = await self._submitted(new)
                self._prepared[ep.id] = (job, new)
                await job.started()
        except TimeoutError:
            raise AgentNotStarted(self._not_started(ep.id, job)) from None
        except Unanswered as error:  # if there is a job, it must not play an episode that another one plays
            raise AgentNotStarted(str(error)) from None
        if job.state.phase == "unstarted":
            raise AgentNotStarted(f"before it had started, job {job.id} {job.state.detail}")

    async def _submitted(self, new: NewJob) -> FollowedJob:
        """Submit a job, again and again while the queue is full."""
        pause_s = self._poll_s
        while True:
            try:
                job = await self._jobs.submit(new)
                self._is_full = False
                return job
            except QueueFull as full:
                if not self._is_full:
                    logger.warning("%s; jobs wait until it does, for at most %g s", full, self._wait_s)
                self._is_full = True
                self._refusals[new.episode] = str(full)
            await asyncio.sleep(pause_s)
            new = replace(new, name=self._name(new.episode))  # one that is being deleted may have the old one
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _not_started(self, episode: str, job: FollowedJob | None) -> str:
        """Return why a job did not start in time; None: the scheduler has not taken it."""
        limit = f"within {self._wait_s:g} s (agent.job.wait_s)"
        if job is None:
            return (
                f"no job was taken {limit}: {self._refusals.get(episode, 'the scheduler has not answered')}"
            )
        reason = f" ({job.state.detail})" if job.state.detail else ""
        queue = job.state.queue or "the queue"
        return f"job {job.id} did not start {limit} in {queue}{reason}, and is cancelled"

    async def run(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Wait for the end of the job. Raises AgentError, with the end of its output, if it failed."""
        job, new = self._prepared.pop(ep.id)
        try:
            state = await job.ended()
        finally:
            job.cancel()
        said = await self._jobs.output(job, new)
        if state.phase == "succeeded":
            return
        error = f"job {job.id} {state.detail}" + (f": {said}" if said else "")
        raise AgentError(error) if state.phase == "failed" else AgentLost(error)

    async def release(self, episode: str) -> None:
        """Cancel the job of an ended episode, if its run has not taken it."""
        self._logs.end(episode)
        self._refusals.pop(episode, None)
        if episode in self._prepared:
            self._prepared.pop(episode)[0].cancel()

    async def close(self) -> None:
        """Cancel every job that is left."""
        await self._jobs.close()

    def _name(self, episode: str) -> str:
        """Return a new name, which shows people who list jobs to which run and episode it belongs."""
        shown = re.sub(r"[^a-z0-9]+", "-", episode.lower())[-_SHOWN_EPISODE:].strip("-")
        return f"{self._owner}-{shown}-{secrets.token_hex(2)}"


def command_line(command: Sequence[str]) -> str:
    """Return the shell command line of a job, which gives a command its task on standard input."""
    return shlex.join((*_WITH_TASK, *command))
