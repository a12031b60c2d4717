"""Follows the jobs of one agent by one query at a time for the states of all of them, and cancels jobs.

The cancellation of a job that is no longer wanted is repeated until the scheduler accepts it. That includes
jobs whose submission was cancelled, those that the scheduler took although their submission failed, and those
that an earlier process of the same owner has left.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from areal_agents.rollout.agents.jobs.commands import QueueFull, SchedulerError
from areal_agents.rollout.agents.jobs.queue import JobQueue, JobState, NewJob

logger = logging.getLogger(__name__)

CLOSE_S = 10.0  # longest wait until the scheduler has accepted the last cancellations; half of it at first
_COMMANDS = 4  # of the scheduler at the same time; one of them is never a submission
_CANCELLED_BY_ONE = 10  # jobs; kubectl sends ten requests at once, but only five per second after them
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0  # until a refused cancellation is repeated, twice as long each time
_OUTPUT_S = 30.0  # longest wait for the output of a job
_UNLISTED_S = 60.0  # until a new job that is not listed is taken for lost: some sites keep answers of squeue
_VANISHED = "vanished: the scheduler does not know it any more"
_Answer = TypeVar("_Answer")


class FollowedJob:
    """A submitted job. Only `FollowedJobs` makes and changes it."""

    def __init__(self, id: str, drop: Callable[[str], None]) -> None:
        self.id = id
        self.state = JobState("waiting")
        self.is_listed = False  # the scheduler has listed it
        self.since_s = asyncio.get_running_loop().time()
        self._drop = drop
        self._changed = asyncio.Event()

    async def started(self) -> None:
        """Return when the job runs or has ended."""
        while self.state.phase == "waiting":
            await self._next_change()

    async def ended(self) -> JobState:
        """Return how the job ended, when it has."""
        while not self.state.has_ended:
            await self._next_change()
        return self.state

    def cancel(self) -> None:
        """Cancel the job unless it has ended, without waiting for its end."""
        if not self.state.has_ended:
            self._drop(self.id)

    def note(self, state: JobState) -> None:
        """Record what the scheduler says."""
        self.state = state
        self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class FollowedJobs:
    """The jobs of one agent. It is used on one event loop only.

    Args:
        queue: the jobs of an owner; no other process uses that owner at the same time.
        poll_s: seconds between two queries.
    """

    def __init__(self, queue: JobQueue, *, poll_s: float) -> None:
        self._queue = queue
        self._poll_s = poll_s
        self._threads = ThreadPoolExecutor(_COMMANDS, thread_name_prefix="jobs")
        self._readers = ThreadPoolExecutor(_COMMANDS, thread_name_prefix="jobs-output")
        self._jobs: dict[str, FollowedJob] = {}
        self._unwanted: set[str] = set()
        self._submitting: set[asyncio.Task[FollowedJob]] = set()
        self._dropped: set[str] = set()  # whose cancellation is accepted, but which may still be listed
        # Listed jobs that are not followed, with the submissions of which one may still name it.
        self._unknown: dict[str, set[asyncio.Task[FollowedJob]]] = {}
        # Names of jobs that the scheduler may have taken although their submission has not ended, or failed.
        self._unanswered: set[str] = set()
        # The time until which the jobs of failed submissions may still appear in the list of all jobs.
        self._look_until_s = -math.inf
        # Submissions that hang, or wait in sbatch itself, must not delay queries and cancellations.
        self._submissions = asyncio.Semaphore(_COMMANDS - 1)
        self._beginning = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # there is another job to follow or to cancel
        self._cancel_at_s = -math.inf  # the time of the next attempt to cancel unwanted jobs
        self._said: dict[str, str] = {}  # subject → the last warning about it
        self._is_closing = False

    async def submit(self, new: NewJob) -> FollowedJob:
        """Submit a job. If this is cancelled, so is the job. Raises what `JobQueue.submit` raises."""
        await self._begin()
        unwanted = threading.Event()
        submitting = asyncio.create_task(self._submit(new, unwanted), name=new.name)
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            unwanted.set()
            submitting.add_done_callback(_cancel_submitted)
            raise

    async def _submit(self, new: NewJob, unwanted: threading.Event) -> FollowedJob:
        """Submit a job, unless it is unwanted before a thread is free for that."""

        def submit() -> str:
            if unwanted.is_set() or self._is_closing:
                raise SchedulerError("the job is not wanted any more")
            self._unanswered.add(new.name)
            return self._queue.submit(new)

        async with self._submissions:
            try:
                id = await self._call(submit)
            except SchedulerError as error:
                if new.name in self._unanswered:
                    self._look_until_s = asyncio.get_running_loop().time() + _UNLISTED_S
                    self._changed.set()
                if isinstance(error, QueueFull):  # a job that was taken nevertheless is found, or cannot run
                    self._unanswered.discard(new.name)
                raise
        self._unanswered.discard(new.name)
        if id in self._jobs:  # a scheduler that was set up again counts from the start
            self._jobs[id].note(JobState("lost", _VANISHED))
        self._unwanted.discard(id)
        job = self._jobs[id] = FollowedJob(id, self._cancel)
        self._changed.set()
        return job

    async def output(self, job: FollowedJob, new: NewJob) -> str:
        """Return the end of the output of an ended job; "", with a warning, if it cannot be read in time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_OUTPUT_S):
                return await loop.run_in_executor(self._readers, self._queue.output, job.id, new.log)
        except TimeoutError:
            logger.warning("the output of job %s was not read within %g s", job.id, _OUTPUT_S)
        except SchedulerError as error:
            logger.warning("%s", error)
        return ""

    async def close(self) -> None:
        """Cancel every job, and wait until the scheduler has accepted that, for at most CLOSE_S.

        If a command hangs for half of that time, all running commands are ended, and the cancellations that
        are left are tried once more. Jobs that may be in the queue after that are logged.
        """
        self._is_closing = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        for job in list(self._jobs.values()):
            job.cancel()
        cut_off: set[str] = set()
        for _ in range(2):
            try:
                async with asyncio.timeout(CLOSE_S / 2):
                    await self._cancel_all()
                    break
            except TimeoutError:
                cut_off |= self._names_of_submissions()
                self._queue.commands.interrupt()
        self._queue.commands.close()
        for threads in (self._threads, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._unwanted:
            logger.error(
                "the scheduler did not cancel these jobs within %g s, and they may run on: %s",
                CLOSE_S,
                ", ".join(sorted(self._unwanted)),
            )
        if unknown := cut_off | self._unanswered:
            logger.error(
                "the scheduler did not answer whether it takes these jobs, and they may run: %s",
                ", ".join(sorted(unknown)),
            )

    async def _cancel_all(self) -> None:
        """Return when the scheduler has accepted the cancellation of every job."""
        while self._submitting:
            await asyncio.wait(set(self._submitting))
        await self._cancel_until_accepted()
        if self._unanswered or self._unknown or self._is_looking:
            await self._look_for_unknown()
        await self._cancel_until_accepted()

    async def _cancel_until_accepted(self) -> None:
        while self._unwanted:
            if not await self._cancel_unwanted():
                await asyncio.sleep(min(_FIRST_PAUSE_S, self._poll_s))

    async def _begin(self) -> None:
        """Begin to follow jobs, first of all those that an earlier process has left."""
        async with self._beginning:
            if self._following is None:
                found = await self._call(self._queue.states)
                left = {id for id, state in found.items() if not state.has_ended}
                if left:
                    logger.warning("jobs of an earlier process are cancelled: %s", ", ".join(sorted(left)))
                self._unwanted |= left
                self._following = asyncio.create_task(self._follow(), name="follows jobs")
                self._following.add_done_callback(self._lose_all)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        next_look, pause_s = loop.time(), _FIRST_PAUSE_S
        while True:
            self._changed.clear()
            if self._unwanted and loop.time() >= self._cancel_at_s:
                self._cancel_at_s = math.inf
                accepted = await self._cancel_unwanted()
                if self._cancel_at_s == math.inf:  # else there is another job to cancel, at once
                    self._cancel_at_s = -math.inf if accepted else loop.time() + pause_s
                pause_s = _FIRST_PAUSE_S if accepted else min(2 * pause_s, _LAST_PAUSE_S)
            if self._must_look and loop.time() >= next_look:
                await self._look()
                next_look = loop.time() + self._poll_s
            due = [next_look] if self._must_look else []
            due += [self._cancel_at_s] if self._unwanted else []
            try:
                async with asyncio.timeout_at(min(due, default=None)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    @property
    def _must_look(self) -> bool:
        """Whether jobs are followed, or some may be left that no submission names."""
        return bool(self._jobs or self._unknown) or self._is_looking

    @property
    def _is_looking(self) -> bool:
        """Whether a submission has failed so recently that its job may not be listed yet."""
        return asyncio.get_running_loop().time() < self._look_until_s

    def _names_of_submissions(self) -> set[str]:
        return {task.get_name() for task in self._submitting}

    async def _look(self) -> None:
        """Ask for the states of all jobs, once."""
        asked = set(self._jobs)  # jobs that are submitted meanwhile may be missing in the answer
        is_last, ended = not self._is_looking, self._unanswered - self._names_of_submissions()
        try:
            states = await self._call(self._queue.states)
        except SchedulerError as error:  # the controller may be restarting; jobs go on meanwhile
            self._say("states", f"the states of jobs are not known: {error}")
            return
        self._said.pop("states", None)
        if is_last:
            self._unanswered -= ended
        for id in asked & self._jobs.keys():
            job = self._jobs[id]
            state = _next_state(job, states.get(id))
            job.is_listed = job.is_listed or id in states
            job.note(state)
            if job.state.has_ended:
                del self._jobs[id]
                # Its episode is repeated, so it must not run on, also if the answer is wrong.
                if id not in states or not states[id].has_ended:
                    self._unwanted.add(id)
        self._cancel_unknown(states)

    def _cancel_unknown(self, states: Mapping[str, JobState]) -> None:
        """Cancel listed jobs that no submission can name any more, as when sbatch did not end in time."""
        self._dropped &= states.keys()
        found = {
            id
            for id, state in states.items()
            if not state.has_ended and id not in self._jobs and id not in self._unwanted | self._dropped
        }
        self._unknown = {id: self._unknown.get(id, set(self._submitting)) for id in found}
        if left := {id for id in found if all(one.done() for one in self._unknown[id])}:
            logger.warning("jobs whose submission failed are cancelled: %s", ", ".join(sorted(left)))
            self._unwanted |= left

    async def _look_for_unknown(self) -> None:
        """Cancel the unknown jobs, when nothing is submitted any more."""
        try:
            states = await self._call(self._queue.states)
        except SchedulerError as error:
            self._say("unknown jobs", f"whether jobs whose submission failed run is not known: {error}")
        else:
            self._unanswered.clear()
            self._cancel_unknown(states)

    async def _cancel_unwanted(self) -> bool:
        """Cancel jobs once, and return whether the scheduler has accepted all cancellations.

        There are several commands, so that each of them ends in time and none waits for all.
        """
        ids = sorted(self._unwanted)
        parts = [ids[at : at + _CANCELLED_BY_ONE] for at in range(0, len(ids), _CANCELLED_BY_ONE)]
        return all(await asyncio.gather(*map(self._cancel_part, parts)))

    async def _cancel_part(self, ids: Sequence[str]) -> bool:
        """Cancel a few jobs, and return whether the scheduler has accepted that."""
        try:
            await self._call(self._queue.cancel, ids)
        except SchedulerError as error:  # they are cancelled again after a pause
            self._say("cancellations", f"jobs are not cancelled yet: {error}")
            return False
        self._said.pop("cancellations", None)
        self._unwanted.difference_update(ids)
        self._dropped.update(ids)
        return True

    def _cancel(self, id: str) -> None:
        self._jobs.pop(id, None)
        self._unwanted.add(id)
        self._cancel_at_s = -math.inf
        self._changed.set()

    def _lose_all(self, following: asyncio.Task[None]) -> None:
        """If following has failed by a defect of this program, end the waits of episodes for their jobs."""
        if following.cancelled() or (error := following.exception()) is None:
            return
        logger.error("jobs are not followed any more", exc_info=error)
        self._following = None
        for job in list(self._jobs.values()):
            self._cancel(job.id)
            job.note(JobState("lost", f"is not followed any more: {error!r}"))

    def _say(self, subject: str, text: str) -> None:
        """Log a warning, unless it is the last one about this subject again."""
        if text != self._said.get(subject):
            logger.warning("%s", text)
            self._said[subject] = text

    async def _call(self, function: Callable[..., _Answer], *arguments: object) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _next_state(job: FollowedJob, listed: JobState | None) -> JobState:
    """Return the state of a job that its scheduler has listed in this state, or has not listed."""
    if listed is None:
        if not job.is_listed and asyncio.get_running_loop().time() - job.since_s < _UNLISTED_S:
            return job.state
        has_only_waited = job.is_listed and job.state.phase == "waiting"
        return JobState("unstarted" if has_only_waited else "lost", _VANISHED)
    if job.state.phase == "running" and listed.phase == "waiting":
        return JobState("lost", "waits again after it had begun")  # it would play its episode a second time
    return listed


def _cancel_submitted(submitting: asyncio.Task[FollowedJob]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
