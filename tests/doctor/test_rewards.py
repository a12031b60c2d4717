"""The doctor's report on rewards: the rewards of players that do none of the work, and the findings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.core.rollout import Task
from areal_agents.doctor import Finding
from areal_agents.doctor.rewards import RewardReport, examine_rewards
from areal_agents.doctor.rewards.edit_tests import change_tests
from areal_agents.doctor.rewards.facts import facts_of
from areal_agents.doctor.rewards.players import _languages
from areal_agents.doctor.rewards.report import Grade, PlayerGrades
from areal_agents.errors import ConfigError
from areal_agents.proxy import ProxyConfig
from areal_agents.rollout.config import LimitsConfig, RewardConfig

AGENT = Path(__file__).with_name("graded_agent.py")
GRADERS = Path(__file__).with_name("graders.py")
CAPITALS = {"France": "Paris", "Peru": "Lima", "Norway": "Oslo"}
CHOICES = f"One of {', '.join(CAPITALS.values())}."


def tasks_with(field: str = "answer", question: str = "The capital of {}? " + CHOICES) -> list[Task]:
    return [Task(land, {"question": question.format(land), field: city}) for land, city in CAPITALS.items()]


def examined(
    reward: str | None,
    *,
    agent: str | Mapping[str, str] = "ask",
    tasks: list[Task] | None = None,
    time_s: float = 60.0,
    **options: Any,
) -> RewardReport:
    given = {"group_size": 4, "most_tasks": 3, "limits": LimitsConfig(), "proxy": ProxyConfig(), **options}
    config = RewardConfig(episode=f"{GRADERS}:{reward}", time_s=time_s)
    named = f"{AGENT}:{agent}" if isinstance(agent, str) else agent
    return examine_rewards(tasks or tasks_with(), agent=named, reward=config if reward else None, **given)


def means(report: RewardReport) -> dict[str, float | None]:
    return {player.name: player.mean for player in report.players}


def serious(report: RewardReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity != "note"]


def test_a_correct_grader_has_no_findings() -> None:
    report = examined("exact")
    assert means(report) == {
        "empty": 0, "constant": 0, "“0”": 0, "“yes”": 0, "“A”": 0, "echo": 0, "tool-less": 0, "truncated": 0,
        "tools": 0, "right answer": 1, "<answer>…</answer>": 0, "\\boxed{…}": 0, "#### …": 0,
        "The answer is: …": 0, "a fenced block": 0,
    }  # fmt: skip
    assert report.verdict == "ok" and report.findings == []
    facts = report.facts
    assert (facts.tasks, facts.episodes, facts.failures, facts.scores) == (3, 45, 0, 2)
    assert facts.best_form == "right answer" and facts.flat_tasks == ()
    assert facts.equal_groups == pytest.approx(2 * 0.5**4)
    assert facts.spread == pytest.approx((9 / 10 * 1 / 10) ** 0.5)
    assert facts.grade_s is not None and 0 <= facts.grade_s <= facts.longest_grade_s  # type: ignore[operator]
    by_name = {player.name: player for player in report.players}
    assert [grade.task for grade in by_name["empty"].grades] == [*CAPITALS]


def test_a_grader_that_searches_the_reply_rewards_a_list_of_all_choices() -> None:
    report = examined("contains")
    (finding,) = [finding for finding in serious(report) if "'echo'" in finding.what]
    assert report.verdict == "cannot" and finding.severity == "error"
    assert finding.what.startswith(
        "The player 'echo', which repeats the longest string of the task, earns 1 on"
    )
    assert "100% of what the right answer earns" in finding.what
    assert means(report)["The answer is: …"] == 1


def test_a_rewarded_claim_of_success_gets_a_remark() -> None:
    report = examined("by_claim")
    (finding,) = serious(report)
    assert finding.severity == "remark" and "'tool-less', which claims success" in finding.what
    assert "30% of what the right answer earns" in finding.what and "check the work" in finding.fix


def test_a_grader_that_fails_on_unreadable_replies_is_an_error() -> None:
    report = examined("boxed")
    failed = report.findings[0]
    assert report.verdict == "cannot" and failed.severity == "error"
    assert (
        failed.what.startswith("The reward function failed in 42 of 45 episodes.") and "no box" in failed.what
    )
    assert report.facts.failures == 42 and report.facts.best_form == "\\boxed{…}"


@pytest.mark.parametrize(
    ("reward", "agent", "limit_s"), [("endless", "ask", 60.0), ("exact", "ask_and_wait", 0.3)]
)
def test_a_grader_or_an_agent_that_never_ends_is_tried_in_three_episodes(
    reward: str, agent: str, limit_s: float
) -> None:
    report = examined(reward, agent=agent, time_s=0.3, limits=LimitsConfig(time_s=limit_s))
    first = report.findings[0]
    assert (report.verdict, first.severity, report.facts.episodes) == ("cannot", "error", 3)
    assert first.what.startswith("No further episodes were played: 3 episodes one after another took all of")
    assert "No task holds its answer" not in str(report.findings)


@pytest.mark.parametrize(("question", "named"), [("{}?", False), ("{}? Write \\boxed{{…}}.", True)])
def test_a_required_form_that_the_prompt_does_not_name_gets_a_remark(question: str, named: bool) -> None:
    report = examined("boxed_or_nothing", tasks=tasks_with(question=question))
    assert means(report)["\\boxed{…}"] == 1 and means(report)["right answer"] == 0
    found = [finding.what for finding in serious(report) if "do not name this form" in finding.what]
    assert found == ([] if named else [
        "The right answer earns 0 as it is and 1 as '\\\\boxed{…}', and the prompts do not name this form."
    ])  # fmt: skip


QUERIES = [
    Task("1", {"question": "The tallest mountain?", "answer": "SELECT name FROM hill ORDER BY height DESC"}),
    Task("2", {"question": "How many lakes?", "answer": "select count(*) from lake"}),
]


@pytest.mark.parametrize(
    ("reward", "best", "earned"),
    [("fenced_statement", "a fenced sql block", 0), ("any_fence", "a fenced block", 1)],
)
def test_a_required_fenced_block_that_the_prompt_does_not_name_gets_a_remark(
    reward: str, best: str, earned: float
) -> None:
    report = examined(reward, tasks=QUERIES, most_tasks=2)
    assert means(report)[best] == 1 and means(report)["right answer"] == 0
    assert means(report)["a fenced block"] == earned
    assert not {"a fenced json block", "a fenced python block"} & set(means(report))
    assert [finding.what for finding in serious(report)] == [
        f"The right answer earns 0 as it is and 1 as '{best}', and the prompts do not name this form."
    ]
    named = [
        Task(task.id, {**task.input, "question": f"{task.input['question']} Answer with a code block."})
        for task in QUERIES
    ]
    assert serious(examined(reward, tasks=named, most_tasks=2)) == []


def test_a_prompt_about_defence_does_not_name_a_fenced_block() -> None:
    about = [Task("1", {"question": "The minister of defence?", "answer": "SELECT name FROM minister"})]
    report = examined("any_fence", tasks=about, most_tasks=1)
    assert "the prompts do not name this form" in " ".join(finding.what for finding in serious(report))


@pytest.mark.parametrize(
    ("answer", "languages"),
    [
        ("Paris", []), ("-0.5", []), ("4", []), ("[1, 2]", ["json"]), ('{"city": "Oslo"}', ["json"]),
        ("def f(x):\n    return x", ["python"]), ("print(1)", ["python"]), ("x = (", []),
        ("WITH t AS (SELECT 1) SELECT * FROM t", ["sql"]), ("selected", []), ("print('\\d')", ["python"]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_the_languages_of_fences_follow_from_the_answers(answer: str, languages: list[str]) -> None:
    assert [*_languages([answer])] == ["", *languages]


def test_a_grader_that_ends_its_process_is_an_error() -> None:
    """Only the episodes in which it does so are failures, and the report says why."""
    report = examined("ends_the_process", most_tasks=2)
    (right,) = [player for player in report.players if player.name == "right answer"]
    assert len(right.grades) == 2 and right.scores == {}
    for grade in right.grades:
        assert grade.grader_failed and "ended the process in which it runs, with exit status 7" in grade.error
        assert "the rollout process with all its episodes" in grade.error
    assert means(report)["empty"] == 0.0 and report.facts.failures == 2
    assert "ended the process" in report.findings[0].what and report.verdict == "cannot"


def test_a_reward_that_no_player_earns_is_an_error() -> None:
    report = examined("never")
    said = " ".join(finding.what for finding in report.findings)
    assert report.verdict == "cannot" and report.facts.equal_groups == 1 and report.facts.spread == 0
    assert "All players earn the same in all tasks" in said
    assert "The right answer earns no more than players that do not know it in any of 3 tasks" in said


def test_the_most_frequent_answer_is_a_player_if_it_is_right_more_than_once() -> None:
    tasks = [
        Task(str(n), {"question": f"Is {n} even?", "answer": "yes" if n % 3 else "no"}) for n in range(6)
    ]
    report = examined("exact", tasks=tasks)
    by_name = {player.name: player for player in report.players}
    frequent = by_name["frequent"]
    assert frequent.what == "always gives the most frequent answer, 'yes'"
    assert frequent.scores == {"0": 0, "1": 1, "2": 1}
    assert not any("no more than other players" in finding.what for finding in report.findings)


def test_the_right_answer_is_a_player_only_if_a_field_of_a_task_holds_it() -> None:
    tasks = [Task("a", {"question": "?", "solved": "Paris"})]
    report = examined("never", tasks=tasks)
    assert "right answer" not in means(report) and report.facts.best_form is None
    assert any("No task holds its answer" in finding.what for finding in report.findings)
    with pytest.raises(ConfigError, match="no task has a field 'key'"):
        examined("never", tasks=tasks, answer_field="key")
    named = examined("exact", tasks=tasks_with(field="solved") + tasks, answer_field="solved")
    assert "right answer" in means(named)


def test_an_agent_that_rewards_itself_and_sometimes_raises_gets_a_remark() -> None:
    report = examined(None, agent="ask_and_insist", most_tasks=1)
    assert means(report)["right answer"] == 1 and means(report)["empty"] is None
    (finding,) = serious(report)
    assert finding.severity == "remark" and "The episode failed in 1 of 15 episodes" in finding.what
    assert "ValueError: the model said nothing" in finding.what and "agent_error: score" in finding.fix
    assert report.facts.grade_s is None


def test_rewards_of_both_the_agent_and_a_reward_function_are_named() -> None:
    report = examined("named", agent="ask_and_insist", most_tasks=1)
    assert means(report)["right answer"] == 2
    (finding,) = [
        f for f in serious(report) if f.what.startswith("The agent gives rewards, and `reward` too")
    ]
    assert "the agent gave return 1, and reward: gave exact 1; both count: the score is 2" in finding.what


def test_a_run_without_any_reward_cannot_be_trained() -> None:
    report = examined(None, agent="ask", most_tasks=1)
    assert report.verdict == "cannot" and "no reward was given" in report.findings[0].what


def test_noisy_and_slow_rewards_are_named() -> None:
    moody = examined("moody", most_tasks=1)
    assert any("gives the same episode different rewards" in finding.what for finding in moody.findings)
    slow = examined("slow_if_right", most_tasks=1, time_s=0.5)
    assert any("may take 0.5 s" in finding.what for finding in slow.findings)


def test_the_truncated_reward_is_given_only_to_an_episode_that_reached_a_limit() -> None:
    options: dict[str, Any] = {
        "most_tasks": 1, "limits": LimitsConfig(max_turns=1), "proxy": ProxyConfig(truncated_reward=-1),
    }  # fmt: skip
    once = examined(None, agent="ask", **options)
    assert once.facts.failures == once.facts.episodes == 15  # no limit was reached, and no reward was given
    twice = examined(None, agent="ask_twice", **options)
    assert twice.facts.failures == 0 and set(means(twice).values()) == {-1}


CODER = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=30) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
open("double.py", "w").write(said or "")
"""


