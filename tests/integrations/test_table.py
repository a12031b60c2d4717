"""The table of docs/integrations.md: every integration has a row, which says what was recorded."""

from __future__ import annotations

import ensurepip
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_tokenizers import qwen_folder

from areal_agents.errors import ConfigError
from areal_agents.rollout.agents.cli.definition import known_definitions
from integrations.__main__ import chosen_cases, update_page
from integrations.cases import CASES, Case
from integrations.commands import CommandFailed, run_command
from integrations.conversations import WEATHER, Conversation
from integrations.environments import ENVIRONMENTS, FOLDER, GROUPS, Environment, Environments
from integrations.page import PAGE, Row, Verdict, page_text, read_rows, write_page
from integrations.running import Engine, run_case, scripted_engine

HERE = Environment(Path(sys.executable), None, (Path(sys.executable).parent,))
FOLDERS = sorted(path.parent.name for path in FOLDER.glob("*/README.md"))
OPENAI = next(case for case in CASES if case.id == "openai_sdk")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with scripted_engine(qwen_folder()) as engine:
        yield engine


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """Environments of two groups: one needs only pip, and the other cannot be installed."""
    home = tmp_path_factory.mktemp("environments")
    groups = home / "groups"
    groups.mkdir()
    bare = f"pip=={ensurepip.version()}\n"
    (groups / "bare.txt").write_text(bare)
    (groups / "broken.txt").write_text(bare + "./not-there\n")
    return Environments(groups, home / "made")


def test_every_folder_has_what_an_integration_needs() -> None:
    pinned = Environments(GROUPS, ENVIRONMENTS)
    assert {case.folder for case in CASES} == set(FOLDERS)
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"groups", "__pycache__"} == set(
        FOLDERS
    )
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert pinned.pinned_version(case)
        script = "agent.py" if case.group else "agent.mjs"
        assert case.command or case.cli or case.cannot or (FOLDER / case.folder / script).is_file()
    assert {case.cli for case in CASES if case.cli} == set(known_definitions())


def test_the_page_has_a_row_for_each_case_and_nothing_else() -> None:
    rows = read_rows(PAGE)
    assert set(rows) == {case.id for case in CASES}
    assert PAGE.read_text() == page_text(rows.values())
    pinned = Environments(GROUPS, ENVIRONMENTS)
    for case in CASES:
        row = rows[case.id]
        assert (row.folder, row.package, row.version) == (
            case.folder,
            case.package,
            pinned.pinned_version(case),
        )
        assert row.remark or row.verdict is Verdict.TRAINED, f"{case.id} must say why"


def test_a_row_describes_the_recorded_turns(engine: Engine) -> None:
    row = run_case(OPENAI, HERE, engine, version="3.0", date="2026-01-02")
    assert row == Row(
        id="openai_sdk",
        folder="openai_sdk",
        package="openai",
        version="3.0",
        verdict=Verdict.TRAINED,
        date="2026-01-02",
        remark="",
        dialect="chat",
        streamed="no",
        turns="5",
        branches="1",
        reused="100%",
        trained="100%",
    )


