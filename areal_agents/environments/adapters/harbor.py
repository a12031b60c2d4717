"""Task folders of Harbor: `harbor:path/to/tasks?held_out=10`.

The built-in agent reads the instruction and works in a sandbox, with a tool that runs commands and two for
files. Then `tests/test.sh` runs on the same files, out of the agent's reach, and writes the reward to
/logs/verifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_agents.environments.adapters.harbor_folder import HarborTask, task_folders
from areal_agents.environments.adapters.harbor_sandboxes import task_sandboxes
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.listed_tasks import ListedTasks
from areal_agents.environments.players import Model, Tool, play_with_tools
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import SandboxError, TaskEnvironmentError
from areal_agents.sandbox.grading import grade
from areal_agents.sandbox.sandbox import Finished, Sandbox

logger = logging.getLogger(__name__)

SHOWN_OUTPUT = 8_192  # last bytes of each output stream of a command that the model reads
LONGEST_FILE = 65_536  # bytes of a file that the model reads at once
_TEST = ("bash", "/tests/test.sh")


def open(line: EnvironmentLine) -> Harbor:
    """Open a folder. Raises TaskEnvironmentError if it has no tasks, or one that cannot be played."""
    return Harbor(line)


class Harbor:
    """Task folders of Harbor."""

    def __init__(self, line: EnvironmentLine) -> None:
        self._line = line
        self._own, _ = SCHEMES["harbor"].take(line)
        found = [HarborTask.read(folder.resolve()) for folder in task_folders(Path(line.name))]
        self._sandboxes = task_sandboxes(
            line,
            found,
            isolation=self._own["isolation"],
            network=self._own["network"],
            ignore_dockerfile=self._own["ignore_dockerfile"],
        )
        self._found = {task.id: task for task in found}
        rows = [{"id": task.id, "instruction": task.instruction} for task in found]
        self._tasks = ListedTasks(line, self._own, rows)
        self._model = Model()

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Let the model work on a task, then run its tests, and return their reward."""
        found = self._found.get(str(task["id"]))
        if found is None:
            raise TaskEnvironmentError(f"{self._line.text!r} has no task {task['id']!r} any more")
        try:
            sandbox = await self._sandboxes.start(found)
            try:
                await self._work(found, sandbox, ep)
                graded = await grade(
                    sandbox,
                    _TEST,
                    tests=found.folder / "tests",
                    timeout_s=found.verifier_timeout_s,
                    environment=found.verifier_environment,
                )
            finally:
                await sandbox.end()
        except SandboxError as error:
            raise TaskEnvironmentError(f"task {found.id}: {error}") from error
        return self._reward(found, graded.rewards)

    async def close(self) -> None:
        """End the sandboxes, and close the connections to the model."""
        await self._model.close()
        await self._sandboxes.close()

    async def _work(self, task: HarborTask, sandbox: Sandbox, ep: Episode) -> None:
        """Let the model work until it answers, or the time of the task's agent is over."""
        tools = _tools(sandbox, self._own["command_timeout_s"])
        try:
            async with asyncio.timeout(task.agent_timeout_s):
                await play_with_tools(
                    self._model,
                    ep,
                    [{"role": "user", "content": task.instruction}],
                    tools,
                    max_turns=self._own["max_turns"],
                )
        except TimeoutError:
            logger.info("the agent of task %s had no more time; what it left is graded", task.id)

    def _reward(self, task: HarborTask, rewards: Mapping[str, float]) -> float:
        wanted = self._own["score"] or ("reward" if len(rewards) != 1 else next(iter(rewards)))
        if wanted not in rewards:
            raise TaskEnvironmentError(
                f"the tests of task {task.id} gave the rewards {', '.join(rewards) or 'none'}; name one: "
                "score="
            )
        return rewards[wanted]


def _tools(sandbox: Sandbox, timeout_s: float) -> list[Tool]:
    """Return the tools with which the model works in a sandbox."""

    async def run(arguments: dict[str, Any]) -> str:
        command = _string(arguments, "command")
        return _shown(
            await sandbox.run(["bash", "-c", command], timeout_s=timeout_s, kept_bytes=SHOWN_OUTPUT),
            timeout_s,
        )

    async def read(arguments: dict[str, Any]) -> str:
        data = await sandbox.read(_string(arguments, "path"), most_bytes=LONGEST_FILE)
        return data.decode(errors="replace")

    async def write(arguments: dict[str, Any]) -> str:
        await sandbox.write(_string(arguments, "path"), _string(arguments, "content").encode())
        return "written"

    path = "a path, relative to the working folder or absolute"
    return [
        Tool(
            "bash",
            run,
            f"Run a command in {sandbox.workdir} and return its output. Each command is a shell of its own: "
            "files stay, variables and background processes do not.",
            _strings(command="the command"),
        ),
        Tool("read_file", read, "Return a file.", _strings(path=path)),
        Tool("write_file", write, "Write a file.", _strings(path=path, content="its new content")),
    ]


def _strings(**described: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(described)}


def _string(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    return value


def _shown(finished: Finished, timeout_s: float) -> str:
    """Return what the model reads of a command that has ended."""
    parts = [finished.stdout.text().rstrip(), finished.stderr.text().rstrip()]
    if finished.timed_out:
        parts.append(f"[killed after {timeout_s:g} s]")
    elif finished.out_of_memory:
        parts.append("[killed: out of memory]")
    elif finished.status:
        parts.append(f"[exit status {finished.status}]")
    return "\n".join(part for part in parts if part) or "(no output)"
