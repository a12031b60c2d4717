"""Resources servers of NeMo Gym: `nemo-gym:http://host:8000?rows=train.jsonl`.

A row has what a call of the Responses API begins with, under `responses_create_params`, and what the server
wants to know to grade it. An episode is a session of the server, which a cookie names: `/seed_session` gets
the row, the model's calls of the row's tools go to one route each, until it answers without a call, and
`/verify` gets the row with everything that the model wrote, and gives the reward. The package itself is not
needed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from areal_agents.core.reward_values import checked_reward
from areal_agents.direct_http import direct_async_client
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.listed_tasks import ListedTasks
from areal_agents.environments.players import Model
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.user_functions import describe

LONGEST_ANSWER = 16 << 20  # bytes


def open(line: EnvironmentLine) -> NemoGym:
    """Open a server. Raises TaskEnvironmentError if the name is no URL or the rows cannot be read."""
    return NemoGym(line)


class NemoGym:
    """A resources server of NeMo Gym."""

    def __init__(self, line: EnvironmentLine) -> None:
        if not line.name.startswith(("http://", "https://")):
            raise TaskEnvironmentError(f"{line.text!r}: name the URL of a running resources server")
        self._own, _ = SCHEMES["nemo-gym"].take(line)
        self._line = line
        self._model = Model()
        rows = _rows_of(line, Path(self._own["rows"])) if self._own["rows"] else None
        self._tasks = ListedTasks(line, self._own, rows) if rows is not None else None

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the rows of a split."""
        if self._tasks is None:
            raise TaskEnvironmentError(
                f"{self._line.text!r}: a server has no rows; name a JSONL file, rows=, or data.path"
            )
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play a session, and return the reward that the server gives."""
        parameters = task.get("responses_create_params")
        if not isinstance(parameters, Mapping) or "input" not in parameters:
            raise TaskEnvironmentError(
                f"the task {task.get('id', '')} has no responses_create_params with an input"
            )
        limit_s = self._own["step_timeout_s"]
        async with direct_async_client(timeout_s=limit_s, base_url=self._line.name.rstrip("/")) as http:
            server = _Server(http, self._line.text, limit_s)
            await server.asked("/seed_session", task)
            response = await self._played(ep, parameters, server)
            verdict = await server.asked("/verify", {**task, "response": response})
        if "reward" not in verdict:
            raise TaskEnvironmentError(f"{self._line.text!r}: /verify gave no reward")
        try:
            return checked_reward(verdict["reward"])  # type: ignore[return-value]
        except AgentError as error:
            raise TaskEnvironmentError(f"{self._line.text!r}: /verify: {error}") from error

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()

    async def _played(self, ep: Episode, parameters: Mapping[str, Any], server: _Server) -> dict[str, Any]:
        """Let the model call tools until it answers; return its last response, with the output of all."""
        given = parameters["input"]
        opening = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        tools = {tool["name"] for tool in parameters.get("tools") or () if tool.get("type") == "function"}
        output: list[dict[str, Any]] = []
        for _ in range(self._own["max_turns"]):
            response = await self._model.respond(ep, {**parameters, "input": opening + output})
            output += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for call in calls:
                result = await server.tool(call, tools)
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
            if not calls or response.get("incomplete_details"):
                break
        return {**response, "output": output}


class _Server:
    """One session of the server."""

    def __init__(self, http: httpx.AsyncClient, name: str, limit_s: float) -> None:
        self._http, self._name, self._limit_s = http, name, limit_s

    async def asked(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of a route. Raises TaskEnvironmentError if it is no JSON object of status 200."""
        status, text = await self._post(path, body)
        if status != 200:
            raise TaskEnvironmentError(f"{self._name!r}: {path} answered with status {status}: {text[:500]}")
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise TaskEnvironmentError(f"{self._name!r}: {path} gave no JSON: {text[:500]}") from error
        if not isinstance(answer, dict):
            raise TaskEnvironmentError(f"{self._name!r}: {path} must give an object, got {text[:500]}")
        return answer

    async def tool(self, call: Mapping[str, Any], tools: set[str]) -> str:
        """Return what the model reads of a call: what the tool answers, whatever the status."""
        if call["name"] not in tools:
            return json.dumps({"error": f"there is no tool {call['name']!r}"})
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError as error:
            return json.dumps({"error": f"the arguments are not valid JSON: {error}"})
        return (await self._post(f"/{call['name']}", arguments))[1]

    async def _post(self, path: str, body: Any) -> tuple[int, str]:
        read = bytearray()
        try:
            async with asyncio.timeout(self._limit_s), self._http.stream("POST", path, json=body) as answer:
                async for piece in answer.aiter_bytes():
                    read += piece
                    if len(read) > LONGEST_ANSWER:
                        raise TaskEnvironmentError(
                            f"{self._name!r}: the answer of {path} is longer than {LONGEST_ANSWER} bytes"
                        )
                return answer.status_code, read.decode(errors="replace")
        except TimeoutError as error:
            raise TaskEnvironmentError(
                f"{self._name!r}: no answer of {path} within {self._limit_s:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise TaskEnvironmentError(f"{self._name!r}: {path}: {describe(error)}") from error


def _rows_of(line: EnvironmentLine, file: Path) -> list[dict[str, Any]]:
    """Read rows; the id of one without an id is its line, from 1. Raises TaskEnvironmentError."""
    rows = []
    try:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if text.strip():
                rows.append({"id": str(number), **json.loads(text)})
    except (OSError, ValueError, TypeError) as error:
        raise TaskEnvironmentError(
            f"{line.text!r}: cannot read the rows in {file}: {describe(error)}"
        ) from error
    return rows