def test_a_row_shows_a_rewritten_history_and_constrained_sampling(engine: Engine, tmp_path: Path) -> None:
    """The agent sends the first reply back in capitals, and its last reply is sampled under a grammar."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, urllib.request\n"
        "def ask(messages, **fields):\n"
        "    body = json.dumps({'model': 'm', 'messages': messages, **fields}).encode()\n"
        "    key = 'Bearer ' + os.environ['OPENAI_API_KEY']\n"
        "    headers = {'Authorization': key, 'Content-Type': 'application/json'}\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers))\n"
        "    return json.load(answer)['choices'][0]['message']['content']\n"
        "messages = [{'role': 'user', 'content': 'One?'}]\n"
        "messages.append({'role': 'assistant', 'content': ask(messages).upper()})\n"
        "messages.append({'role': 'user', 'content': 'Two?'})\n"
        "print(ask(messages, response_format={'type': 'json_object'}))\n"
    )
    conversation = Conversation(("One?",), ("one", "{}"), "{}")
    case = Case("openai_sdk", "pip", "bare", conversation, command=(sys.executable, str(agent)))
    row = run_case(case, HERE, engine, version="1", date="2026-01-02")
    assert (row.verdict, row.turns, row.reused) == (Verdict.REMARKS, "2", "0%")
    assert (row.branches, row.trained) == ("2: edited ×1", "50%")
    assert row.remark == "A message differs from the recorded one."


def test_an_agent_that_withholds_a_result_from_the_model_fails(engine: Engine) -> None:
    case = replace(OPENAI, conversation=replace(WEATHER, results=(*WEATHER.results, "sunshine")))
    row = run_case(case, HERE, engine, version="3.0", date="2026-01-02")
    assert (row.verdict, row.remark) == (Verdict.FAILS, "the model never read 'sunshine'")


def test_other_rows_are_kept_and_a_worse_verdict_is_reported(
    engine: Engine, environments: Environments, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    command = (sys.executable, str(FOLDER / "openai_sdk" / "agent.py"))
    case = Case("openai_sdk", "pip", "bare", command=command)
    kept = Row("kept", "openai_sdk", "pip", "1", Verdict.REMARKS, "2026-01-02", "a | b")
    gone = replace(kept, id="gone")
    write_page(page, [kept, gone])
    cases = [case, replace(case, folder="kept")]

    said: list[str] = []
    assert update_page(page, cases, [case], engine, environments, say=said.append) == []
    assert set(read_rows(page)) == {"kept", "openai_sdk"} and read_rows(page)["kept"] == kept
    assert read_rows(page)["openai_sdk"].verdict is Verdict.TRAINED and "trained 100%" in said[0]

    broken = replace(case, group="broken")
    (worse,) = update_page(page, cases, [broken], engine, environments, say=said.append)
    assert worse.startswith("openai_sdk: does not, before: trained.")
    assert "cannot be installed" in worse and "not-there" in worse
    assert read_rows(page)["openai_sdk"].verdict is Verdict.FAILS and read_rows(page)["kept"] == kept

    silent = replace(case, command=("true",))
    assert update_page(page, cases, [silent], engine, environments, say=said.append) == []
    assert read_rows(page)["openai_sdk"].remark == "it answered '' instead of 'Yes, again.'"


def test_all_processes_that_a_command_started_are_ended(tmp_path: Path) -> None:
    """This includes a process in another session that holds the standard output open."""
    environment = dict(os.environ)
    leaving = ["sh", "-c", "setsid sleep 600 & echo $!"]
    started = run_command(leaving, environment, cwd=tmp_path, timeout_s=60).stdout
    assert _ends(int(started))
    staying = ["sh", "-c", "setsid sleep 600 & echo late >&2; echo $! > new; mv new pid; wait"]
    for limit_s in (1, 8, 60):  # on a busy machine the command may take longer to write its file
        with pytest.raises(CommandFailed, match=f"it did not end within {limit_s} s: ") as failed:
            run_command(staying, environment, cwd=tmp_path, timeout_s=limit_s)
        if (tmp_path / "pid").exists():
            break
    assert str(failed.value).endswith("s: late")
    assert _ends(int((tmp_path / "pid").read_text()))
    with pytest.raises(CommandFailed, match="nothing-of-this-name cannot be started"):
        run_command(["nothing-of-this-name"], environment, cwd=tmp_path, timeout_s=60)


def _ends(pid: int) -> bool:
    """Return whether a killed process ends, or waits only to be reaped, within a minute."""
    status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_an_environment_is_made_again_only_when_its_requirements_change(environments: Environments) -> None:
    case = Case("openai_sdk", "pip", "bare")
    made = environments.prepared(case)
    assert made.python is not None
    kept = made.python.parent / "kept"
    kept.touch()
    assert environments.prepared(case) == made and kept.exists()
    requirements = environments.groups / "bare.txt"
    requirements.write_text(f"# changed\n{requirements.read_text()}")
    assert environments.prepared(case) == made and not kept.exists()


def test_the_wait_for_a_locked_environment_is_limited(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("integrations.environments.INSTALL_TIMEOUT_S", 0.5)
    environments.folder.mkdir(exist_ok=True)
    with (environments.folder / "bare.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CommandFailed, match=r"another process has .*bare\.lock locked for 0\.5 s"):
            environments.prepared(Case("openai_sdk", "pip", "bare"))


def test_an_unknown_name_and_a_missing_pin_are_refused(environments: Environments) -> None:
    assert [case.id for case in chosen_cases(CASES, "openai_sdk-stream, anthropic_sdk")] == [
        "openai_sdk-stream",
        "anthropic_sdk",
        "anthropic_sdk-stream",
    ]
    with pytest.raises(ConfigError, match="no integration lang; known: .*langgraph"):
        chosen_cases(CASES, "lang")
    with pytest.raises(ConfigError, match=r"bare\.txt must pin openai to one version"):
        environments.pinned_version(replace(OPENAI, group="bare"))