@pytest.mark.parametrize(("grader", "earned"), [("tests_of_the_folder", 1), ("tests_of_the_task", 0)])
def test_a_reward_that_runs_tests_changed_by_the_agent_is_an_error(
    grader: str, earned: float, tmp_path: Path
) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "test_double.py").write_text("from double import double\nassert double(3) == 6\n")
    (tmp_path / "coder.py").write_text(CODER)
    (tmp_path / "coder.toml").write_text(
        "program = 'python'\ninstall = 'none'\nleast_version = '3.11'\ndialect = 'chat'\n"
        f"arguments = ['{tmp_path / 'coder.py'}']\nstdin = '{{prompt}}'\n"
        "environment = {OPENAI_BASE_URL = '{base_url}', OPENAI_API_KEY = '{key}'}\n"
    )
    task = {"folder": str(folder), "question": "Write double.", "answer": "def double(x):\n    return 2 * x"}
    agent = {
        "cli": str(tmp_path / "coder.toml"),
        "executable": sys.executable,
        "prompt": "{task.question}",
        "workdir": "{task.folder}",
    }
    report = examined(grader, agent=agent, tasks=[Task("double", task)])
    assert means(report)["right answer"] == 1 and means(report)["tool-less"] == 0
    assert means(report)["test editor"] == earned
    found = [finding for finding in report.findings if "'test editor'" in finding.what]
    assert [finding.severity for finding in found] == ["error"] * bool(earned)
    assert (
        (folder / "test_double.py").read_text().startswith("from double")
    )  # the task's own tests are unchanged


