"""Runs one agent against a proxy and a scripted engine of its own, and computes its row from the records.

The agent is a process that gets nothing but its questions and environment variables. What counts as reused
and as trained are the facts of `areal-agents doctor`, so that table and doctor cannot disagree.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agents.client import Client, OpenedEpisode
from areal_agents.direct_http import bypassing_proxies
from areal_agents.doctor.facts import facts_of
from areal_agents.doctor.observed import Observed
from areal_agents.doctor.report import Facts
from areal_agents.doctor.serving import ObservedProxy, serving
from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.gemini.urls import GENERATE, STREAM
from areal_agents.proxy.server import make_renderer
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, ServedCall, running
from integrations.cases import Case
from integrations.commands import CommandFailed, base_environment, run_command
from integrations.environments import FOLDER, Environment
from integrations.page import Row, Verdict

AGENT_TIMEOUT_S = 240.0
# Reasoning of earlier turns stays in the prompt, so that every branch is due to the framework.
PROXY = ProxyConfig(reasoning="keep")
_CONTEXT_LENGTH = 65_536
_LONGEST_ERROR = 200
_DIALECTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
    GENERATE: "Gemini",
    STREAM: "Gemini",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A running scripted engine, and the renderer of its model."""

    app: ScriptedApp
    url: str
    renderer: ChatRenderer


@contextmanager
def scripted_engine(model: Path) -> Iterator[Engine]:
    """Run a scripted engine with the tokenizer of a model folder inside the block."""
    app = ScriptedApp.from_folder(model, lambda call: "", context_length=_CONTEXT_LENGTH)
    with running(app) as url:
        yield Engine(app, url, make_renderer(model, PROXY))


def run_case(case: Case, environment: Environment, engine: Engine, *, version: str, date: str) -> Row:
    """Run the agent of a case once, and return its row."""
    engine.app.script = case.conversation.script()
    engine.app.exchanges.clear()
    with (
        tempfile.TemporaryDirectory(prefix="areal-agents-integration-") as home,
        Store.open(Path(home) / "store.db") as store,
    ):
        proxy = ObservedProxy("", store)
        with serving(proxy, engine.url, engine.renderer, PROXY):
            with Client(proxy.url) as client:
                episode = client.open_episode()
            error = _why_not_answered(case, environment, proxy.url, episode, Path(home))
        seen = _observed(proxy, episode, error)
        error = error or _why_not_recorded(seen, engine.app.exchanges) or _what_was_not_read(case, engine)
    return row_of(case, facts_of(seen), error, version=version, date=date)


def row_of(case: Case, facts: Facts, error: str | None, *, version: str, date: str) -> Row:
    """Return the row of a case from the facts of its episode.

    Args:
        error: why the agent failed, did not answer, or was not recorded as it was served; None if it is well.
    """
    if error is None and not facts.turns:
        error = "no call reached the proxy"
    exact = facts.exact_share in (None, 1)  # None: no call repeats an earlier one
    if error is not None:
        verdict, remark = Verdict.FAILS, error
    elif exact and facts.trained_share == 1:
        verdict, remark = Verdict.TRAINED, case.why
    else:
        verdict = Verdict.REMARKS
        remark = case.why or " ".join(dict.fromkeys(fork.explanation for fork in facts.forks))
    return Row(
        id=case.id,
        folder=case.folder,
        package=case.package,
        version=version,
        dialect=", ".join(sorted({_DIALECTS.get(path, path) for path in facts.endpoints})),
        streamed=_streamed(facts),
        turns=str(facts.turns),
        branches=_branches(facts),
        reused=_percent(facts.exact_share),
        trained=_percent(facts.trained_share),
        verdict=verdict,
        date=date,
        remark=remark,
    )


def _why_not_answered(
    case: Case, environment: Environment, url: str, episode: OpenedEpisode, home: Path
) -> str | None:
    """Run the agent in an empty folder; return why it did not give the expected answer, or None."""
    work = home / "work"
    work.mkdir()
    programs = ":".join(str(folder) for folder in environment.programs)
    inherited = base_environment(home)
    variables = {
        **bypassing_proxies(inherited, url),
        "PATH": f"{programs}:{inherited.get('PATH', '')}",
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_API_KEY": episode.api_key,
        "GOOGLE_GEMINI_BASE_URL": episode.google_base_url,
        "GEMINI_API_KEY": episode.api_key,
        **case.environment,
    }
    if case.cli:
        return _why_the_program_failed(case, variables, episode, home)
    try:
        done = run_command(_words(case, environment), variables, cwd=work, timeout_s=AGENT_TIMEOUT_S)
    except CommandFailed as failed:
        return _shortened(str(failed).replace(episode.api_key, "***"))
    lines = done.stdout.strip().splitlines()
    answer = lines[-1] if lines else ""
    if not case.command:
        answer = json.loads(answer)["answer"].strip()
    if answer.strip() != case.conversation.answer:
        return _shortened(f"it answered {answer!r} instead of {case.conversation.answer!r}")
    return None


