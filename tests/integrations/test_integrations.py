"""Real, unmodified agents of each framework call a running proxy: their answers and the recorded turns."""

from __future__ import annotations

from typing import Any

import pytest
from integration_support import Stack, check, run_script

from integrations.cases import CASES, Case
from integrations.run_agent import load_agent

WITHOUT_V1 = {"anthropic_sdk", "google_genai"}  # folders whose clients add the version to the base_url
EXACT = [case for case in CASES if case.turns and case.group]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_an_agent_is_recorded_exactly(case: Case, stack: Stack) -> None:
    episode = stack.open_episode(case.conversation.script())
    base_url = episode["base_url"]
    if case.folder in WITHOUT_V1:
        base_url = base_url.removesuffix("/v1")
    agent = load_agent(case.folder)
    answer = agent.run(case.conversation.questions, base_url=base_url, api_key=episode["key"], **case.options)
    assert answer.strip() == case.conversation.answer
    check(case, stack.turns(episode), stack.engine.exchanges)


def as_scripts() -> list[Any]:
    """The cases of bare clients and, marked as slow, those of frameworks, which take seconds to import."""
    plain = [case for case in EXACT if not case.options]
    marks = {"openai_sdk": (), "anthropic_sdk": (), "google_genai": ()}
    return [pytest.param(case, id=case.id, marks=marks.get(case.folder, pytest.mark.slow)) for case in plain]


@pytest.mark.parametrize("case", as_scripts())
def test_an_agent_finds_the_proxy_through_its_environment(case: Case, stack: Stack) -> None:
    """The agent is started as a user starts it, without a change to its code."""
    episode = stack.open_episode(case.conversation.script())
    environment = {
        "OPENAI_BASE_URL": episode["base_url"],
        "OPENAI_API_KEY": episode["key"],
        "ANTHROPIC_BASE_URL": episode["base_url"].removesuffix("/v1"),
        "ANTHROPIC_API_KEY": episode["key"],
        "GOOGLE_GEMINI_BASE_URL": episode["base_url"].removesuffix("/v1"),
        "GEMINI_API_KEY": episode["key"],
    }
    assert run_script(case.folder, case.conversation.questions[0], environment).strip()
    assert len(stack.turns(episode)) == len(stack.engine.exchanges) > 1
