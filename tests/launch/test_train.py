"""`areal-agents train` as a user runs it: to the end, interrupted, killed, and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from run_logs import ends_of_logs

from areal_agents.config import load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.train import has_ended
from areal_agents.store import Store

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "search_agent" / "config.yaml"
SMALL = [
    "trial=false",
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.concurrency=8",
    "eval.episodes=6",
    "eval.every=2",
    "trainer.warmup_steps=0",
    "trainer.checkpoint_every=1",
    "algorithm.drop_equal_groups=false",
]
TIMEOUT_S = 150
MANY = 1000  # steps of a run that is stopped before its end


def start(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE), *SMALL, f"run_dir={run_dir}"]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> str:
    """Wait for the end of a run; return its output and, if it failed, the ends of its logs."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output = "it did not end in time; it printed\n" + process.communicate()[0]
    return output + ends_of_logs(run_dir_of(process)) if process.returncode else output


def run_dir_of(process: subprocess.Popen[str]) -> Path:
    assert isinstance(process.args, list)
    (argument,) = (str(word) for word in process.args if str(word).startswith("run_dir="))
    return Path(argument.removeprefix("run_dir="))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return when a condition of a run is true; end the run and fail if it is not true in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, finish(process)
        if time.monotonic() >= deadline:
            raise AssertionError("not in time; " + finish(process, timeout_s=0))
        time.sleep(0.05)


def steps_done(run_dir: Path) -> int:
    path = RunFolder(run_dir).metrics
    return path.read_text().count("\n") if path.exists() else 0


