"""The API of the page: curves, steps, groups, pages of episodes, tokens, and messages about problems."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from view_support import ATTACK, STEPS, make_run, serving

from areal_agents.errors import ConfigError, StoreError
from areal_agents.store.pages import EpisodeFilter, episode_page
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.view.changes import Snapshots
from areal_agents.view.runs import Runs
from areal_agents.view.server import serve


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root)
    (root / "other").mkdir()  # the folder of another program
    (root / "other" / "lock").touch()
    (root / "run-eval").mkdir()
    (root / "run-eval" / "lock").touch()
    shutil.copy(root / "run" / "config.yaml", root / "run-eval" / "config.yaml")
    (root / "run-eval" / "evaluation.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def http(root: Path) -> Iterator[httpx.Client]:
    with serving(root) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may break."""
    shutil.copytree(root / "run", tmp_path / "run")
    return tmp_path / "run"


def get(http: httpx.Client, path: str, **values: Any) -> Any:
    """The API's response to a request that must succeed."""
    response = http.get(f"/api/runs/{path}" if path else "/api/runs", params=values)
    assert response.status_code == 200, response.text
    return response.json()


def ids(found: dict[str, Any]) -> list[str]:
    return [episode["id"] for episode in found["episodes"]]


def test_runs_are_listed_without_evaluations_and_folders_of_other_programs(http: httpx.Client) -> None:
    (run,) = get(http, "")["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("run", "finished", STEPS, STEPS)
    assert (run["before"], run["after"], run["problem"]) == (0.0, 1.0, None)


def test_a_run_has_its_configuration_and_counts(http: httpx.Client) -> None:
    run = get(http, "run")
    assert run["config"]["agent"] == ATTACK and run["config"]["trainer.steps"] == STEPS
    assert run["episodes"] == {"train": {"finished": 12, "failed": 1}, "eval": {"finished": 2}}


def test_curves_have_a_value_for_each_step_and_the_evaluations(http: httpx.Client) -> None:
    found = get(http, "run/curves", name=["reward_mean", "rewards_by_name/return", "mfu"])
    assert found["step"] == [1, 2, 3]
    assert found["columns"]["reward_mean"] == found["columns"]["rewards_by_name/return"] == [0.25, 0.5, 0.75]
    assert found["columns"]["mfu"] == [None, None, None]
    assert [(e["label"], e["step"], e["reward"]) for e in found["evaluations"]] == [
        ("before", 0, 0.0),
        ("after", 3, 1.0),
    ]
    assert get(http, "run/curves", name="entropy", after=2)["columns"] == {"entropy": [1 / 3]}


def test_a_step_has_its_groups_with_their_scores(http: httpx.Client) -> None:
    found = get(http, "run/steps/2")
    assert [group["id"] for group in found["groups"]] == ["lyon@2", "nice@2"]
    assert [[e["score"] for e in group["episodes"]] for group in found["groups"]] == [[0.0, 1.0]] * 2
    assert {group["state"] for group in found["groups"]} == {"trained"} and found["metrics"]["step"] == 2
    assert get(http, "run/groups/nice@2")["version"] == 2


def test_episodes_are_paged_by_position_and_none_is_lost(http: httpx.Client) -> None:
    seen, before = [], None
    while True:
        page = get(http, "run/episodes", limit=4, **({} if before is None else {"before": before}))
        seen += ids(page)
        before = page["next"]
        if before is None:
            break
    assert len(seen) == len(set(seen)) == 15 and seen[:2] == ["evil", "after"] and seen[-1] == "before"


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"split": "eval"}, ["after", "before"]),
        ({"status": "failed"}, ["evil"]),
        ({"error": "yes"}, ["evil"]),
        ({"task": "lyon", "step": 2}, ["lyon-2-1", "lyon-2-0"]),
        ({"task": "lyon", "min_reward": 1}, ["lyon-3-1", "lyon-2-1", "lyon-1-1"]),
        ({"group": "nice@1", "max_reward": 0.5}, ["nice-1-0"]),
        ({"evaluation": "after"}, ["after"]),
        ({"tool": "search", "step": 1}, ["nice-1-1", "nice-1-0", "lyon-1-1", "lyon-1-0"]),
        ({"tool": "sear"}, []),
        ({"text": "says NICE-2-0"}, ["nice-2-0"]),
        ({"text": "portugal"}, ["lyon-1-0"]),
        ({"text": "<script>window"}, ["evil"]),
        ({"text": '{"query": "Lyon"}', "step": 3, "max_reward": 0}, ["nice-3-0", "lyon-3-0"]),
        ({"text": "reasoning_content"}, []),  # names of fields are not searched
        ({"text": "100%"}, []),
    ],
)
def test_episodes_can_be_filtered(http: httpx.Client, filters: dict[str, Any], expected: list[str]) -> None:
    assert ids(get(http, "run/episodes", **filters)) == expected


