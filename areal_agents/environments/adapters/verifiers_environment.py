"""Environments of verifiers: `verifiers:my-taskset?difficulty=hard`, in the forms of 0.4 and of 0.3.

The name is that of an installed package, or of a file or a folder beside the configuration. A package with a
function `load_environment` has the older form and needs verifiers 0.3; any other has a `Taskset`. Its own
agent plays, which calls the episode's URL, and its own rewards count. Further options are settings of the
taskset, or arguments of `load_environment`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_agents.direct_http import direct_openai_client
from areal_agents.environments.environment import Environment, Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.listed_tasks import ListedTasks
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError
from areal_agents.user_functions import describe

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0  # longest wait for what serves an environment to end
EPISODES_OF_A_SERVING = 500  # it keeps an HTTP client for each
HELD_OUT_OF_ENDLESS = 128


def open(line: EnvironmentLine) -> Environment:
    """Open an environment. Raises TaskEnvironmentError if it cannot be loaded."""
    own, settings = SCHEMES["verifiers"].take(line)
    name = _importable(line.name)
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    try:
        is_older = importlib.util.find_spec(module) is not None and hasattr(
            importlib.import_module(module), "load_environment"
        )
        if is_older:
            return OlderEnvironment(line, own, settings, module)
        return TasksetEnvironment(line, own, settings, name)
    except TaskEnvironmentError:
        raise
    except Exception as error:  # the package's own code, or one of verifiers' many errors
        raise TaskEnvironmentError(f"{line.text!r}: {describe(error)}") from error


class TasksetEnvironment:
    """A `Taskset` and the `Env` that plays it (verifiers 0.4)."""

    def __init__(
        self, line: EnvironmentLine, own: Mapping[str, Any], settings: Mapping[str, Any], name: str
    ) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type

        self._line = line
        default = default_harness_id(name)
        # Without a harness of its own a taskset gets `bash`, which runs the model's commands on this machine.
        harness = own["harness"] or ("null" if default == "bash" else default)
        seat: dict[str, Any] = {"harness": {"id": harness}, "runtime": {"type": own["runtime"]}}
        if own["max_turns"] is not None:
            seat["max_turns"] = own["max_turns"]
        fields = env_config_type(name).model_fields.items()
        seats = [role for role, field in fields if isinstance(field.default, vf.AgentConfig)]
        self._config = vf.resolve_env_config(
            {"taskset": {**settings, "id": name}, **{role: dict(seat) for role in seats}}
        )
        self._vf = vf
        self._numbers = itertools.count()
        self._serving: _Serving | None = None
        self._endings: set[asyncio.Task[None]] = set()
        taskset = vf.load_environment(self._config).taskset
        options = dict(own)
        found = iter(taskset)
        if not taskset.bounded:
            if not own["size"] or not isinstance(own["held_out"] or 0, int):
                raise TaskEnvironmentError(
                    f"{line.text!r} has endless tasks; give their number, size=, and held_out as a number"
                )
            if own["held_out"] is None:
                options["held_out"] = HELD_OUT_OF_ENDLESS
            found = itertools.islice(found, own["size"] + options["held_out"])
        self._found = {_name(task.data): task for task in found}
        rows = [{"id": name, "prompt": task.data.prompt_text} for name, task in self._found.items()]
        self._tasks = ListedTasks(line, options, rows)

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play a task with its environment's agent, and return its reward."""
        found = self._found.get(str(task["id"]))
        if found is None:
            raise TaskEnvironmentError(f"{self._line.text!r} has no task {task['id']!r} any more")
        # A process that the agent starts inherits no variable with API_KEY in its name.
        variable = f"AREAL_AGENTS_API_KEY_{next(self._numbers)}"
        client = self._vf.EvalClientConfig(base_url=ep.base_url, api_key_var=variable)
        os.environ[variable] = ep.api_key
        serving = self._with_room()
        try:
            await asyncio.shield(serving.ready)
            played = await serving.environment.run_episode(found, self._vf.ModelContext("policy", client))
        finally:
            del os.environ[variable]
            serving.playing -= 1
            if serving is not self._serving and not serving.playing:
                self._end(serving)
        return self._reward(played)

    async def close(self) -> None:
        """End what is served."""
        if self._serving is not None:
            self._end(self._serving)
            self._serving = None
        if self._endings:
            await asyncio.wait(self._endings)

    def _reward(self, played: Any) -> float:
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok:
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it does not say why"
            raise TaskEnvironmentError(f"{self._line.text!r} failed: {said}")
        if len(played.traces) != 1:
            names = ", ".join(trace.agent.name for trace in played.traces)
            raise TaskEnvironmentError(
                f"{self._line.text!r} ran the agents {names}; an environment with one agent can be trained on"
            )
        if not played.traces[0].rewards:
            raise TaskEnvironmentError(f"{self._line.text!r} gave no reward")
        return float(played.traces[0].reward)

    def _with_room(self) -> _Serving:
        """Return what serves the next episode; a new one when the last one has had many, or has ended."""
        serving = self._serving
        if serving is None or serving.taken >= EPISODES_OF_A_SERVING or serving.has_ended:
            if serving is not None and not serving.playing:
                self._end(serving)
            serving = self._serving = _Serving(self._vf.load_environment(self._config), self._line.text)
        serving.taken += 1
        serving.playing += 1
        return serving

    def _end(self, serving: _Serving) -> None:
        ending = asyncio.create_task(serving.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


class _Serving:
    """An environment with its servers, held by one task from their start to their end."""

    def __init__(self, environment: Any, name: str) -> None:
        self.environment, self._name = environment, name
        self.taken = self.playing = 0  # episodes
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._serve(), name=f"environment {name}")

    @property
    def has_ended(self) -> bool:
        """Whether nothing is served any more."""
        return self._task.done()

    async def end(self) -> None:
        """End the servers."""
        self._ending.set()
        if not (await asyncio.wait({self._task}, timeout=END_TIMEOUT_S))[0]:
            logger.error("the servers of %s did not end within %g s", self._name, END_TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=END_TIMEOUT_S)

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self.ready.set_result(None)
                await self._ending.wait()
        except Exception as error:
            if self.ready.done():
                logger.exception("the servers of %s failed", self._name)
            else:
                self._not_ready(describe(error))
        finally:
            if not self.ready.done():
                self._not_ready("it was ended before it was ready")

    def _not_ready(self, reason: str) -> None:
        self.ready.set_exception(TaskEnvironmentError(f"{self._name!r}: {reason}"))
        self.ready.exception()  # retrieved, so that asyncio does not log it where no episode waits


