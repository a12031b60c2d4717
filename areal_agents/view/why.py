"""Why a token was trained as it was, computed by `areal-agents why` in a process of its own.

The computation repeats parts of the trainer's and needs its libraries, so it must neither slow down nor
enlarge a server that also records a run. One runs at a time, with lower priority and a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import orjson

from areal_agents.errors import RequestError

_LONGEST_S = 120.0
_LONGEST_ERROR = 600  # characters
_NICENESS = 10


class Explainer:
    """Runs the command; a request that is cancelled ends it."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def explain(
        self, run_dir: str, episode_id: str, turn: str | None = None, token: int | None = None
    ) -> dict[str, Any]:
        """Return the terms of an episode, of a turn (by its id or its number), or of one sampled token.

        Raises:
            RequestError: the command failed or took too long; the message says why.
        """
        about = [str(part) for part in (turn, token) if part is not None]
        arguments = ["why", "--json", "--", episode_id, *about, run_dir]
        async with self._one_at_a_time:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "areal_agents", *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            try:
                out, errors = await asyncio.wait_for(process.communicate(), _LONGEST_S)
            except TimeoutError:
                raise RequestError(
                    f"the explanation was not ready after {_LONGEST_S:.0f} s; try areal-agents why",
                    status=504,
                ) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise RequestError(f"areal-agents why failed: {lines[-1][:_LONGEST_ERROR]}", status=409)
        found: dict[str, Any] = orjson.loads(out)
        return found