def test_a_search_that_runs_out_of_time_returns_where_to_continue(root: Path) -> None:
    store = ReadOnlyStore(root / "run" / "store.db")
    now = iter(range(1000))
    found, before, pages = [], None, 0
    while pages == 0 or before is not None:
        with store.read() as connection:
            page = episode_page(
                connection, EpisodeFilter(text="Portugal"), before=before, budget_s=0, clock=lambda: next(now)
            )
        found += [episode.id for episode in page.episodes]
        before, pages = page.next, pages + 1
    assert found == ["lyon-1-0"]
    store.close()


def test_an_episode_has_its_branches_and_why_they_forked(http: httpx.Client) -> None:
    found = get(http, "run/episodes/lyon-1-0")
    first, answer, summary, again = found["turns"]
    assert answer["parent"] == again["parent"] == first["id"] and summary["parent"] is None
    assert summary["fork"] == {"turn": answer["id"], "reason": "context compacted", "diverged_at": 1}
    assert first["reply"]["tool_calls"][0]["name"] == "search"
    assert (found["before"], found["after"], found["step"]) == ("before", "lyon-1-1", 1)
    assert found["group_episodes"] == [{"id": "lyon-1-0", "score": 0.0}, {"id": "lyon-1-1", "score": 1.0}]


def test_forks_are_shown_at_their_episode_and_by_themselves(http: httpx.Client) -> None:
    forks = get(http, "run/episodes/nice-1-0")["forks"]
    assert [(fork["id"], fork["turn_id"], fork["status"], fork["score"]) for fork in forks] == [
        ("fork-1", "nice-1-0/2", "finished", 1.0),
        ("fork-2", "nice-1-0/2", "finished", 0.0),
    ]  # the third fork never sampled the turn
    assert (forks[0]["text"], forks[1]["text"], forks[0]["policy"]) == (
        "It is in France",
        ATTACK,
        "run@final",
    )
    fork = get(http, "run/episodes/fork-1")
    assert [turn["id"] for turn in fork["turns"]] == ["fork-1/1", "fork-1/2"] and fork["forks"] == []
    assert fork["forked_from"] == {
        "episode": "nice-1-0", "turn": 2, "turn_id": "nice-1-0/2", "policy": "run@final", "seed": 0,
        "is_here": True,
    }  # fmt: skip
    tokens = get(http, "run/episodes/fork-1/tokens", leaf="fork-1/2")
    assert [part["mask"] for part in tokens["parts"]] == ["evaluation"] * 2
    other = get(http, "run/episodes/lyon-1-0")
    assert other["forks"] == [] and other["forked_from"] is None
    assert "fork-1" not in ids(get(http, "run/episodes", limit=50))


def test_damaged_forks_hide_no_episode_of_the_run(copied: Path) -> None:
    (copied / "forks" / "store.db").write_text("no store")
    with serving(copied) as url, httpx.Client(base_url=url, timeout=30) as client:
        found = get(client, "run/episodes/nice-1-0")
    assert found["forks"] == [] and "forks/store.db is not a readable SQLite file" in found["forks_problem"]


def test_staleness_is_counted_from_the_version_that_the_batch_began_with(http: httpx.Client) -> None:
    found = get(http, "run/episodes/lyon-3-1")
    tokens = [token for part in _tokens(http, "lyon-3-1", "lyon-3-1/2") for token in part["versions"]]
    assert found["batch_version"] == 2 and found["max_staleness"] == 0
    assert found["staleness"] == {"0": tokens.count(2), "1": tokens.count(1)}


