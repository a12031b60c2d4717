"""The agents of the benchmark, which reproduce the lengths and latencies of a workload file in the real loop.

Every turn requests its sampled number of tokens (`max_tokens`; the model ends a reply on its own less than
once in a hundred thousand tokens) and every tool sleeps for its sampled time, so all runs of a workload do
the same work.
"""

from __future__ import annotations

from asyncio import sleep
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, ConfigError
from areal_agents.simulate.parameters import Distribution
from areal_agents.simulate.work import LogNormalWork

TASKS = 512
SYSTEM_PROMPT = "You are an assistant in a benchmark of asynchronous training. " + " ".join(
    f"Rule {number}: answer with what the tools returned, and never with what you remember."
    for number in range(1, 9)
)
TOOL = {
    "type": "function",
    "function": {"name": "tool", "parameters": {"type": "object", "properties": {}}},
}


class Workload(BaseModel):
    """Play one episode; see workloads/async.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(ge=0)
    turns: int = Field(ge=1)
    tokens: Distribution
    tool_s: Distribution

    def episode(self, task: int, index: int) -> tuple[list[int], list[float], float]:
        """Tokens by turn [turns], seconds by tool call [turns − 1], and the reward of one episode."""
        random = np.random.default_rng([self.seed, task, index])
        plan = LogNormalWork(self.tokens.log_normal(), self.turns, self.tool_s.log_normal()).sample(random)
        return [int(tokens) for tokens in plan.tokens], list(plan.between), float(random.random())


def workload_file() -> Path:
    """The workloads that come with the benchmark."""
    return Path(__file__).parent / "workloads" / "async.yaml"


def read_workload(path: Path, section: str) -> Workload:
    """Read a section of a workload file. Raise ConfigError if it is missing or malformed."""
    try:
        return Workload.model_validate(yaml.safe_load(path.read_text())[section])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot read the workload {section!r}: {error!r}") from None


def tasks() -> list[dict[str, Any]]:
    """The tasks of every workload; an episode needs only a number."""
    return [{"id": str(number), "number": number} for number in range(TASKS)]


class SyntheticAgent:
    """Plays the episodes of a workload: the n-th episode of a task is the n-th in the workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._played: Counter[int] = Counter()
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play one episode; its reward is also sampled."""
        number = int(task["number"])
        lengths, latencies, reward = self._workload.episode(number, self._played[number])
        self._played[number] += 1
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"Task {number}."},
        ]
        for turn, length in enumerate(lengths):
            if turn:
                await sleep(latencies[turn - 1])
                messages.append({"role": "tool", "content": f"Result {turn} of task {number}."})
            messages.append(await self._call(ep, messages, length))
        return reward

    async def _call(self, ep: Episode, messages: list[dict[str, Any]], length: int) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": length}
        headers = {"Authorization": f"Bearer {ep.api_key}"}
        async with self._http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise AgentError(f"the proxy answered {answer.status}: {(await answer.text())[:200]}")
            found = await answer.json()
        return dict(found["choices"][0]["message"])


agent = SyntheticAgent(read_workload(workload_file(), "workload"))
long_agent = SyntheticAgent(read_workload(workload_file(), "long_answers"))
