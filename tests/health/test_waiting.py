"""What a run is reported to wait for, with real servers that answer or do not, and a real store."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.health import waiting as waiting_module
from areal_agents.health.waiting import LEAST_S, LOOK_EVERY_S, Waiting
from areal_agents.store import Activity, NewEpisode, Store
from areal_agents.store.roles import Role

NOWHERE = "http://127.0.0.1:9"
NOTHING = Activity(0, None, None, 0, None, 0)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server here answers, or refuses the connection, however slow the machine is."""
    monkeypatch.setattr(waiting_module, "PROBE_S", 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_servers_that_do_not_answer_are_named(server: str) -> None:
    dead = Waiting([NOWHERE], server, groups=8).reason({}, NOTHING, started=True)
    assert "no engine answers" in dead and NOWHERE in dead
    assert "the proxy does not answer" in Waiting([server], NOWHERE, groups=8).reason(
        {}, NOTHING, started=True
    )
    unasked = Waiting((), server, groups=8).reason({}, NOTHING, started=True)
    assert unasked.endswith("of a batch, and no episode is running; see logs/rollout.log")
    half = Waiting([server, NOWHERE], server, groups=8).reason({}, NOTHING, started=True)
    assert "1 of 2 engines do not answer" in half and "no episode is running" in half


@pytest.mark.parametrize(
    ("groups", "activity", "started", "said"),
    [
        ({"complete": 3, "leased": 5}, NOTHING, True, "8 groups are ready, and the trainer has not finished"),
        (
            {"complete": 3},
            Activity(0, None, None, 0, None, 4),
            True,
            "4 ended episodes wait for their reward",
        ),
        ({}, Activity(0, None, None, 6, None, 0), False, "6 open held-out episodes"),
        ({}, NOTHING, True, "no episode is running; see logs/rollout.log"),
    ],
)
def test_each_cause_is_distinguished_from_the_others(
    server: str, groups: dict[str, int], activity: Activity, started: bool, said: str
) -> None:
    waiting = Waiting([server], server, groups=8)
    assert said in waiting.reason(groups, activity, started=started)


def test_running_episodes_are_distinguished_from_agents_that_wait(server: str, tmp_path: Path) -> None:
    waiting = Waiting([server], server, groups=8)
    with Store.open(tmp_path / "store.db") as store:
        store.open_episode(NewEpisode("a", "hash")).result()
        before = waiting.reason(store.group_counts(), store.activity(), started=True)
        turn = Turn(
            id="t",
            parent=None,
            new_messages=(Message("user", "hi"),),
            new_prompt_ids=[1],
            completion=Completion([2], [-0.5], [0], "stop"),
            reply=Message("assistant", "ok"),
            sampling=SamplingParams(8),
        )
        store.add_turn("a", turn).result()
        after = waiting.reason(store.group_counts(), store.activity(), started=True)
    assert "1 episodes are running" in before and "(a); no model call has ended yet" in before
    said = r"1 episodes are running; the oldest began \d+ s ago; the last model call ended \d+ s ago$"
    assert re.search(said, after)


def test_a_run_is_examined_only_when_a_step_takes_much_longer_than_usual(server: str, tmp_path: Path) -> None:
    now = 0.0
    waiting = Waiting([server], server, groups=8, now=lambda: now)
    rows = [{"step_s": 50.0}]

    def check() -> str | None:
        return waiting.check(rows, {}, store)

    with Store.open(tmp_path / "store.db") as store:
        assert check() is None
        now = LEAST_S + 1
        assert check() is None  # a step takes 50 s, so this is not long
        now = 201.0
        assert (said := check()) is not None and said.startswith(
            "no step for 201 s: the trainer has 0 of the 8"
        )
        now += LOOK_EVERY_S / 2
        assert check() == said
        now += LOOK_EVERY_S
        assert check() != said
        rows.append({"step_s": 200.0})
        assert check() is None


def test_missing_processes_of_a_run_on_several_machines_are_named(server: str, tmp_path: Path) -> None:
    now = 0.0
    places: list[tuple[Role, int]] = [("trainer", 0), ("trainer", 1), ("rollout", 0)]
    waiting = Waiting((), server, groups=2, places=places, now=lambda: now)
    with Store.open(tmp_path / "store.db") as store:
        ended = store.claim_role("rollout", 0, host="a", pid=1)
        store.leave_role("rollout", 0, ended.epoch)
        store.claim_role("trainer", 0, host="a", pid=2)
        assert waiting.check([], {}, store) is None
        now += LEAST_S
        said = waiting.check([], {}, store)
        assert said is not None and "no process is trainer 1, rollout 0; what started it" in said
        now += LOOK_EVERY_S
        said = waiting.check([], {"complete": 2}, store)
        assert said is not None and "no process is trainer 1; " in said, "rollout processes may have ended"
        store.claim_role("trainer", 1, host="b", pid=2)
        now += LOOK_EVERY_S
        assert "the trainer has not finished its step" in (waiting.check([], {"complete": 2}, store) or "")
