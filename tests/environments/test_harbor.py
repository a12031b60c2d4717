"""Task folders of Harbor, played in real sandboxes through the running proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from environment_support import REQUEST_S, Heard, handle
from integration_support import Stack

from areal_agents.environments.adapters.harbor_folder import HarborTask
from areal_agents.environments.config import EnvironmentConfig
from areal_agents.errors import TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import environment_agent, environment_tasks
from areal_agents.sandbox.docker_images import engine_answers
from integrations.conversations import call

DOCKERFILE = """
# The tools of the task.
FROM python:3.12-slim AS base
ENV GREETING=hello \\
    NAME="the world"
WORKDIR /app
COPY data/ data/
COPY numbers.txt ./
"""
TEST = """
ls /tests > seen
if [ "$EXPECTED" = "$(cat sum.txt)" ]; then echo '{"reward": 1, "lines": 2}' > /logs/verifier/reward.json
else echo 0.25 > /logs/verifier/reward.txt; fi
"""


needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="make sandbox-tools installs bwrap"
)


def make_task(folder: Path, *, dockerfile: str = DOCKERFILE, test: str = TEST, toml: str = "") -> Path:
    """Write the folder of a task in which numbers must be added."""
    (folder / "environment" / "data").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(
        'version = "1.0"\n[metadata]\ndifficulty = "easy"\n'
        f'[verifier]\ntimeout_sec = 20\nenv = {{EXPECTED = "6"}}\n{toml}'
    )
    (folder / "instruction.md").write_text("Add the numbers in numbers.txt and write sum.txt.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "numbers.txt").write_text("1\n2\n3\n")
    (folder / "environment" / "data" / "more.txt").write_text("more")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


def command(text: str) -> str:
    return call("bash", json.dumps({"command": text}))


def all_played(stack: Stack, use: str, episodes: list[tuple[str, Heard]]) -> list[Any]:
    """Play episodes one after another, and return their rewards or exceptions."""

    async def play() -> list[Any]:
        agent = environment_agent(EnvironmentConfig(use=use))
        try:
            async with asyncio.timeout(REQUEST_S):
                return [
                    (
                        await asyncio.gather(
                            agent.run({"id": id}, handle(stack, said)), return_exceptions=True
                        )
                    )[0]
                    for id, said in episodes
                ]
        finally:
            await agent.close()

    return asyncio.run(play())


@needs_bubblewrap
def test_the_model_works_in_a_sandbox_and_the_tests_reward_it(stack: Stack, tmp_path: Path) -> None:
    make_task(tmp_path / "sum")
    right = Heard(
        command("pwd; ls; echo $GREETING $NAME; cat data/more.txt; ls /tests /logs"),
        command("head -c 50000 /dev/zero | tr '\\\\0' a"),
        call("read_file", '{"path": "numbers.txt"}') + call("bash", '{"cmd": "ls"}'),
        command("echo wrong > sum.txt; echo 4 >> numbers.txt; echo 1 > /logs/verifier/reward.txt; exit 3"),
        call("write_file", '{"path": "sum.txt", "content": "6"}'),
        "Done.",
    )
    slow = Heard(command("sleep 60"), "Done.")
    use = f"harbor:{tmp_path}?isolation=bubblewrap"
    assert all_played(stack, use, [("sum", right)]) == [1.0]
    assert all_played(stack, f"{use}&command_timeout_s=0.5", [("sum", slow)]) == [0.25]
    looked, long, read, failed, written = right.news[1:]
    assert "/app" in looked and "hello the world" in looked and "numbers.txt" in looked and "more" in looked
    assert "test.sh" not in looked and "verifier" not in looked
    assert "1\n2\n3" in read.replace("\\n", "\n") and "command must be a string" in read
    assert "[exit status" in failed and "written" in written
    assert "bytes before this are left out" in long and "[killed after 0.5 s]" in slow.news[1]
    assert (tmp_path / "sum" / "environment" / "numbers.txt").read_text() == "1\n2\n3\n"


@needs_bubblewrap
def test_an_agent_that_runs_out_of_time_is_graded_and_tests_without_a_reward_fail(
    stack: Stack, tmp_path: Path
) -> None:
    # The time limit includes the reply of the model and the start of its command, so it is not shorter.
    make_task(tmp_path / "late", toml="[agent]\ntimeout_sec = 10\n")
    make_task(tmp_path / "broken", test="echo no reward here; exit 4\n")
    make_task(tmp_path / "two", test='echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json\n')
    late, broken, two = all_played(
        stack,
        f"harbor:{tmp_path}?isolation=bubblewrap",
        [
            ("late", Heard(command("echo 6 > sum.txt; sleep 60"))),
            ("broken", Heard("Done.")),
            ("two", Heard("Done.")),
        ],
    )
    assert late == 1.0
    assert isinstance(broken, TaskEnvironmentError) and "ended with 4: no reward here" in str(broken)
    assert isinstance(two, TaskEnvironmentError) and "gave the rewards a, b; name one: score=" in str(two)
    assert all_played(
        stack, f"harbor:{tmp_path}?score=b&isolation=bubblewrap", [("two", Heard("Done."))]
    ) == [2.0]


def test_docker_plays_a_task_in_the_image_of_its_dockerfile(stack: Stack, tmp_path: Path) -> None:
    """The image is built once for all episodes, and its tests see what the agent did as root."""
    if not engine_answers():
        pytest.skip("no Docker engine answers; make test-docker starts one for its tests")
    base = os.environ.get("AREAL_AGENTS_TEST_IMAGE", "python:3.11-slim")
    made = f"FROM {base}\nRUN echo $$ > /made\nWORKDIR /app\nCOPY numbers.txt ./\n"
    test = (
        TEST
        + "cp /etc/mine /logs/verifier/kept 2>/dev/null; [ -e /made ] || echo 9 > /logs/verifier/reward.txt\n"
    )
    make_task(tmp_path / "sum", dockerfile=made, test=test, toml="[environment]\nmemory_mb = 256\n")
    make_task(tmp_path / "broken", dockerfile=made + "RUN echo no such package >&2; exit 7\n")
    other = ["docker", "build", "--tag", "localhost:1/absent:other", "-"]
    subprocess.run(other, input=b"FROM scratch\nLABEL a=b\n", check=True, capture_output=True, timeout=60)
    # Without a tag this is the image `latest`, which does not exist here and is pulled.
    make_task(tmp_path / "absent", toml="[environment]\ndocker_image = 'localhost:1/absent'\n")
    right = Heard(
        command("pwd; ls; id -u; cat /made; touch /etc/mine; ls /tests; cat /proc/net/dev | wc -l"),
        call("write_file", '{"path": "sum.txt", "content": "6"}'),
        "Done.",
    )
    again = Heard(command("ls /etc/mine sum.txt; cat /made"), "Done.")
    use = f"harbor:{tmp_path}?isolation=docker"
    exited = ["docker", "ps", "--all", "--quiet", "--filter", "status=exited"]
    before = subprocess.run(exited, check=True, capture_output=True, timeout=60).stdout
    won, lost, broken, absent = all_played(
        stack, use, [("sum", right), ("sum", again), ("broken", Heard("Done.")), ("absent", Heard("Done."))]
    )
    assert (won, lost) == (1.0, 0.25)
    shown, first = right.news[1], again.news[1]
    assert "/app" in shown and "numbers.txt" in shown and "test.sh" not in shown
    assert shown.replace("\\n", "\n").splitlines().count("0") == 1  # root
    assert "No such file" in first  # nothing is left of the first episode
    assert isinstance(broken, TaskEnvironmentError) and "task broken: docker build: " in str(broken)
    assert "returned a non-zero code: 7" in str(broken) or "exit code: 7" in str(broken)
    assert subprocess.run(exited, check=True, capture_output=True, timeout=60).stdout == before
    assert isinstance(absent, TaskEnvironmentError) and "task absent: docker pull: " in str(absent)


def test_invalid_options_of_isolations_are_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "task")
    for options, fault in (
        ("isolation=podman", "isolation must be auto, docker, bubblewrap, got 'podman'"),
        ("isolation=bubblewrap&network=true", "network=true needs Docker"),
        ("isolation=docker&ignore_dockerfile=true", "ignore_dockerfile is for bubblewrap"),
    ):
        with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
            environment_tasks(EnvironmentConfig(use=f"harbor:{tmp_path}?{options}"), "train")


def test_a_task_that_restricts_the_network_gets_none(tmp_path: Path) -> None:
    for number, (toml, may) in enumerate(
        (
            ("", True),
            ("[environment]\nallow_internet = false\n", False),
            ("[agent]\nnetwork_mode = 'allowlist'\n", False),
            ("[environment]\nnetwork_mode = 'public'\n", True),
        )
    ):
        task = HarborTask.read(make_task(tmp_path / str(number), toml=toml))
        assert task.may_have_network is may, toml


def test_tasks_are_listed_and_held_out_by_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_task(tmp_path / name)
    use = EnvironmentConfig(use=f'harbor:{tmp_path}?held_out=["b"]')
    assert [row["id"] for row in environment_tasks(use, "train")] == ["a", "c"]
    (held_out,) = environment_tasks(use, "eval")
    assert held_out == {"id": "b", "instruction": "Add the numbers in numbers.txt and write sum.txt."}


@pytest.mark.parametrize(
    ("dockerfile", "refused"),
    [
        (DOCKERFILE + "RUN apt-get update && \\\n  apt-get install -y git\n", "line 9: RUN apt-get update"),
        ("FROM a\nWORKDIR /app\nCOPY --from=b /x /app\n", "line 3: COPY --from=b"),
        ("FROM a\nWORKDIR /app\nCOPY ../tests /app\n", "line 3: COPY ../tests"),
        ("FROM a\nWORKDIR /app\nCOPY none.txt /app/\n", "line 3: COPY none.txt"),
        (
            "FROM a\nWORKDIR /app\nCOPY numbers.txt /etc/passwd\n",
            "copied to /etc/passwd, outside of the WORKDIR",
        ),
        ("FROM a\nFROM b\nWORKDIR /app\n", "line 2: FROM b"),
        ("FROM a\nCOPY numbers.txt /app/\n", "no WORKDIR"),
        ("FROM a\nWORKDIR $HOME\n", "line 2: WORKDIR $HOME"),
        ("FROM a\nUSER me\nWORKDIR /app\n", "line 2: USER me"),
    ],
)
def test_a_dockerfile_that_needs_docker_is_refused_with_its_line(
    tmp_path: Path, dockerfile: str, refused: str
) -> None:
    make_task(tmp_path / "task", dockerfile=dockerfile)
    with pytest.raises(TaskEnvironmentError, match=re.escape(refused)):
        environment_tasks(EnvironmentConfig(use=f"harbor:{tmp_path}?isolation=bubblewrap"), "train")
    use = f"harbor:{tmp_path}?held_out=0&ignore_dockerfile=true"
    assert [row["id"] for row in environment_tasks(EnvironmentConfig(use=use), "train")] == ["task"]


def test_copies_follow_the_rules_of_docker(tmp_path: Path) -> None:
    def files(lines: str) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        task = HarborTask.read(make_task(folder / "task", dockerfile=f"FROM a\nWORKDIR /app\n{lines}\n"))
        assert not task.recipe.refused
        (folder / "app").mkdir()
        task.recipe.copy_into(folder / "app")
        return sorted(
            str(path.relative_to(folder / "app")) for path in (folder / "app").rglob("*") if path.is_file()
        )

    assert files("COPY . .") == ["Dockerfile", "data/more.txt", "numbers.txt"]
    assert files("COPY data /app/") == ["more.txt"]
    assert files("COPY numbers.txt other.txt") == ["other.txt"]
    assert files("ENV D=in\nCOPY data/*.txt numbers.txt $D/") == ["in/more.txt", "in/numbers.txt"]
    assert files("WORKDIR sub\nCOPY numbers.txt .") == ["numbers.txt"]


@pytest.mark.parametrize("name", ["instruction.md", "tests", "environment", "environment/Dockerfile"])
def test_a_task_with_a_link_to_outside_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Such a link could bring files of this machine into the prompt, the sandbox or the image."""
    make_task(tmp_path / "tasks" / "task")
    part = tmp_path / "tasks" / "task" / name
    outside = tmp_path / "outside"
    if part.exists():
        part.rename(outside)
    else:
        part.parent.mkdir(exist_ok=True)
        outside.mkdir()
    part.symlink_to(outside)
    with pytest.raises(TaskEnvironmentError, match=f"{name} is a link to outside of the folder"):
        environment_tasks(EnvironmentConfig(use=f"harbor:{tmp_path / 'tasks'}"), "train")


