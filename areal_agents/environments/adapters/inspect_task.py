"""Tasks of Inspect AI: `inspect:my_tasks.py:my_task?score=accuracy`, or `inspect:inspect_evals/gsm8k`.

The samples of the task's data set are the tasks. An episode runs one sample as Inspect does: its sandbox, its
setup, the task's solver, which may have tools and sub-agents, and its scorers, whose score is the reward.
Every call of the solver's model goes to the episode, whichever of its tasks makes it. Further options are
arguments of the task.

Inspect allows one evaluation at a time in a process, so all episodes are samples of one evaluation: it begins
with the first episode, on a thread with an event loop of its own, and takes a sample from a `SampleSource`
for each further one. A scorer that asks the model under training for its judgement would be trained on it,
and is refused: `grader` names another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import anyio
import inspect_ai
from inspect_ai import eval_async, task_with
from inspect_ai.model import ModelAPI, get_model, modelapi
from inspect_ai.scorer import value_to_float
from inspect_ai.solver import chain, solver

from areal_agents.direct_http import direct_openai_transport
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.listed_tasks import ListedTasks
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError
from areal_agents.user_functions import describe, load_function, names_a_function

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 20.0  # longest wait for an evaluation to end

_PROVIDER = "areal-agents"
_WORDS = ("C", "I", "P", "N")  # scores: correct, incorrect, partially correct, no answer
_AT_ONCE = 100_000  # samples and calls: how many episodes play is not Inspect's to decide


def open(line: EnvironmentLine) -> InspectTask:
    """Open a task. Raises TaskEnvironmentError if there is none, or it cannot be played."""
    return InspectTask(line)


class InspectTask:
    """A task of Inspect AI."""

    def __init__(self, line: EnvironmentLine) -> None:
        if not hasattr(inspect_ai, "SampleSource"):
            raise TaskEnvironmentError(
                f"{line.text!r} needs a version of inspect-ai with SampleSource: pip install -U inspect-ai"
            )
        self._line = line
        self._own, self._arguments = SCHEMES["inspect"].take(line)
        samples = list(self._task().dataset)
        self._samples = {
            _name(sample, number): sample.model_copy(update={"id": _name(sample, number)})
            for number, sample in enumerate(samples, 1)
        }
        rows = [_row(sample, _name(sample, number)) for number, sample in enumerate(samples, 1)]
        self._tasks = ListedTasks(line, self._own, rows)
        self._evaluation: _Evaluation | None = None

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the samples of a split."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Run a sample, and return its score."""
        sample = self._samples.get(str(task["id"]))
        if sample is None:
            raise TaskEnvironmentError(f"{self._line.text!r} has no sample {task['id']!r} any more")
        if self._evaluation is None or self._evaluation.has_ended:
            self._evaluation = _Evaluation(self._line, self._task(), self._own)
        played = await self._evaluation.run(sample, ep)
        if played.error is not None:
            raise TaskEnvironmentError(f"sample {sample.id}: {played.error.message}")
        return self._reward(played.scores or {})

    async def close(self) -> None:
        """End the evaluation."""
        if self._evaluation is not None:
            await self._evaluation.end()

    def _task(self) -> Any:
        """Make the task. Raises TaskEnvironmentError."""
        name = self._line.name
        try:
            if names_a_function(name):
                task = load_function(name, TaskEnvironmentError)(**self._arguments)
            else:
                from inspect_ai._eval.loader import load_tasks  # the only way to a registered task

                found = load_tasks([name], self._arguments)
                if len(found) != 1:
                    raise TaskEnvironmentError(f"{self._line.text!r} names {len(found)} tasks, and not one")
                task = found[0]
        except TaskEnvironmentError:
            raise
        except Exception as error:  # the task's own code, or Inspect's many errors for a name
            raise TaskEnvironmentError(f"{self._line.text!r}: {describe(error)}") from error
        if not isinstance(task, inspect_ai.Task):
            raise TaskEnvironmentError(f"{name} must return a Task of Inspect, got {type(task).__name__}")
        if not task.scorer:
            raise TaskEnvironmentError(f"{self._line.text!r} has no scorer, and so no reward")
        if task.model is not None:
            raise TaskEnvironmentError(
                f"{self._line.text!r} names a model of its own; leave out model= of its Task"
            )
        return task

    def _reward(self, scores: Mapping[str, Any]) -> float:
        """Return the score that is the reward. Raises TaskEnvironmentError if there is no such number."""
        values: dict[str, Any] = {}
        for name, score in scores.items():
            if isinstance(score.value, Mapping):
                values |= {f"{name}.{key}": value for key, value in score.value.items()}
            else:
                values[name] = score.value
        wanted = self._own["score"] or (next(iter(values)) if len(values) == 1 else "")
        if wanted not in values:
            raise TaskEnvironmentError(
                f"{self._line.text!r} has the scores {', '.join(values) or 'none'}"
                + (f", not {wanted}" if wanted else "; name one: score=")
            )
        value = values[wanted]
        if value not in _WORDS if isinstance(value, str) else not isinstance(value, bool | int | float):
            raise TaskEnvironmentError(f"{self._line.text!r}: the score {wanted} is no number: {value!r}")
        return float(value_to_float()(value))