def test_texts_of_tokens_joined_are_what_was_sampled(http: httpx.Client) -> None:
    first, second = _tokens(http, "lyon-1-1", "lyon-1-1/2")
    assert "".join(second["texts"]).endswith("France é🎉")
    assert "".join(first["texts"][: first["prompt_tokens"]]) == "Answer.\nWhere is Lyon?\n"
    assert len(second["ids"]) - second["prompt_tokens"] == len(second["logprobs"]) == len(second["versions"])
    assert (first["mask"], second["logprobs"][0]) == ("trained", 0.0)


def _tokens(http: httpx.Client, episode: str, leaf: str) -> list[dict[str, Any]]:
    parts, start = [], 0
    while start is not None:
        found = get(http, f"run/episodes/{episode}/tokens", leaf=leaf, start=start)
        parts, start = parts + found["parts"], found["next"]
    return parts


def test_tokens_have_what_training_did_with_them(http: httpx.Client) -> None:
    recorded, other = _tokens(http, "lyon-1-1", "lyon-1-1/2")
    trained = recorded["trained"]
    assert (trained["step"], trained["clipped"][:2], trained["states"][-1]) == (1, ["high", "no"], "rejected")
    assert trained["advantage"][0] == 0.5 and trained["weight"] is None and other["trained"] is None
    differences = [a - b for a, b in zip(trained["proximal"], recorded["logprobs"], strict=True)]
    assert differences == pytest.approx([-0.25] * len(differences), abs=1e-4)


def test_a_damaged_record_of_training_is_named_and_the_tokens_are_shown(copied: Path) -> None:
    (record,) = copied.rglob("rank-0.parquet")
    record.write_bytes(b"no parquet")
    with serving(copied.parent) as url, httpx.Client(base_url=url, timeout=30) as http:
        found = get(http, "run/episodes/lyon-1-1/tokens", leaf="lyon-1-1/2")
    assert "cannot read" in found["record_problem"] and "rank-0.parquet" in found["record_problem"]
    assert [part["trained"] for part in found["parts"]] == [None, None] and found["parts"][0]["texts"]


def test_the_timeline_has_steps_versions_evaluations_and_failures(http: httpx.Client) -> None:
    found = get(http, "run/timeline")
    assert [step["wait_s"] for step in found["steps"]] == [4.0] * STEPS
    assert [version["version"] for version in found["versions"]] == [0, 1, 2, 3, 4]
    assert [one["label"] for one in found["evaluations"]] == ["before", "after"]
    assert len(found["open_episodes"]["failed"]) == 1
    counts = found["open_episodes"]["counts"]
    assert len(counts) == 600 and counts[0] == max(counts) == 1  # the episodes ran one after the other