def _why_the_program_failed(
    case: Case, variables: Mapping[str, str], episode: OpenedEpisode, home: Path
) -> str | None:
    """Run a command-line agent as a run does; return why it did not give the expected answer, or None."""
    questions = case.conversation.questions
    ep = Episode(episode.id, episode.base_url, episode.api_key)
    told = {"prompts": questions} if len(questions) > 1 else {"prompt": questions[0]}
    config = CliAgentConfig.read({"cli": case.cli, "context": _CONTEXT_LENGTH, **told})

    async def run() -> str:
        """Return what it printed, or its last reply."""
        agent = CliAgent(config, logs=home / "logs", inherited=variables)
        try:
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                if len(questions) == 1:
                    await agent.run({}, ep)
                    return (home / "logs" / f"{ep.id}.log").read_text(errors="replace")
                async with agent.open(ep, None, permissions="allow", log=None) as running:
                    replies = [await running.prompt(question) for question in questions]
                return replies[-1].text
        finally:
            await agent.close()

    try:
        printed = asyncio.run(run())
    except TimeoutError:
        return f"it did not end within {AGENT_TIMEOUT_S:g} s"
    except AgentError as failed:
        return _shortened(str(failed))
    if case.conversation.answer not in (line.strip() for line in printed.splitlines()):
        return _shortened(f"it did not answer {case.conversation.answer!r}: {printed}")
    return None


def _words(case: Case, environment: Environment) -> list[str]:
    questions = list(case.conversation.questions)
    if case.command:
        return [*case.command, *questions]
    if environment.node is not None:
        told = json.dumps({"questions": questions, **case.options})
        return [str(environment.node), str(FOLDER / case.folder / "agent.mjs"), told]
    told = json.dumps({"questions": questions, "options": dict(case.options)})
    # -P: the folders here are named like the packages that they are about.
    return [str(environment.python), "-P", str(FOLDER / "run_agent.py"), case.folder, told]


def _observed(proxy: ObservedProxy, episode: OpenedEpisode, error: str | None) -> Observed:
    others = sorted({record.episode_id for record in proxy.records} - {"", episode.id})
    return Observed(
        given=proxy.store.load_episode(episode.id),
        implicit=tuple(proxy.store.load_episode(episode_id) for episode_id in others),
        records=tuple(proxy.records),
        requests=tuple(proxy.requests),
        error=error,
        overran=False,
        is_command=True,
    )


def _why_not_recorded(seen: Observed, served: Sequence[ServedCall]) -> str | None:
    """Return how the record differs from what the engine read and sampled, or None."""
    recorded = sorted(
        (episode.forest.prompt_ids(turn.id).tolist(), list(turn.completion.token_ids))
        for episode in (seen.given, *seen.implicit)
        for turn in episode.turns
    )
    if recorded != sorted((call.input_ids.tolist(), list(call.token_ids)) for call in served):
        return "the record differs from what the engine read and sampled"
    return None


def _what_was_not_read(case: Case, engine: Engine) -> str | None:
    """Return which result of a tool the model never read, or None."""
    prompts = [engine.renderer.tokenizer.decode(call.input_ids.tolist()) for call in engine.app.exchanges]
    unread = [part for part in case.conversation.results if not any(part in text for text in prompts)]
    return f"the model never read {unread[0]!r}" if unread else None


def _streamed(facts: Facts) -> str:
    if facts.streamed in (0, facts.calls):
        return "yes" if facts.streamed else "no"
    return f"{facts.streamed} of {facts.calls}"


def _branches(facts: Facts) -> str:
    """Return the number of branches, and why each but the first began."""
    reasons = Counter(fork.reason for fork in facts.forks)
    why = ", ".join(f"{reason} ×{count}" for reason, count in sorted(reasons.items()))
    return f"{facts.branches}: {why}" if why else str(facts.branches)


def _percent(share: float | None) -> str:
    """Return a share in percent, rounded down, so that only the whole is 100%."""
    return "–" if share is None else f"{int(share * 100)}%"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_ERROR else f"…{text[-_LONGEST_ERROR:]}"