class OlderEnvironment:
    """What `load_environment` of a package returns (verifiers 0.3)."""

    def __init__(
        self, line: EnvironmentLine, own: Mapping[str, Any], settings: Mapping[str, Any], module: str
    ) -> None:
        try:
            import verifiers as vf
            from verifiers.clients import OpenAIChatCompletionsClient

            load = vf.load_environment
        except (ImportError, AttributeError) as error:
            raise TaskEnvironmentError(
                f"{line.text!r} has load_environment(), which needs verifiers 0.3 ({error}): pip install "
                "'verifiers==0.3.*' into an environment of its own, and name its interpreter in "
                "environment.python"
            ) from error
        refused = [name for name in ("harness", "runtime") if name in line.options]
        if refused:
            raise TaskEnvironmentError(f"{line.text!r}: {', '.join(refused)} is for verifiers 0.4")
        self._line, self._client_type = line, OpenAIChatCompletionsClient
        if own["max_turns"] is not None:
            settings = {**settings, "max_turns": own["max_turns"]}
        self._environment = load(module, **settings)
        given = list(self._environment.get_dataset())
        self._found = {f"{row['example_id']}": row for row in given}
        options = dict(own)
        if own["held_out"] is None and self._environment.build_eval_dataset() is not None:
            held_out = {f"eval-{row['example_id']}": row for row in self._environment.get_eval_dataset()}
            self._found |= held_out
            options["held_out"] = list(held_out)
        rows = [{"id": name, "prompt": row["prompt"]} for name, row in self._found.items()]
        self._tasks = ListedTasks(line, options, rows)
        self._openai: Any = None

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the rows of a split."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play a row with the environment's own agent, and return its reward."""
        row = self._found.get(str(task["id"]))
        if row is None:
            raise TaskEnvironmentError(f"{self._line.text!r} has no task {task['id']!r} any more")
        if self._openai is None:
            self._openai = direct_openai_client()
        client = self._client_type(self._openai.with_options(base_url=ep.base_url, api_key=ep.api_key))
        played = await self._environment.run_rollout(row, client, "policy", {})
        if played.get("error"):
            raise TaskEnvironmentError(f"{self._line.text!r} failed: {played['error']}")
        return played["reward"]

    async def close(self) -> None:
        """Close the connections to the model, and what the environment holds."""
        if self._openai is not None:
            await self._openai.close()
            await self._environment._teardown()


def _importable(name: str) -> str:
    """Return the name of a package; for a file or a folder, after making it importable."""
    path = Path(name)
    if not path.exists() or (path.is_file() and path.suffix != ".py"):
        return name
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    return path.stem


def _name(data: Any) -> str:
    return data.id if data.id is not None else str(data.idx)
