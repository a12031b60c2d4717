"""The doctor's reports on agents with real clients: the facts, the findings, and the advice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from time_limits import TimeLimits

from areal_agents.doctor import Finding, Report, examine
from areal_agents.errors import AgentError, ConfigError, EngineError, RequestError
from areal_agents.inference.ports import reserved_ports
from areal_agents.rollout.agents import blocking
from areal_agents.testing import ScriptedApp, running

AGENTS = Path(__file__).with_name("doctor_agents.py")
MODEL = AGENTS.parents[2] / "examples" / "search_agent" / "model"


@cache  # reports are immutable, and each takes half a second
def report_on(name: str) -> Report:
    return examine(function=f"{AGENTS}:{name}", timeout_s=60)


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_agents.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def serious(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity != "note"]


def test_a_correct_function_has_no_serious_findings() -> None:
    report = report_on("good")
    facts = report.facts
    assert report.verdict == "ok" and serious(report) == [] and report.agent_error is None
    assert facts.endpoints == {"/v1/chat/completions": 3} and facts.dialects == ["chat"]
    assert (facts.turns, facts.roots, facts.branches, facts.forks) == (3, 1, 1, [])
    assert facts.reused_share is not None and 0.9 < facts.reused_share < 1 and facts.exact_share == 1
    assert facts.trained_share == 1 and facts.sampled_tokens > 0
    assert facts.episode == "given" and facts.rewarded and facts.streamed == 0


def test_a_correct_command_is_ok_on_the_command_line() -> None:
    done = doctor("--json", "--", sys.executable, str(AGENTS), "openai")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["verdict"] == "ok"
    assert said["facts"]["endpoints"] == {"/v1/chat/completions": 1}
    assert said["facts"]["episode"] == "given" and said["facts"]["turns"] == 1
    assert "verdict: ok" in done.stdout


def test_an_anthropic_command_is_ok_although_it_gives_no_reward() -> None:
    report = examine(command=[sys.executable, str(AGENTS), "anthropic"], timeout_s=60)
    assert report.verdict == "ok" and report.facts.dialects == ["messages"]
    assert not report.facts.rewarded
    (note,) = (finding for finding in report.findings if "no reward" in finding.what)
    assert note.severity == "note" and "AREAL_AGENTS_EPISODE_ID" in note.fix


def test_an_anthropic_function_with_tools_is_ok() -> None:
    report = report_on("claude")
    assert report.verdict == "ok" and report.facts.endpoints == {"/v1/messages": 3}
    assert report.facts.branches == 1 and report.facts.trained_share == 1


def test_a_synchronous_function_on_the_responses_api_is_ok() -> None:
    report = report_on("synchronous")
    assert report.verdict == "ok" and report.facts.endpoints == {"/v1/responses": 1}


def test_parameters_without_effect_are_noted_for_a_streaming_agent() -> None:
    report = report_on("streaming")
    facts = report.facts
    assert report.verdict == "ok" and (facts.calls, facts.streamed, facts.turns) == (1, 1, 1)
    assert facts.ignored_fields == {"user": 1} and facts.overridden == {"temperature": 1}
    notes = [finding.what for finding in report.findings]
    assert "These request fields have no effect: user." in notes
    assert "In training, the proxy sets these parameters: temperature." in notes


def test_an_agent_that_edits_its_history_gets_a_remark() -> None:
    report = report_on("editing")
    facts = report.facts
    assert report.verdict == "remarks" and facts.branches == facts.roots == 2
    assert [(fork.turn, fork.reason, fork.diverged_at) for fork in facts.forks] == [(2, "edited", 1)]
    assert facts.reused_share == facts.exact_share == 0
    (finding,) = serious(report)
    assert "turn 2 from message 2 on (edited)" in finding.what and "do not strip" in finding.fix


def test_text_that_differs_at_every_call_is_named_with_a_rule_to_paste(tmp_path: Path) -> None:
    """With the printed rule in its configuration, the agent has one branch."""
    noisy = ("--agent", f"{AGENTS}:noisy", "--json")
    done = doctor(*noisy)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["facts"]["branches"] == 3 and said["facts"]["reused_share"] == 0
    (finding,) = (finding for finding in said["findings"] if finding["severity"] == "remark")
    assert finding["what"].startswith(
        "This text differs at every call: '2026-11-10', '2026-11-11', '2026-11-12' "
        '(after "Today\'s date: " in message 1, role system); '
    )
    assert finding["what"].endswith("new branches begin at turn 2, 3.")

    (pasted,) = re.findall(r"(?ms)^proxy:$.*?(?=\n\n)", done.stdout)
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {MODEL}\nagent: {AGENTS}:noisy\ndata: {{path: tasks.jsonl}}\n{pasted}\n")
    (tmp_path / "tasks.jsonl").write_text('{"id": "1"}\n')
    done = doctor(*noisy, "--config", str(config))
    said = json.loads(done.stdout.splitlines()[-1])
    facts = said["facts"]
    assert said["verdict"] == "ok" and (facts["branches"], facts["volatile_as_first_seen"]) == (1, 6)
    assert facts["changing_texts"] == [] and facts["reused_share"] > 0.8


def test_a_template_that_strips_reasoning_is_named() -> None:
    (finding,) = serious(report_on("conversing"))
    assert "template strips reasoning" in finding.what and "reasoning: keep" in finding.fix


def test_an_agent_that_never_calls_the_proxy_cannot_be_trained() -> None:
    report = report_on("idle")
    assert report.verdict == "cannot" and report.facts.calls == 0 and report.facts.episode == "none"
    (finding,) = serious(report)
    assert finding.what.startswith("The agent never called the proxy.")
    assert "base_url=ep.base_url" in finding.fix


def test_another_address_in_the_source_of_an_agent_is_named() -> None:
    report = report_on("elsewhere")
    assert report.verdict == "cannot"
    (finding,) = serious(report)
    line = 1 + AGENTS.read_text().splitlines().index('ELSEWHERE = "https://models.example.invalid/v1"')
    assert f"models.example.invalid (doctor_agents.py:{line})" in finding.what


def test_an_unsupported_parameter_is_named() -> None:
    report = report_on("unsupported")
    assert report.verdict == "cannot" and report.facts.ignored_fields == {}
    (refusal,) = report.facts.refused
    assert (refusal.status, refusal.code, refusal.count) == (400, "unsupported_parameter", 1)
    refused, failed = serious(report)
    assert "this model writes text only" in refused.what and "Leave the parameter out" in refused.fix
    assert failed.what.startswith("The agent failed: BadRequestError")


@pytest.mark.parametrize(
    ("agent", "what", "fix"),
    [
        ("own_key", "refused with 401", "api_key=ep.api_key"),
        ("bare", "the proxy opened another episode for them", "base_url=ep.base_url"),
        ("forced", "1 of 1 turns were sampled under a grammar", "train_constrained: true"),
        ("gives_nothing", "The agent gave no reward", "return a number, call ep.reward"),
        ("blocks", "has blocked its event loop for 2 s", "Fix this error first"),
        ("claude_with_v1", "/v1/v1/messages was refused with 404", "Anthropic clients need it without /v1"),
    ],
)
def test_a_mistake_that_prevents_training_is_named_with_its_fix(
    agent: str, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agent == "blocks":
        monkeypatch.setattr(blocking, "BLOCKED_S", 2.0)
    report = report_on(agent)
    assert report.verdict == "cannot"
    first = report.findings[0]
    assert first.severity == "error" and what in first.what and fix in first.fix


@pytest.mark.parametrize(
    ("agent", "setting"),
    [
        ("typed_pydantic_ai", "pydantic-ai: give the model profile={'supports_forced_tool_choice': False}"),
        ("typed_langchain", 'with_structured_output(…, method="function_calling", tool_choice="auto")'),
    ],
)
def test_a_declared_type_is_constrained_unless_the_advice_is_followed(agent: str, setting: str) -> None:
    report = report_on(agent)
    first = report.findings[0]
    assert report.facts.trained_share == 0 and "train_constrained" in first.what and setting in first.fix
    free = examine(function=f"{AGENTS}:{agent}", task={"free": True}, timeout_s=60)
    assert free.facts.trained_share == 1 and free.facts.sampled_tokens > 0 and free.verdict == "ok"


def test_the_scripted_model_follows_tool_choices_and_schemas() -> None:
    report = report_on("choosing")
    assert report.agent_error is None and report.facts.turns == 4
    assert report.facts.trained_share == 0 and report.verdict == "cannot"


def test_the_engine_and_the_model_of_the_user_are_used() -> None:
    app = ScriptedApp.from_folder(MODEL, lambda call: "<think>\nHm.\n</think>\n\nIn France.")
    with running(app) as url:
        report = examine(function=f"{AGENTS}:streaming", model=MODEL, engine_url=url, timeout_s=60)
    assert report.verdict == "ok" and report.engine == url and report.model == str(MODEL)
    (exchange,) = app.exchanges
    assert report.facts.prompt_tokens == len(exchange.input_ids)
    assert report.facts.sampled_tokens == len(exchange.token_ids)


def test_a_report_contains_no_key() -> None:
    assert "RuntimeError: nothing works at http://127.0.0.1:" in str(report_on("telling").agent_error)
    for agent in ("good", "telling", "own_key", "claude_with_v1", "bare"):
        said = json.dumps(report_on(agent).to_dict())
        assert "ep-" not in said.replace("areal-agents", "") and "sk-mine" not in said


def test_an_agent_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "answered"
    TimeLimits(monkeypatch, mark.exists)
    report = examine(function=f"{AGENTS}:endless", task={"mark": str(mark)}, timeout_s=2)
    assert report.verdict == "remarks" and report.facts.turns == 1
    (finding,) = serious(report)
    assert finding.what == "The agent did not end within 2 s and was stopped." and "--timeout" in finding.fix


def test_the_report_on_an_agent_that_lacks_a_task_says_how_to_give_one() -> None:
    report = examine(function=f"{AGENTS}:asks_its_question", timeout_s=60)
    (finding,) = [each for each in report.findings if "failed before any call" in each.what]
    assert "KeyError: 'question'" in finding.what
    assert "Its task was {}; give another with --task." in finding.fix


def test_the_report_on_a_command_that_fails_says_why() -> None:
    done = doctor("--json", "--", sys.executable, str(AGENTS), "nobody")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["verdict"] == "cannot"
    errors = [finding["what"] for finding in said["findings"] if finding["severity"] == "error"]
    assert any("no agent has the name 'nobody'" in error for error in errors)
    assert any("OPENAI_BASE_URL" in finding["fix"] for finding in said["findings"])


def test_a_mistake_on_the_command_line_is_reported_without_a_traceback() -> None:
    done = doctor("--agent", "no_such_module:agent")
    assert done.returncode == 1 and "cannot import no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_agent_of_a_configuration_is_examined_with_its_first_task(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import os, sys\nfrom openai import OpenAI\n"
        "if sys.argv[1:] == ['--version']:\n    sys.exit(print('tiny 1.0'))\n"
        "messages = [{'role': 'user', 'content': sys.stdin.read()}]\n"
        "client = OpenAI(base_url=os.environ['TINY_URL'], api_key=os.environ['TINY_KEY'])\n"
        "client.chat.completions.create(model='policy', messages=messages)\n"
    )
    (tmp_path / "tiny").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/agent.py "$@"\n')
    (tmp_path / "tiny").chmod(0o755)
    (tmp_path / "tiny.toml").write_text(
        'program = "tiny"\ninstall = "pip install tiny"\nleast_version = "1.0"\ndialect = "chat"\n'
        'arguments = []\nstdin = "{prompt}"\n'
        '[environment]\nTINY_URL = "{base_url}"\nTINY_KEY = "{key}"\n'
    )
    (tmp_path / "rewards.py").write_text(
        "def score(episode):\n"
        "    assert episode.messages[0]['content'] == episode.task['instruction'] == 'Wörk.'\n"
        "    return 1.0\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"instruction": "Wörk."}\n')
    (tmp_path / "config.yaml").write_text(
        f"model: {MODEL}\nagent: {{cli: tiny.toml, executable: ./tiny}}\ndata: {{path: tasks.jsonl}}\n"
        "reward: rewards.py:score\n"
    )
    done = doctor("--json", "--config", str(tmp_path / "config.yaml"))
    report = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, report["agent"]) == (0, str(tmp_path / "tiny.toml")), done.stdout + done.stderr
    assert (report["facts"]["turns"], report["agent_error"]) == (1, None)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="--agent module:function or --"):
        examine()
    with pytest.raises(ConfigError, match="needs --model"):
        examine(function=f"{AGENTS}:good", engine_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not a Hugging Face model folder"):
        examine(function=f"{AGENTS}:good", model=AGENTS.parent)
    with pytest.raises(AgentError, match="has no function 'missing'"):
        examine(function=f"{AGENTS}:missing")


def test_an_engine_that_does_not_answer_is_reported_at_once() -> None:
    with reserved_ports(1) as (port,), pytest.raises((RequestError, EngineError), match="not available"):
        examine(function=f"{AGENTS}:good", model=MODEL, engine_url=f"http://127.0.0.1:{port}")


def test_a_reward_function_that_is_separate_from_the_agent_is_called(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(episode):\n    return float(episode.messages[0]['role'] == 'user')\n"
        "def broken(episode):\n    raise KeyError('answer')\n"
    )
    agent = f"{AGENTS}:gives_nothing"
    rewarded = examine(function=agent, reward=f"{tmp_path / 'rewards.py'}:score")
    assert rewarded.facts.rewarded and rewarded.verdict != "cannot"
    failed = examine(function=agent, reward=f"{tmp_path / 'rewards.py'}:broken")
    assert failed.verdict == "cannot"
    assert any("KeyError: 'answer'" in finding.what for finding in failed.findings)
