"""Runs one episode of a user's agent with a proxy of its own, and ends everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_agents.client import AsyncClient, OpenedEpisode
from areal_agents.core.rollout import Task
from areal_agents.direct_http import bypassing_proxies
from areal_agents.doctor.facts import facts_of
from areal_agents.doctor.findings import findings_of
from areal_agents.doctor.observed import Observed
from areal_agents.doctor.report import Report
from areal_agents.doctor.serving import ObservedProxy, scripted_engine, serving
from areal_agents.doctor.surroundings import (
    GIVEN_TO_COMMANDS,
    hosts_in_environment,
    hosts_in_sources,
    http_proxy_in_the_way,
    imports_of,
    sources_of,
    telemetry_of,
    text_of,
)
from areal_agents.doctor.tiny_model import write_tiny_model
from areal_agents.errors import ConfigError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.volatile import VolatileRule
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import Agent, load_agent
from areal_agents.rollout.agents.attempt import Attempt, Outcome, open_attempt, run_rollout
from areal_agents.rollout.agents.blocking import interrupted_if_blocked
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.agents.cli.definition import load_definition
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.sandboxed_command import SandboxedCommandAgent
from areal_agents.rollout.config import LimitsConfig, RewardConfig
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.sandbox.config import SandboxConfig
from areal_agents.sandbox.isolations import check_isolation
from areal_agents.store import Store

_CONTEXT_LENGTH = 262_144
_SCRIPTED = "scripted"


@dataclass(frozen=True, slots=True)
class _EndedEpisode:
    """The opened episode, and how the agent ended."""

    opened: OpenedEpisode
    outcome: Outcome


def examine(
    *,
    function: str | None = None,
    command: Sequence[str] = (),
    cli: CliAgentConfig | None = None,
    task: Mapping[str, Any] | None = None,
    reward: str | RewardConfig | None = None,
    model: Path | None = None,
    engine_url: str | None = None,
    volatile: Mapping[str, VolatileRule | Literal["off"]] | None = None,
    sandbox: SandboxConfig | None = None,
    timeout_s: float = 120.0,
) -> Report:
    """Run one episode of an agent and report on it. Exactly one of `function`, `command` and `cli` is given.

    Args:
        function: "module:function" or "file.py:function".
        command: the words of a command line.
        cli: a command-line agent, as the configuration key `agent` describes it.
        task: the task to give the agent.
        reward: a reward function apart from the agent, as the configuration key `reward` names it.
        model: a model folder, for its tokenizer and chat template; default: a small built-in model.
        engine_url: the URL of a running SGLang server; default: scripted answers.
        volatile: the rules of `proxy.volatile`, besides the known ones.
        sandbox: where the command runs; None: in the environment of this process.
        timeout_s: the time limit of the agent in seconds.

    Raises:
        ConfigError: not exactly one of function, command and cli is given, the model folder is missing, or an
            engine is given without a model folder.
        AgentError: the function cannot be imported, or cannot be called as (task, ep); or the program of a
            command-line agent is missing.
        RewardError: the reward function cannot be imported.
        RequestError: the engine does not answer.
        SandboxError: the isolation is not available here.
    """
    if sum((function is not None, bool(command), cli is not None)) != 1:
        raise ConfigError(
            "give exactly one of --agent module:function or -- followed by the agent's command; or only "
            "--config, whose agent is then examined"
        )
    if engine_url is not None and model is None:
        raise ConfigError("--engine-url needs --model, the folder of the model that the server serves")
    before = frozenset(sys.modules)
    if isinstance(reward, str):
        reward = RewardConfig(episode=reward)
    rewarding = RewardFunction(reward) if reward else None
    agent: Agent
    if cli is not None:
        agent = CliAgent(cli.model_copy(update={"context": cli.context or _CONTEXT_LENGTH}))
    elif command:
        agent = _command_agent(command, sandbox)
    else:
        agent = load_agent(str(function), workers=1)
    with tempfile.TemporaryDirectory(prefix="areal-agents-doctor-") as home:
        folder = model or write_tiny_model(Path(home))
        renderer = ChatRenderer.from_folder(folder)
        with (
            _engine(folder, renderer, engine_url) as url,
            Store.open(Path(home) / "store.db") as store,
        ):
            proxy = ObservedProxy("", store)
            with serving(proxy, url, renderer, ProxyConfig(volatile=dict(volatile or {}))):
                run = asyncio.run(_episode(proxy.url, agent, dict(task or {}), rewarding, timeout_s))
            imported = set(sys.modules) - before
            seen = _observed(proxy, run, function, command, cli, imported, timeout_s)
    facts = facts_of(seen)
    return Report(
        agent=function or (cli.cli if cli is not None else shlex.join(command)),
        model=str(model) if model else f"built-in ({folder.name})",
        engine=engine_url or _SCRIPTED,
        agent_error=seen.error,
        facts=facts,
        findings=findings_of(seen, facts),
    )


def _command_agent(command: Sequence[str], sandbox: SandboxConfig | None) -> Agent:
    """Return the agent that a command is. Raises SandboxError if its isolation is not available here."""
    if sandbox is None or sandbox.isolation == "none":
        return CommandAgent(command, passed=() if sandbox is None else sandbox.pass_environment)
    agent = SandboxedCommandAgent(command, sandbox)
    asyncio.run(check_isolation(sandbox.isolation, sandbox.spec()))
    return agent


def read_task(text: str) -> dict[str, Any]:
    """Parse the task of a command line. Raises ConfigError if it is not a JSON object."""
    try:
        task = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--task must be a JSON object: {error}") from None
    if not isinstance(task, dict):
        raise ConfigError(f"--task must be a JSON object, got {text!r}")
    return task


@contextlib.contextmanager
def _engine(folder: Path, renderer: ChatRenderer, engine_url: str | None) -> Iterator[str]:
    """Yield the URL of the engine that answers."""
    if engine_url is not None:
        yield engine_url.rstrip("/")
        return
    with scripted_engine(folder, renderer, context_length=_CONTEXT_LENGTH) as url:
        yield url


async def _episode(
    url: str, agent: Agent, task: Mapping[str, Any], rewarding: RewardFunction | None, timeout_s: float
) -> _EndedEpisode:
    limits = LimitsConfig(time_s=timeout_s)
    try:
        async with AsyncClient(url) as client:
            await client.served_version()  # fails at once if the engine does not answer
            attempt = Attempt(Task("doctor", task), "train")
            opened = await open_attempt(client, attempt, limits=limits)
            with interrupted_if_blocked():
                outcome = await run_rollout(
                    client, agent, attempt.task, opened, limits=limits, function=rewarding
                )
    finally:
        await agent.close()
    return _EndedEpisode(opened, outcome)


def _observed(
    proxy: ObservedProxy,
    run: _EndedEpisode,
    function: str | None,
    command: Sequence[str],
    cli: CliAgentConfig | None,
    imported: set[str],
    timeout_s: float,
) -> Observed:
    ids = {record.episode_id for record in proxy.records} - {"", run.opened.id}
    is_command = bool(command) or cli is not None
    # A command-line agent gets the variables of its definition, and none of this process's.
    environment = os.environ if cli is None else load_definition(cli.cli).environment
    files = sources_of(command, function)
    clients = [request.client for request in proxy.requests]
    outcome, imports = run.outcome, imports_of(files) | imported
    return Observed(
        given=proxy.store.load_episode(run.opened.id),
        implicit=tuple(proxy.store.load_episode(episode_id) for episode_id in sorted(ids)),
        records=tuple(proxy.records),
        requests=tuple(proxy.requests),
        error=_masked(outcome.error, run.opened.api_key) if outcome.status == "failed" else None,
        overran=outcome.status == "truncated",
        is_command=is_command,
        source_hosts=tuple(hosts_in_sources(files)),
        environment_hosts=tuple(
            hosts_in_environment(environment, overridden=GIVEN_TO_COMMANDS if is_command else ())
        ),
        # The environment of a command already bypasses HTTP proxies for this proxy; see CommandAgent.
        http_proxy=http_proxy_in_the_way(
            bypassing_proxies(os.environ, proxy.url) if is_command else os.environ
        ),
        telemetry=tuple(telemetry_of(imports, clients, environment, text_of(files))),
        timeout_s=timeout_s,
        imported=frozenset(imports),
    )


def _masked(error: str | None, key: str) -> str:
    return (error or "the agent failed").replace(key, "***")
