"""The commands that show runs and episodes, on a store and on its proxy."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from inspection_support import MODEL, Recorded, running_proxy
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inspection.runs import follow
from areal_agents.inspection.sources import opened
from areal_agents.launch.run_folder import RunFolder
from areal_agents.rendering import ChatRenderer


def call(*arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(params=["store", "proxy"])
def where(request: pytest.FixtureRequest, recorded: Recorded) -> str:
    return str(recorded.store) if request.param == "store" else recorded.proxy.url


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ([], ["branching", "failed", "evaluated"]),
        (["--split", "train"], ["branching", "failed"]),
        (["--status", "failed"], ["failed"]),
        (["--task", "t1", "--min-reward", "0.5"], ["branching"]),
        (["--max-reward", "0.5"], ["evaluated"]),
        (["--limit", "1"], ["evaluated"]),
        (["--group", "none"], []),
    ],
)
def test_episodes_are_listed_with_filters(
    recorded: Recorded, where: str, filters: list[str], names: list[str]
) -> None:
    rows = json.loads(call("episodes", "ls", where, "--json", *filters))
    assert [row["id"] for row in rows] == [getattr(recorded, name) for name in names]


def test_the_table_shows_scores_and_errors(recorded: Recorded, where: str) -> None:
    shown = call("episodes", "ls", where)
    assert recorded.branching in shown and "0.750" in shown and "no such tool" in shown


def test_an_episode_is_shown_with_its_branches_and_without_control_characters(
    recorded: Recorded, where: str
) -> None:
    shown = call("episodes", "show", recorded.branching, where)
    assert "reward return (episode): 0.75" in shown and "turns: 3" in shown
    assert "user: Where is Lyon?" in shown and "assistant: Lyon\ufffd[2J" in shown
    assert "\x1b[2J" not in shown
    assert "turn 3" in shown and "new root (" in shown and "· version 0" in shown
    found = json.loads(call("episodes", "show", recorded.branching, where, "--json"))
    assert [turn["parent"] for turn in found["turns"]] == [None, found["turns"][0]["id"], None]


def test_episodes_are_exported(recorded: Recorded, where: str, tmp_path: Path) -> None:
    call("episodes", "export", where, tmp_path / "all.jsonl")
    call("episodes", "export", where, tmp_path / "all.parquet")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in table]
    first = rows[0]
    assert first["score"] == 0.75 and first["task"] == {"q": "Where?"} and len(first["branches"]) == 2
    assert [m["role"] for m in first["branches"][0]] == ["user", "assistant", "tool", "assistant"]
    assert (
        first["messages"][0]["content"] == "Other" and json.loads(table[0]["messages"]) == first["messages"]
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.jsonl", "all.parquet"]


def test_a_reward_is_set_through_the_proxy_and_never_directly_in_the_store(recorded: Recorded) -> None:
    assert "0.5" in call("reward", recorded.evaluated, "0.5", recorded.proxy.url, "--name", "style")
    (row,) = json.loads(call("episodes", "ls", recorded.store, "--json", "--split", "eval"))
    assert row["score"] == 0.75
    call("reward", recorded.evaluated, "0", recorded.proxy.url, "--name", "style")
    for arguments, message in (
        ([recorded.evaluated, "1", str(recorded.store)], "give its URL instead of the store"),
        ([recorded.evaluated, "nan", recorded.proxy.url], "a finite number"),
        (["nobody", "1", recorded.proxy.url], "no episode nobody"),
        ([recorded.evaluated, "1", "nowhere.db"], "there is no store nowhere.db"),
    ):
        refused = CliRunner().invoke(app, ["reward", *arguments])
        assert isinstance(refused.exception, ArealAgentsError) and message in str(refused.exception)
    assert not Path("nowhere.db").exists()


def test_the_error_for_a_missing_admin_key_says_where_the_key_is(tmp_path: Path) -> None:
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    with running_proxy(tmp_path / "store.db", engine, admin_key="admin-key") as proxy:
        done = CliRunner().invoke(app, ["episodes", "ls", proxy.url])
        assert isinstance(done.exception, ConfigError)
        assert "needs its admin key: --admin-key" in str(done.exception)
        assert "endpoints.json" in str(done.exception)
        listed = CliRunner().invoke(app, ["episodes", "ls", proxy.url, "--admin-key", "admin-key"])
        assert listed.exit_code == 0, listed.output


def test_the_proxy_lists_episodes_in_pages(recorded: Recorded) -> None:
    first = recorded.proxy.http.get("/episodes", params={"limit": 2}).json()
    assert [e["id"] for e in first["episodes"]] == [recorded.branching, recorded.failed]
    last = recorded.proxy.http.get("/episodes", params={"limit": 2, "after": first["next"]}).json()
    assert [e["id"] for e in last["episodes"]] == [recorded.evaluated] and last["next"] is None
    for query in ("limit=0", "limit=1001", "limit=-1", "limit=x", "limit=", "split=test", "limit=%D9%A3"):
        assert recorded.proxy.http.get(f"/episodes?{query}").status_code == 400, query
    assert recorded.proxy.http.get("/episodes?after=nobody").status_code == 404


def run_folder(root: Path, *, steps: int = 3) -> RunFolder:
    folder = RunFolder(root)
    (root / "logs").mkdir(parents=True)
    config = {"model": "model", "trainer": {"steps": steps}, "store": {"url": None}}
    folder.config.write_text(yaml.safe_dump(config))
    (root / "lock").touch()
    return folder


def metrics_row(step: int) -> str:
    numbers = dict.fromkeys(
        (
            "reward_mean", "groups_solved_all", "groups_solved_some", "groups_solved_none", "staleness_mean",
            "staleness_max", "clip_fraction", "kl_behavior_k3", "step_s", "wait_s", "time",
        ),
        0.5,
    )  # fmt: skip
    return json.dumps({"step": step, **numbers}) + "\n"


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    for name in ("ended", "stopped", "busy", "odd"):
        folder = run_folder(tmp_path / name)
        folder.metrics.write_text(metrics_row(1) + metrics_row(2))
    summary = {"heldout_before": 0.25, "heldout_after": 0.75}
    (tmp_path / "ended" / "summary.json").write_text(json.dumps(summary))
    with (tmp_path / "odd" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "step_s": 1.0}\n')
    for name, rerun in (("list", "[]"), ("empty", "{}"), ("half", "{")):
        run_folder(tmp_path / name).rerun.write_text(rerun)
        with pytest.raises(ConfigError, match=r"rerun\.json"), opened(str(tmp_path / name)):
            pass
    (tmp_path / "not-a-run").mkdir()
    with RunFolder(tmp_path / "busy").locked():
        found = {run["name"]: run for run in json.loads(call("runs", tmp_path, "--json"))}
        shown = call("runs", tmp_path)
    assert {name: run["state"] for name, run in found.items()} == {
        "ended": "finished", "stopped": "stopped", "busy": "running", "odd": "stopped",
        "list": "unreadable", "empty": "unreadable", "half": "unreadable",
    }  # fmt: skip
    assert found["ended"]["step"] == 2 and "0.250 → 0.750" in shown
    problem = "metrics.jsonl is not the row of a step, in which time is a number, got None"
    assert problem in found["odd"]["problem"] and problem in shown and found["ended"]["problem"] is None
    assert "no runs" in call("runs", tmp_path / "not-a-run")


@pytest.mark.parametrize("config", ["- a", "model: x", "[", "trainer: 5"])
def test_a_folder_with_another_config_is_not_a_run(tmp_path: Path, config: str) -> None:
    folder = run_folder(tmp_path / "other")
    folder.config.write_text(config)
    assert "no runs" in call("runs", tmp_path)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        next(follow(folder.root, lines=1))
    with pytest.raises(ConfigError, match=r"has no store\.db"), opened(str(folder.root)):
        pass


def test_an_empty_file_is_refused_and_not_turned_into_a_store(tmp_path: Path) -> None:
    file = tmp_path / "empty.db"
    file.touch()
    with pytest.raises(ConfigError, match="is empty"), opened(str(file)):
        pass
    assert file.stat().st_size == 0


def test_a_run_is_followed_until_it_ends(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.metrics.write_text(metrics_row(1) + metrics_row(2))
    folder.log("rollout").write_text("2026 WARNING before\n")
    holder = open(folder.root / "lock", "w")  # noqa: SIM115
    fcntl.flock(holder, fcntl.LOCK_EX)

    def event(_: float) -> None:
        if len(folder.metrics.read_text().splitlines()) == 2:
            with open(folder.metrics, "a") as metrics, open(folder.log("rollout"), "a") as log:
                metrics.write(metrics_row(3))
                log.write("2026 INFO x\n2026 WARNING t@0[1] failed: no such tool\n2026 ERR")
        else:
            folder.summary.write_text("{}")
            holder.close()

    lines = list(follow(folder.root, lines=1, sleep=event))
    assert "step   2/3" in lines[0] and "step   3/3" in lines[1] and "no such tool" in lines[2]
    assert lines[3:] == ["the run has ended"]
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        next(follow(tmp_path, lines=1))


def test_listing_episodes_does_not_import_torch(recorded: Recorded) -> None:
    code = (
        "import sys\nfrom areal_agents.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules, 'torch is loaded'"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code, "episodes", "ls", str(recorded.store)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