def test_a_change_of_a_run_is_sent_as_an_event(root: Path, copied: Path) -> None:
    with serving(copied.parent) as url, httpx.Client(base_url=url, timeout=30) as http:
        with http.stream("GET", "/api/runs/run/events") as stream:
            sent = _events(stream)
            assert [next(sent), next(sent)] == [("step", {"running": False}), ("store", {"running": False})]
            with open(copied / "metrics.jsonl", "a") as file, open(copied / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                file.write('{"step": 4, "reward_mean": 1.0')  # an incomplete line is not a step yet
                file.flush()
                assert next(sent) == ("step", {"running": True})
                assert get(http, "run/curves", name="reward_mean")["step"] == [1, 2, 3]
                file.write(', "time": 1700000050.0}\n')
                file.flush()
                assert next(sent) == ("step", {"running": True})
        assert get(http, "run/curves", name="reward_mean")["columns"]["reward_mean"][-1] == 1.0


def _events(stream: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in stream.iter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, json.loads(line[5:])


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/runs/none", 404, "there is no run 'none'"),
        ("/api/runs/..", 404, "Not Found"),
        ("/api/runs/%2e%2e%2fother", 404, "Not Found"),
        ("/api/runs/other", 404, "there is no run"),
        ("/api/runs/run/episodes/none", 404, "no episode none"),
        ("/api/runs/run/steps/99", 404, "no step 99; its last is 3"),
        ("/api/runs/" + "a" * 300, 404, "there is no run"),  # no file can have this name
        ("/api/runs/run/steps/" + "9" * 20, 400, "step must be a whole number"),
        ("/api/runs/run/episodes?text=" + "a" * 2000, 400, "text must have at most 1000 characters"),
        ("/api/runs/run/groups/none", 404, "no group none"),
        ("/api/runs/run/episodes?limit=1000", 400, "limit must be from 1 to 200"),
        ("/api/runs/run/episodes?status=done", 400, "status must be one of open, finished"),
        ("/api/runs/run/episodes?min_reward=nan", 400, "min_reward must be a number"),
        ("/api/runs/run/episodes/evil/tokens", 400, "leaf is required"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e/app.py", 404, "no such file"),
    ],
)
def test_requests_that_cannot_be_answered_get_an_error_message(
    http: httpx.Client, path: str, status: int, message: str
) -> None:
    response = http.get(path)
    assert response.status_code == status and message in response.text


def test_a_broken_line_of_metrics_is_named_and_the_rest_is_shown(copied: Path) -> None:
    with open(copied / "metrics.jsonl", "a") as file:
        file.write("not json\n")
    (run,) = Runs(copied.parent).all()
    assert "line 4 of" in run.state()["problem"] and run.state()["state"] == "finished"


def test_a_store_that_is_deleted_or_replaced_while_open_is_noticed(copied: Path) -> None:
    (run,) = Runs(copied.parent).all()
    with run.store.read():
        pass
    (copied / "store.db").rename(copied / "away.db")
    with pytest.raises(StoreError, match="deleted, or not written yet"), run.store.read():
        pass
    shutil.copy(copied / "away.db", copied / "store.db")
    with run.store.read() as connection:
        assert episode_page(connection, EpisodeFilter()).newest == 15


def test_a_store_of_another_schema_says_what_to_do(copied: Path) -> None:
    with sqlite3.connect(copied / "store.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '4'")
    connection.close()
    store = ReadOnlyStore(copied / "store.db")
    with pytest.raises(StoreError, match="schema 4, .* `areal-agents episodes ls"), store.read():
        pass


def test_a_locked_store_says_so(copied: Path) -> None:
    holder = sqlite3.connect(copied / "store.db", isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with (
        pytest.raises(StoreError, match="locked by another process"),
        ReadOnlyStore(copied / "store.db").read(),
    ):
        pass
    holder.close()


def test_a_read_only_store_refuses_to_write(root: Path) -> None:
    store = ReadOnlyStore(root / "run" / "store.db")
    with pytest.raises(StoreError, match="readonly"), store.read() as connection:
        connection.exec_driver_sql("DELETE FROM turns")
    store.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no"),
        (lambda path: path.write_text("text"), "not a readable SQLite file"),
        (lambda path: path.write_bytes(b""), "not a store of areal-agents"),
        (lambda path: (path.mkdir(), (path / "config.yaml").write_text("a: 1")), "not the folder of a run"),
    ],
)
def test_a_path_without_a_run_or_a_store_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "place")
    with pytest.raises((ConfigError, StoreError), match=message):
        Runs(tmp_path / "place")


def test_a_store_alone_and_the_folder_of_one_run_are_shown(root: Path) -> None:
    (alone,) = Runs(root / "run" / "store.db").all()
    assert alone.state() == {"name": "store.db", "state": "store", "problem": None} and not alone.rows()
    assert alone.texts().of([5]) is None and "--model" in str(alone.texts().problem)
    (named,) = Runs(root / "run" / "store.db", model="quickstart").all()
    assert "".join(named.texts().of([7, 8]) or ()) == "<think></think>"
    assert [run.name for run in Runs(root / "run").all()] == ["run"]


def test_without_a_key_only_loopback_is_served(root: Path) -> None:
    with pytest.raises(ConfigError, match="set a key"):
        serve(root, host="0.0.0.0", port=0, key=None, model=None, announce=print)


