"""Plays the tasks of an evaluation with the model of an endpoint, through a relay in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Split, Task
from areal_agents.direct_http import endpoint_client
from areal_agents.errors import ConfigError
from areal_agents.evaluation.endpoint.counting import TokenEstimates
from areal_agents.evaluation.endpoint.journal import JOURNAL, Journal
from areal_agents.evaluation.endpoint.relay import Relay
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import FailureStreak
from areal_agents.rollout.config import AgentSpec, EvalConfig, RewardConfig, RolloutConfig
from areal_agents.rollout.evaluation import AttemptPlayer
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.sockets import listen, url_of

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
ENDPOINT = "endpoint.json"  # the endpoint, without its key
_STOP_S = 30.0
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the clients close them


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's chat completions.

    Attributes:
        base_url: its URL, with /v1.
        model: the name of the model that it is asked for.
        key_variable: the environment variable that has its key; "": OPENAI_API_KEY if that is set.
    """

    base_url: str
    model: str
    key_variable: str = ""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint must be a URL, such as https://host/v1, got {self.base_url!r}")

    def key(self) -> str | None:
        """Return the key. Raises ConfigError if the variable that was named is not set."""
        value = os.environ.get(self.key_variable or DEFAULT_KEY_VARIABLE)
        if self.key_variable and not value:
            raise ConfigError(f"the environment has no {self.key_variable}, which --endpoint-key-env names")
        return value or None

    def as_dict(self) -> dict[str, str]:
        """Return the endpoint as JSON, without its key."""
        return asdict(self)


def journal_of(folder: Path) -> Journal:
    """Return the journal in the folder of an evaluation."""
    return Journal(folder / JOURNAL)


async def play(
    endpoint: Endpoint,
    folder: Path,
    tasks: Sequence[Task],
    *,
    model: Path,
    agent: AgentSpec,
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    reward: RewardConfig | None,
    seed: int,
    logs: Path,
    split: Split = "eval",
) -> None:
    """Play every attempt at the tasks that has no scored entry in the journal of the folder.

    Args:
        model: a model folder, with whose tokenizer tokens are estimated that the endpoint does not report.

    Raises:
        AgentError: the agent cannot be loaded, or too many attempts in a row failed.
        ConfigError: the endpoint refuses the calls, or the tokenizer is needed and cannot be read.
        RewardError: the reward function cannot be loaded.
    """
    journal = journal_of(folder)
    waiting = deque(
        (task, index)
        for index in range(evaluation.attempts)
        for task in tasks
        if (entry := journal.latest.get((task.id, index))) is None or entry.result.status == "failed"
    )
    function = RewardFunction(reward) if reward is not None else None
    workers = min(rollout.workers, evaluation.concurrency)
    loaded = load_agent(agent, workers=workers, logs=logs)
    admin_key = f"admin-{secrets.token_urlsafe(24)}"
    estimates = TokenEstimates(model)
    with _relaying(endpoint, journal, admin_key, estimates, connections=evaluation.concurrency) as (
        url,
        relay,
    ):
        client = AsyncClient(url, admin_key)

        def check() -> None:
            if relay.fault is not None:
                raise ConfigError(f"the endpoint {endpoint.base_url} {relay.fault}")

        try:
            player = AttemptPlayer(
                client=client,
                agent=loaded,
                metadata={"eval": "eval"},
                temperature=evaluation.temperature,
                seed=seed,
                limits=rollout.limits,
                retries=rollout.retries,
                patience=FailureStreak(rollout.give_up_after, least_s=rollout.give_up_s),
                agent_error_reward=rollout.reward_of_agent_errors,
                function=function,
                split=split,
                check=check,
            )
            await player.play(waiting, concurrency=evaluation.concurrency)
        finally:
            await loaded.close()
            await client.close()


@contextmanager
def _relaying(
    endpoint: Endpoint, journal: Journal, admin_key: str, estimates: TokenEstimates, *, connections: int
) -> Iterator[tuple[str, Relay]]:
    """Run a relay on a free port, in a thread with an event loop of its own: agents may block theirs."""
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    made: dict[str, Any] = {}

    async def serve() -> None:
        try:
            async with endpoint_client(endpoint.base_url, connections=2 * connections) as client:
                made["relay"] = relay = Relay(
                    base_url=endpoint.base_url,
                    model=endpoint.model,
                    key=endpoint.key(),
                    client=client,
                    admin_key=admin_key,
                    ended=journal.add,
                    estimates=estimates,
                )
                config = uvicorn.Config(
                    relay.app,
                    log_level="error",
                    access_log=False,
                    lifespan="off",
                    timeout_keep_alive=_KEEP_ALIVE_S,
                )
                made["server"] = uvicorn.Server(config)
                ready.set()
                await made["server"].serve(sockets=[listener])
        except Exception as error:  # for the thread that waits
            made["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="relay", daemon=True)
    thread.start()
    try:
        ready.wait()
        if "error" in made:
            raise made["error"]
        yield url_of(listener), made["relay"]
    finally:
        if "server" in made:
            made["server"].should_exit = True
        thread.join(_STOP_S)
        listener.close()