def _name(sample: Any, number: int) -> str:
    return str(number) if sample.id is None else str(sample.id)


def _row(sample: Any, name: str) -> dict[str, Any]:
    """Return what a run records of a sample."""
    if isinstance(sample.input, str):
        return {"id": name, "input": sample.input, "target": sample.target}
    messages = [{"role": message.role, "content": message.text} for message in sample.input]
    return {"id": name, "input": messages, "target": sample.target}


class _Sample:
    """A sample that is run for an episode; on the thread of the evaluation."""

    def __init__(self, ep: Episode) -> None:
        self.ep = ep
        self.model = get_model(
            f"openai-api/{_PROVIDER}/policy",
            base_url=ep.base_url,
            api_key=ep.api_key,
            http_client=direct_openai_transport(),
            memoize=False,
        )
        self.done: Future[Any] = Future()
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False

    async def solve(self, solve: Any, state: Any, generate: Any) -> Any:
        """Run the solver so that it can be cancelled. Raises TaskEnvironmentError if it is."""
        with anyio.CancelScope() as self._scope:
            if self._is_cancelled:
                self._scope.cancel()
            return await solve(state, generate)
        raise TaskEnvironmentError("the episode was cancelled")

    def cancel(self) -> None:
        """Cancel the solver, also one that has not begun."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()


_current: contextvars.ContextVar[_Sample] = contextvars.ContextVar("areal_agents_inspect_sample")


class _EpisodeModel(ModelAPI):
    """The model of the evaluation: sends each call to the episode whose solver makes it."""

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
        """Generate through the episode's own client."""
        sample = _current.get(None)
        if sample is None:  # not within a solver
            raise TaskEnvironmentError(
                "the scorer asks the model under training; name another: grader=openai/gpt-5-mini, or give "
                "the scorer a model"
            )
        return await sample.model.api.generate(input, tools, tool_choice, config)

    def max_connections(self) -> int:
        """Return how many calls may run at once."""
        return _AT_ONCE

    def connection_key(self) -> str:
        """Return the name under which Inspect counts calls that run."""
        return _PROVIDER

    def should_retry(self, ex: BaseException) -> Any:
        """Leave the decision to the client that made the call."""
        sample = _current.get(None)
        return sample is not None and sample.model.api.should_retry(ex)


modelapi(name=_PROVIDER)(_EpisodeModel)


