"""Graders get none of the agent's keys, and the agent cannot write or predict a reward."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from areal_agents.errors import SandboxError
from areal_agents.sandbox.grading import grade
from areal_agents.sandbox.sandbox import Isolation
from tests.sandbox.conftest import spec_for

SHELL = ("/bin/sh", "-c")
KEY = "sk-the-key-of-the-episode"


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    folder = tmp_path / "tests"
    folder.mkdir()
    return folder


def script(folder: Path, text: str) -> list[str]:
    (folder / "test.sh").write_text(text)
    return ["/bin/sh", "/tests/test.sh"]


async def test_the_tests_see_the_agents_files_and_write_rewards(bubblewrap: Isolation, tests: Path) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    await sandbox.run([*SHELL, "echo 42 > answer"], timeout_s=20)
    argv = script(
        tests, 'grep -qx 42 answer && echo \'{"exact": 1, "short": 0.5}\' > /logs/verifier/reward.json'
    )
    assert (await grade(sandbox, argv, tests=tests, timeout_s=20)).rewards == {"exact": 1.0, "short": 0.5}
    argv = script(tests, "grep -qx 43 answer; echo $((1 - $?)) > /logs/verifier/reward.txt")
    assert (await grade(sandbox, argv, tests=tests, timeout_s=20)).rewards == {"reward": 0.0}


async def test_the_agents_key_does_not_reach_the_tests(bubblewrap: Isolation, tests: Path) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"http://127.0.0.1:8000/e/{KEY}/v1"}
    stays = 'test "$OPENAI_API_KEY" && (setsid sleep 1000 &) ; echo left'
    done = await sandbox.run(
        [*SHELL, stays], timeout_s=20, environment=environment, model_url="http://127.0.0.1:9/v1"
    )
    assert done.stdout.text() == "left\n"
    look = (
        "cat /proc/*/environ /proc/*/cmdline | tr '\\0' ' '; env; grep -rs sk-the-key / --include='*' "
        "--exclude-dir=proc --exclude-dir=usr --exclude-dir=root --exclude-dir=work --exclude-dir=lib; "
        "grep -c : /proc/net/tcp; echo 1 > /logs/verifier/reward.txt"
    )
    graded = await grade(sandbox, script(tests, look), tests=tests, timeout_s=60)
    assert KEY not in graded.finished.stdout.text() and "8000" not in graded.finished.stdout.text()
    assert graded.finished.stdout.length > 100


async def test_rewards_that_the_agent_wrote_do_not_count(bubblewrap: Isolation, tests: Path) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    forged = "for f in /logs/verifier logs/verifier; do mkdir -p $f; echo 1 > $f/reward.txt; done"
    await sandbox.run([*SHELL, forged], timeout_s=20)
    with pytest.raises(
        SandboxError, match="there is no /logs/verifier/reward.json or reward.txt.*ended with 3: broken"
    ):
        await grade(sandbox, script(tests, "echo broken >&2; exit 3"), tests=tests, timeout_s=20)


async def test_no_process_of_the_agent_runs_during_the_tests(bubblewrap: Isolation, tests: Path) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    mark = f"{time.time_ns() % 10**9 + 10**9}"
    forger = "while :; do echo 1 > /logs/verifier/reward.txt; echo forged > work; done 2>/dev/null"
    await sandbox.run([*SHELL, f"(setsid sh -c '{forger}' {mark} &); sleep 0.2"], timeout_s=20)
    check = "rm -f work; sleep 0.3; test -e work; echo $(( $? - 1 )) > /logs/verifier/reward.txt"
    assert (await grade(sandbox, script(tests, check), tests=tests, timeout_s=20)).rewards == {"reward": 0.0}
    assert not [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or ())]


async def test_rewards_are_read_from_files_only(bubblewrap: Isolation, tests: Path, tmp_path: Path) -> None:
    secret = tmp_path / "number"
    secret.write_text("7")
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    for make, why, timeout_s in (
        (f"ln -s {secret} /logs/verifier/reward.txt", "Too many levels of symbolic links", 60),
        ("mkfifo /logs/verifier/reward.txt", "is not a file", 60),
        ("head -c 2000000 /dev/zero > /logs/verifier/reward.txt", "is longer than", 60),
        ("echo nan > /logs/verifier/reward.txt", "must be a finite number", 60),
        ("echo '{\"a\": true}' > /logs/verifier/reward.json", "the reward 'a' is True", 60),
        ("sleep 60", "were killed at their time limit", 0.5),
    ):
        with pytest.raises(SandboxError, match=why):
            await grade(sandbox, script(tests, make), tests=tests, timeout_s=timeout_s)