@pytest.mark.parametrize(
    ("toml", "fault"),
    [
        ("[[steps]]\nname = 'one'\n", "has steps, which is not supported"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[agent]\ntimeout_sec = -1\n", "timeout_sec must be a number above 0, got -1"),
        ("[environment]\nmemory_mb = '4G'\n", "memory_mb must be a number above 0, got '4G'"),
        ("[environment]\ncpus = 0\n", "cpus must be a number above 0, got 0"),
        ("[agent\n", "cannot be read"),
        ("[environment]\nenv = 'A=1'\n", "env must be a table, got 'A=1'"),
        ("[agent]\nuser = 'me'\n", "has agent.user, which is not supported"),
        ("[environment.env]\nKEY = '${KEY}'\n", "variables of this machine in environment.env"),
    ],
)
def test_unsupported_and_invalid_settings_of_a_task_are_named(tmp_path: Path, toml: str, fault: str) -> None:
    make_task(tmp_path / "task", toml=toml)
    with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
        environment_tasks(EnvironmentConfig(use=f"harbor:{tmp_path}"), "train")
    with pytest.raises(TaskEnvironmentError, match=r"there is no task.toml"):
        environment_tasks(EnvironmentConfig(use=f"harbor:{tmp_path / 'task' / 'tests'}"), "train")