def test_a_key_is_needed_once_and_is_in_no_url(root: Path) -> None:
    with serving(root, key="secret key") as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/").status_code == http.get("/static/main.js").status_code == 200
        assert http.get("/api/runs").status_code == 401
        assert http.get("/api/runs/run/events").status_code == 401
        assert http.get("/api/runs?key=secret%20key").status_code == 401
        assert http.post("/api/session", json={"key": "wrong"}).status_code == 401
        assert http.get("/api/session").json() == {"needs_key": True, "permitted": False}
        given = http.post("/api/session", json={"key": "secret key"})
        cookie = given.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "secret" not in cookie
        assert http.get("/api/runs").status_code == 200
        (name,) = http.cookies
        until, _, signature = http.cookies[name].partition(".")
        forged = httpx.Client(base_url=url, cookies={name: f"{int(until) + 1}.{signature}"}, timeout=60)
        with forged:
            assert forged.get("/api/runs").status_code == 401
        endless = httpx.Client(base_url=url, cookies={name: f"{'9' * 5000}.{signature}"}, timeout=60)
        with endless:  # Python refuses to read a number of so many digits
            assert endless.get("/api/runs").status_code == 401
        http.delete("/api/session")
        assert http.get("/api/runs").status_code == 401
        assert http.get("/api/runs", headers={"authorization": "Bearer secret key"}).status_code == 200


def test_foreign_pages_and_hosts_are_refused(http: httpx.Client) -> None:
    assert http.get("/api/runs", headers={"host": "evil.example"}).status_code == 403
    assert http.get("/api/runs", headers={"origin": "https://evil.example"}).status_code == 403
    crossed = {"sec-fetch-site": "cross-site"}
    assert http.post("/api/session", json={"key": ""}, headers=crossed).status_code == 403
    assert http.post("/api/session", content=b"key=x").status_code == 415
    assert http.post("/api/runs").status_code == 405


def test_every_response_forbids_foreign_code_frames_and_content_sniffing(http: httpx.Client) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/api/runs/none", "/nothing"):
        headers = http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_an_explanation_that_fails_says_why(http: httpx.Client) -> None:
    """The explanation is computed by a separate process, for which this run's configuration is incomplete."""
    assert (
        http.get("/api/runs/run/episodes/evil/why").json()["error"]["message"]
        == "turn and token are required"
    )
    response = http.get("/api/runs/run/episodes/evil/why", params={"turn": "none", "token": 0}, timeout=120)
    assert response.status_code == 409
    assert response.json()["error"]["message"].startswith("areal-agents why failed: ")


@pytest.mark.parametrize("row", ['{"step": 4, "step_s": 1.0}', '{"step": "4", "time": 1.0, "step_s": 1.0}'])
def test_a_row_that_lacks_a_number_is_a_fault_of_its_run(copied: Path, row: str) -> None:
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    with serving(copied.parent) as url, httpx.Client(base_url=url, timeout=30) as client:
        (run,) = get(client, "")["runs"]
        answer = client.get("/api/runs/run/timeline")
    assert run["state"] == "finished" and "line 4 of" in run["problem"]
    assert answer.status_code == 503 and "is not the row of a step" in answer.json()["error"]["message"]


def test_a_damaged_record_of_processes_is_named(copied: Path) -> None:
    (copied / "logs" / "processes.jsonl").write_text('{"time": 1.0}\n\x00\x00\n')
    with serving(copied) as url, httpx.Client(base_url=url, timeout=30) as client:
        answer = client.get("/api/runs/run/timeline")
    assert answer.status_code == 503 and "processes.jsonl is damaged" in answer.json()["error"]["message"]


async def test_streams_of_one_run_share_its_snapshots(copied: Path) -> None:
    (run,) = Runs(copied.parent).all()
    seconds = 0.0
    snapshots = Snapshots(now=lambda: seconds)
    first, *others = await asyncio.gather(*(snapshots.of(run) for _ in range(5)))
    assert all(other is first for other in others) and not first.is_running
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 1.0}\n')
    seconds = 0.9
    assert await snapshots.of(run) is first
    seconds = 1.0
    assert (await snapshots.of(run)).metrics != first.metrics
