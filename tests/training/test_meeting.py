"""If a rank does not join, differs in a setting or ends, the others name it and its node, and end too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.inference.ports import reserved_ports
from areal_agents.training import rank_watch
from areal_agents.training.config import TrainerConfig
from areal_agents.training.rendezvous import Member
from areal_agents.training.run import _facts

WORKER = Path(__file__).parent / "meeting_worker.py"
TIMEOUT_S = 120


class Group:
    """Starts processes as ranks, each on a node of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, rank: int, count: int, *, join_s: float = TIMEOUT_S, fact: str = "1", behaviour: str = "finish"
    ) -> subprocess.Popen[str]:
        place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": self.port, "LOCAL_WORLD_SIZE": 1}
        environment = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(join_s), fact, behaviour],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment, **{name: str(value) for name, value in place.items()}},
        )
        self.started.append(process)
        return process


@pytest.fixture
def group() -> Iterator[Group]:
    with reserved_ports(1) as (port,):
        made = Group(port)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return output


def wait_until(process: subprocess.Popen[str], says: str) -> None:
    assert process.stdout is not None
    seen = ""
    while says not in (line := process.stdout.readline()):
        seen += line
        assert line, seen


def test_a_node_that_never_joins_is_named_on_every_node_that_joined(group: Group) -> None:
    first, second = group.start(0, 3, join_s=0.5, behaviour="second"), group.start(1, 3)
    outputs = [output_of(process) for process in (first, second)]
    for output in outputs:
        assert (
            "1 of 3 ranks did not register within 0.5 s (trainer.join_timeout_s): node 2 (rank 2)." in output
        )
        assert f"Start the same command there, and check that it reaches 127.0.0.1:{group.port}" in output
    assert (first.returncode, second.returncode) == (1, 1)


def test_without_node_0_the_other_ranks_report_that_they_cannot_reach_it(group: Group) -> None:
    second = group.start(1, 2, join_s=2)
    expected = f"did not reach the first rank on 127.0.0.1:{group.port} within 2 s (trainer.join_timeout_s)"
    assert f"rank 1 on node 1 ({socket.gethostname()}) {expected}" in output_of(second)
    assert second.returncode == 1


def test_ranks_with_different_settings_are_refused_before_they_begin(group: Group) -> None:
    processes = [group.start(0, 2, fact="10"), group.start(1, 2, fact="20")]
    for process in processes:
        output = output_of(process)
        assert "rank 1 on node 1" in output and "differs from rank 0" in output
        assert "trainer.steps: 20 instead of 10. All ranks need the same" in output
        assert process.returncode == 1


@pytest.mark.parametrize(("lost", "behaviour"), [(1, "wait"), (0, "wait"), (1, "compute")])
def test_the_death_of_one_rank_ends_the_others_with_an_error_that_names_it(
    group: Group, lost: int, behaviour: str
) -> None:
    """The others may be in a collective or waiting for something else."""
    processes = [group.start(rank, 2, behaviour=behaviour) for rank in range(2)]
    for process in processes:
        wait_until(process, "has met the others")
    processes[lost].send_signal(signal.SIGKILL)
    output = output_of(processes[1 - lost])
    assert f"rank {lost} on node {lost}" in output and "is lost: its process ended" in output
    assert processes[1 - lost].returncode == 1
    if behaviour == "compute":  # the collective failed, and its error is translated
        assert f"TrainingError: rank {lost} on node {lost}" in output


def test_a_rank_that_fails_alone_ends_the_others_with_its_reason(group: Group) -> None:
    first, second = group.start(0, 2, behaviour="wait"), group.start(1, 2, behaviour="fail")
    output_of(second)
    output = output_of(first)
    assert "rank 1 on node 1" in output and "failed: ValueError: no memory left" in output
    assert first.returncode == 1


def test_a_rank_that_ends_before_it_is_watched_is_reported_as_lost(group: Group) -> None:
    """The rank ends after all ranks have registered, and before it connects to the first rank."""
    first, second, third = (
        group.start(rank, 3, behaviour=behaviour)
        for rank, behaviour in enumerate(["short", "vanish", "wait"])
    )
    says = f"rank 1 on node 1 ({socket.gethostname()}) is lost: it registered, and then ended"
    assert f"TrainingError: {says}" in output_of(first)
    assert says in output_of(third)
    output_of(second)
    assert [process.returncode for process in (first, second, third)] == [1, 3, 1]


def test_ranks_that_end_one_after_the_other_are_not_reported_as_lost(group: Group) -> None:
    first, second = group.start(0, 2), group.start(1, 2)
    for process in (first, second):
        assert "lost" not in output_of(process)
        assert process.returncode == 0


def test_each_node_may_know_the_engine_of_the_teacher_by_another_url() -> None:
    here, there, late = (
        _facts(TrainerConfig(**settings), AlgorithmConfig(), seed=0)  # type: ignore[arg-type]
        for settings in (
            {"teacher_url": "http://localhost:30000"},
            {"teacher_url": "http://user:secret@gpu1:30000"},
            {"teacher_url": "http://localhost:30000", "lr": 0.5},
        )
    )
    assert here == there and "secret" not in str(there)
    assert here != late


def test_incomplete_variables_of_a_rank_are_refused() -> None:
    with pytest.raises(TrainingError, match="must all be set if one is: 'MASTER_ADDR'"):
        Member.of({"RANK": "0", "WORLD_SIZE": "2"})


def test_the_watch_listens_on_loopback_if_the_ranks_meet_there() -> None:
    with rank_watch._listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_connection_without_the_secret_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of this connection is not taken for the end of a rank."""
    member = Member(0, 1, 0, 1, "127.0.0.1", 0, "here")
    kept: dict[str, str] = {}

    class KeyStore:
        def set(self, key: str, value: str) -> None:
            kept[key] = value

    with rank_watch.RankWatch(member, KeyStore()) as watch:  # type: ignore[arg-type]
        _, port, _ = json.loads(kept["watch"])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            stranger.settimeout(30)
            assert stranger.recv(100) == b""
    assert watch.lost is None  # the thread that would have recorded a loss has ended
