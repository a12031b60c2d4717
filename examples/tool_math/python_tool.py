"""The tool `python`: runs a program in a sandbox and says how it ended.

A program has no network and sees no file but the programs of the machine and its own folder, which lasts for
the episode. Whatever it does, the result is a message of bounded length after a bounded time.
"""

from __future__ import annotations

from typing import Any

from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.sandbox import Finished, Limits, Sandbox, SandboxSpec

TIME_S = 5.0  # wall-clock time of one program
OUTPUT_BYTES = 1000  # the model is shown the end of a longer output
PRINTED_NOTHING = "It printed nothing."
LIMITS = Limits(memory_mb=512, processes=32, cpus=1, disk_mb=16)

PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}

_SANDBOXES = IsolationOnFirstUse("bubblewrap")


class PythonTool:
    """The programs of one episode. The sandbox is started for the first of them."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None

    async def run(self, code: object) -> str:
        """Run a program, and return what the model is told. Raises SandboxError if no sandbox starts."""
        if not isinstance(code, str):
            return "Error: python needs code, a string."
        if self._sandbox is None:
            self._sandbox = await _SANDBOXES.start(SandboxSpec(limits=LIMITS))
        # The program comes by standard input, because an argument has a greatest length.
        program = code.encode(errors="replace")
        return told(
            await self._sandbox.run(
                ["python3", "-"], timeout_s=TIME_S, stdin=program, kept_bytes=OUTPUT_BYTES
            )
        )

    async def end(self) -> None:
        """End the sandbox, with everything that its programs left."""
        if self._sandbox is not None:
            await self._sandbox.end()


def told(finished: Finished) -> str:
    """What the model is told of a program that has ended."""
    parts = [finished.stdout.text(), finished.stderr.text()]
    if finished.timed_out:
        parts.append(f"Error: stopped after {TIME_S:g} seconds.")
    elif finished.out_of_memory:
        parts.append(f"Error: it needs more than {LIMITS.memory_mb} MiB of memory.")
    elif finished.status != 0:
        parts.append(f"Error: exit status {finished.status}.")
    return "\n".join(part.strip() for part in parts if part.strip()) or PRINTED_NOTHING