class _Evaluation(inspect_ai.SampleSource):
    """The evaluation whose samples are episodes, on a thread of its own."""

    def __init__(self, line: EnvironmentLine, task: Any, options: Mapping[str, Any]) -> None:
        self._line, self._options = line, options
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._submitted: set[Future[_Sample]] = set()  # waiting for the thread
        self._epochs: dict[str, int] = {}
        self._context: contextvars.Context | None = None
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[None] = Future()
        self._is_closing = False
        self._task = task_with(
            task, dataset=self, setup=None, solver=_of_episode(self, task), epochs=1, early_stopping=None
        )
        self._thread = threading.Thread(target=self._work, name=f"evaluation of {line.text}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more samples."""
        return not self._thread.is_alive()

    async def run(self, sample: Any, ep: Episode) -> Any:
        """Run a sample, and return what Inspect logged of it."""
        await asyncio.wrap_future(self._ready)
        assert self._loop is not None
        submitted: Future[_Sample] = Future()
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        try:
            self._loop.call_soon_threadsafe(self._submit, sample, ep, submitted)
        except RuntimeError as error:  # its loop is closed
            raise TaskEnvironmentError(f"{self._line.text!r} is closed") from error
        try:
            running = await asyncio.wrap_future(submitted)
            return await asyncio.wrap_future(running.done)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._cancel)
            raise

    async def end(self) -> None:
        """End the evaluation and what it runs."""
        if self._loop is not None and not self.has_ended:
            self._loop.call_soon_threadsafe(self._close)
        await asyncio.to_thread(self._thread.join, END_TIMEOUT_S)
        if not self.has_ended:
            logger.error("the evaluation of %s did not end within %g s", self._line.text, END_TIMEOUT_S)

    def _cancel(self, submitted: Future[_Sample]) -> None:
        """Cancel a sample whose episode was cancelled, as soon as it is known."""
        if not submitted.cancelled() and submitted.exception() is None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the sample has ended with it
                self._loop.call_soon_threadsafe(submitted.result().cancel)

    # The rest runs on the thread.

    def of(self, state: Any) -> _Sample:
        """Return what runs a sample."""
        return self._samples[str(state.sample_id), state.epoch]

    async def next_samples(self) -> list[Any] | None:
        """Wait for a sample to be submitted, which Inspect then finds among the enqueued ones."""
        if self._wake is None:
            self._wake, self._loop = asyncio.Event(), asyncio.get_running_loop()
            self._context = contextvars.copy_context()
            self._ready.set_result(None)
        if self._is_closing:
            return None
        await self._wake.wait()
        self._wake.clear()
        return None if self._is_closing else []

    async def sample_complete(self, sample: Any) -> None:
        """Give an episode its result."""
        running = self._samples.pop((str(sample.id), sample.epoch))
        if not running.done.done():
            running.done.set_result(sample)
        await running.model.api.aclose()

    def _submit(self, sample: Any, ep: Episode, submitted: Future[_Sample]) -> None:
        if not submitted.set_running_or_notify_cancel():
            return  # the episode was cancelled
        if self._is_closing or self._context is None or self._wake is None:
            submitted.set_exception(TaskEnvironmentError(f"{self._line.text!r} is closed"))
            return
        epoch = self._epochs[sample.id] = self._epochs.get(sample.id, 0) + 1
        running = self._samples[sample.id, epoch] = _Sample(ep)
        self._context.run(inspect_ai.enqueue_sample, sample, epoch=epoch)
        self._wake.set()
        submitted.set_result(running)

    def _close(self) -> None:
        self._is_closing = True
        for running in self._samples.values():
            running.cancel()
        if self._wake is not None:
            self._wake.set()

    def _work(self) -> None:
        from inspect_ai.util._display import init_display_type  # eval_async has no argument for it

        init_display_type("none")
        fault = "ended"
        try:
            with tempfile.TemporaryDirectory(prefix="areal-agents-inspect-") as logs:
                done = asyncio.run(self._evaluate(logs))
            if done[0].error is not None:
                fault = done[0].error.message
        except BaseException as error:
            fault = describe(error)
        ended = TaskEnvironmentError(f"the evaluation of {self._line.text!r} failed: {fault}")
        if not self._ready.done():
            self._ready.set_exception(ended)
        for submitted in list(self._submitted):
            if not submitted.done():
                submitted.set_exception(ended)
        for running in self._samples.values():
            if not running.done.done():
                running.done.set_exception(ended)

    async def _evaluate(self, logs: str) -> Any:
        grader, sandbox = self._options["grader"], self._options["sandbox"]
        return await eval_async(
            self._task,
            model=get_model(f"{_PROVIDER}/policy", memoize=False),
            model_roles={"grader": grader} if grader else None,
            sandbox=sandbox or None,
            fail_on_error=False,
            max_samples=_AT_ONCE,
            max_connections=_AT_ONCE,
            log_dir=logs,
            log_samples=False,
            log_realtime=False,
            score_display=False,
            ctl_server=False,
        )


def _of_episode(evaluation: _Evaluation, task: Any) -> Any:
    """Return a solver that runs a task's setup and solver with the model of the sample's episode."""
    whole = chain(*(part for part in (task.setup, task.solver) if part is not None))

    @solver(name="areal_agents_episode")
    def of_episode() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            running = evaluation.of(state)
            token = _current.set(running)
            try:
                return await running.solve(whole, state, generate)
            finally:
                _current.reset(token)

        return solve

    return of_episode()