def processes_of(run_dir: Path, role: str = "") -> list[int]:
    """The ids of the processes whose command line has the run folder and, if it is given, the role."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run_dir).encode() in arguments and (not role or role.encode() in arguments):
            found.append(int(entry.name))
    return found


def wait_until_gone(run_dir: Path) -> None:
    deadline = time.monotonic() + 60
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(run_dir) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    process = start(run_dir, "trainer.steps=3", "--ablate-tool")
    output = finish(process)
    assert process.returncode == 0, output
    return run_dir, output


def test_a_finished_run_leaves_its_results_and_no_processes(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    summary = json.loads(RunFolder(run_dir).summary.read_text())
    assert summary["steps"] == 3
    assert summary["versions"] == 4
    assert summary["staleness_max"] <= 1
    assert {"before", "after"} <= set(summary["heldout"])
    assert summary["heldout_before"] == summary["heldout"]["before"]
    assert summary["heldout_without_tool"] is not None
    assert summary["sampled_tokens"] > 0
    assert RunFolder(run_dir).reward_plot.read_bytes().startswith(b"\x89PNG")
    assert "held-out reward after" in output
    assert re.search(
        r"the run in a browser, while it trains: http://127\.0\.0\.1:\d+/view/#key=view-\S{32}\n", output
    )
    assert processes_of(run_dir) == []


def test_a_finished_run_records_the_versions_of_its_steps_and_evaluations(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    rows = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3]
    with Store.open(RunFolder(run_dir).store) as store:
        assert store.group_counts()["trained"] == 6
        held_out = store.episodes(split="eval", metadata={"eval": "before"})
        assert len(held_out) == 6
        assert {(e.version_min, e.version_max) for e in held_out} == {(0, 0)}
        after = [e for e in store.episodes(split="eval", metadata={"eval": "after"}) if e.status != "aborted"]
        assert {(e.version_min, e.version_max) for e in after} == {(3, 3)}


def test_a_finished_run_is_shown_again_and_nothing_is_started(finished: tuple[Path, str]) -> None:
    run_dir, earlier = finished
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    process = start(run_dir, "trainer.steps=3")
    output = finish(process)
    assert process.returncode == 0, output
    assert "is finished; raise trainer.steps to continue" in output
    assert output.partition("summary of the run")[2] == earlier.partition("summary of the run")[2]
    process = start(run_dir, "trainer.steps=3", "--json")
    events = [json.loads(line) for line in finish(process).splitlines()]
    assert [event["event"] for event in events] == ["setup", "result"]
    assert events[1]["summary"] == json.loads(RunFolder(run_dir).summary.read_text())
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_run_has_ended_if_its_results_exist_for_the_same_configuration(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = load_config(EXAMPLE, [f"run_dir={tmp_path}"])
    save_config(config, folder.config)
    assert not has_ended(config, folder)
    folder.summary.write_text("{}")
    assert not has_ended(config, folder)  # the final model is missing
    folder.final_model.mkdir()
    assert has_ended(config, folder)
    assert not has_ended(load_config(EXAMPLE, [f"run_dir={tmp_path}", "trainer.steps=99"]), folder)


def test_a_recorded_run_is_trained_on_without_an_engine_and_exported(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    recorded, _ = finished
    run_dir = tmp_path / "sft"
    settings = [f"data.episodes={recorded}", "eval=null", "algorithm=sft", "algorithm.sft_min_score=0"]
    process = start(run_dir, *settings, "trainer.steps=2")
    output = finish(process)
    assert process.returncode == 0, output
    assert [log.name for log in (run_dir / "logs").glob("*.log")] == ["trainer.log"]
    rows = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["tokens"] > 0 for row in rows)
    assert json.loads(RunFolder(run_dir).summary.read_text())["heldout_after"] is None
    with Store.open(RunFolder(recorded).store) as store:
        assert store.group_counts()["trained"] == 6  # unchanged, because the recorded run is only read

    out = tmp_path / "model"
    command = [sys.executable, "-m", "areal_agents.cli", "export", str(run_dir), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "step-2 as a Hugging Face model to" in done.stdout
    assert {file.name for file in out.iterdir()} == {file.name for file in (run_dir / "final").iterdir()}


@pytest.mark.slow
def test_a_run_that_is_extended_with_a_changed_agent_is_evaluated_again(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir, _ = finished
    agent = Path(shutil.copytree(EXAMPLE.parent, tmp_path / "project")) / "agent.py"
    with agent.open("a") as file:
        file.write("# changed\n")
    # Up to four groups are left from the first three steps, enough for two; the sixth needs new episodes.
    process = start(run_dir, "trainer.steps=6", "eval.every=null", f"agent={agent}:search_agent")
    output = finish(process)
    assert process.returncode == 0, output
    assert "which has trained 3 steps" in output
    changed = "the agent (agent.py)"
    assert f"{changed} changed since the run was last started" in output
    assert f"{changed} changed after step 3" in RunFolder(run_dir).log("rollout").read_text()
    with Store.open(RunFolder(run_dir).store) as store:
        latest = store.latest_version()
        after = store.episodes(split="eval", status="finished", metadata={"eval": "after", "step": 6})
        fingerprint = after[0].metadata["fingerprint"]
        since = store.episodes(split="eval", status="finished", metadata={"fingerprint": fingerprint})
    base = [episode for episode in since if episode.metadata["eval"].startswith("step-")]
    assert latest is not None and latest.step == 6
    assert len(after) == 6
    assert {(e.version_min, e.version_max) for e in after} == {(latest.version, latest.version)}
    summary = json.loads(RunFolder(run_dir).summary.read_text())
    assert summary["heldout_after"] == sum(e.score or 0 for e in after) / 6
    assert len(base) == 6 and len(since) == 12
    assert summary["heldout_since_change"] == sum(e.score or 0 for e in base) / 6
    assert summary["agent_changed"] == f"{changed} changed after step 3"
    assert "gain not comparable" in output and "gain since the change" in output


def test_a_terminated_trainer_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, f"trainer.steps={MANY}", "eval=null")
    wait_for(lambda: steps_done(run_dir) >= 1, process)
    os.kill(processes_of(run_dir, "trainer")[0], signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 1
    assert "the trainer process ended with exit code 3" in output
    assert processes_of(run_dir) == []


def test_an_interrupt_before_the_first_checkpoint_names_no_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for(RunFolder(run_dir).config.exists, process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "to continue: areal-agents train" in output and "last checkpoint" not in output
    assert processes_of(run_dir) == []


def test_an_interrupt_ends_all_processes_and_the_run_can_be_continued(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, f"trainer.steps={MANY}")
    wait_for(lambda: steps_done(run_dir) >= 1, process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "to continue from the last checkpoint: areal-agents train" in output
    assert processes_of(run_dir) == []

    steps = steps_done(run_dir) + 2
    process = start(run_dir, f"trainer.steps={steps}")
    output = finish(process)
    assert process.returncode == 0, output
    rows = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions))


@pytest.mark.slow
def test_a_store_outside_the_run_folder_is_used_by_every_process(tmp_path: Path) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "elsewhere.db"
    process = start(run_dir, "trainer.steps=1", f"store.url={store}", "eval.every=1")
    output = finish(process)
    assert process.returncode == 0, output
    assert not RunFolder(run_dir).store.exists()
    summary = json.loads(RunFolder(run_dir).summary.read_text())
    assert {"before", "after"} <= set(summary["heldout"])
    with Store.open(store) as opened:
        assert opened.group_counts()["trained"] == 2


@pytest.mark.slow
def test_a_run_survives_a_crash_of_its_database(tmp_path: Path) -> None:
    """The store is in PostgreSQL, whose server crashes and is restarted during the run."""
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        store = server.new_store()
        process = start(tmp_path / "run", "trainer.steps=4", f"store.url={store}")
        wait_for(lambda: steps_done(tmp_path / "run") >= 1, process)
        server.stop(signal.SIGQUIT)
        server.start()
        output = finish(process)
        assert process.returncode == 0, output
        with Store.open(store) as opened:
            assert opened.group_counts()["trained"] == 8
            assert opened.max_version() == 4
        again = start(tmp_path / "run", "trainer.steps=1", f"store.url={store}", "--fresh")
        output = finish(again, 2 * TIMEOUT_S)
        assert again.returncode == 0, output
        with Store.open(store) as opened:
            assert opened.group_counts()["trained"] == 2


@pytest.mark.slow
def test_a_killed_trainer_is_reported_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, f"trainer.steps={MANY}")
    wait_for(lambda: steps_done(run_dir) >= 1, process)
    os.kill(processes_of(run_dir, "trainer")[0], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1
    assert "the trainer process was killed by signal 9" in output
    assert processes_of(run_dir) == []

    steps = steps_done(run_dir) + 3
    process = start(run_dir, f"trainer.steps={steps}")
    output = finish(process)
    assert process.returncode == 0, output
    with Store.open(RunFolder(run_dir).store) as store:
        assert store.group_counts()["trained"] == 2 * steps
        assert store.max_version() >= steps


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, f"trainer.steps={MANY}")
    wait_for(lambda: len(processes_of(run_dir, "rollout")) == 1, process)
    process.kill()
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]
    wait_until_gone(run_dir)


def test_a_second_run_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        for arguments in (["trainer.steps=1"], ["trainer.steps=1", "--fresh"]):
            process = start(folder.root, *arguments)
            output = finish(process)
            assert process.returncode == 1
            assert "another process is using the run folder" in output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_only_the_folder_of_a_run_can_be_set_aside(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        RunFolder(tmp_path / "mine").set_aside()
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.config.write_text("name: earlier")
    (earlier,) = folder.set_aside()
    assert (Path(earlier) / "config.yaml").read_text() == "name: earlier"
    assert not folder.root.exists()