def test_only_files_of_tests_are_changed(tmp_path: Path) -> None:
    tests = ["test_a.py", "a_test.go", "tests/data.py", "ui.spec.ts", "run-tests.sh", "spec/x.js"]
    others = ["latest.py", "contest.py", "tests/data.json", "attest.go", "README.md"]
    for name in tests + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("package thing\n")
    changed = {str(path.relative_to(tmp_path)) for path in change_tests(tmp_path)}
    assert changed == {*tests, "conftest.py", "reward.txt", "reward.json"}
    assert (tmp_path / "a_test.go").read_text().startswith("package thing\n\nimport")


def test_the_share_of_equal_groups_is_computed_from_the_grades() -> None:
    def player(*scores: float | None) -> PlayerGrades:
        return PlayerGrades("p", "", False, False, tuple(Grade(str(n), s) for n, s in enumerate(scores)))

    facts = facts_of([player(0, 0, None), player(0, 1, None), player(0, 1, 0.5)], group_size=2)
    # task 0: all equal; task 1: (1/3)² + (2/3)²; task 2: one score
    assert facts.equal_groups == pytest.approx((1 + 5 / 9 + 1) / 3)
    best = PlayerGrades("right", "", True, False, (Grade("0", 2),))
    half = facts_of([player(0), player(1), best], group_size=3)
    assert half.equal_groups == pytest.approx(0.5**3 + 2 * 0.25**3) and half.best_form == "right"
    assert facts.flat_tasks == ("0", "2") and facts.failures == 2


def test_the_command_line_prints_the_report(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{land}?", "answer": city}) + "\n" for land, city in CAPITALS.items()
        )
    )
    config = {
        "model": "quickstart",
        "agent": f"{AGENT}:ask",
        "data": {"path": "tasks.jsonl"},
        "reward": f"{GRADERS}:contains",
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "areal_agents", "doctor", "--rewards", "--config", str(path)]
    done = subprocess.run([*command, "--tasks", "2", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "verdict:" in done.stdout and "task 2 of 2" in done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["facts"]["tasks"] == 2 and said["players"][0]["name"] == "empty"
    wrong = subprocess.run([*command, "--", "python"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--rewards takes the agent" in wrong.stderr
