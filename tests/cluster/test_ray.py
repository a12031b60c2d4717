"""The launcher for Ray on a real cluster of several raylets on this machine: `make test-cluster`.

The commands that are placed are small programs that print where they run. Ray sets variables with the raylet
of a process's node (RAY_RAYLET_PID) and the GPUs of the process, although this machine has none.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_cluster import END_S, START_S, RayCluster, ray_cluster

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.ray.config import RayConfig
from areal_agents.cluster.launchers.ray.launcher import RayLauncher
from areal_agents.errors import ConfigError
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.process_control import end_process

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
pytest.importorskip("ray", reason="Ray is not installed here: make test-cluster")

WHERE = (
    "import os; print('raylet', os.environ['RAY_RAYLET_PID'], 'GPUs', os.environ['CUDA_VISIBLE_DEVICES'], "
    "flush=True); "
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes with one GPU each, and one node with two GPUs."""
    with ray_cluster([{"cpus": 2, "gpus": 1}, {"cpus": 2, "gpus": 1}, {"cpus": 2, "gpus": 2}]) as found:
        yield found


@dataclass
class Placed:
    """The launcher's process for a command that first prints the raylet of its node and its GPUs."""

    process: subprocess.Popen[bytes]
    log: Path

    def lines(self, count: int) -> list[str]:
        """Wait for this many complete lines, and return them. Reports of a slow start do not count."""

        def written() -> list[str]:
            lines = self.log.read_text().split("\n")[:-1]
            return [line for line in lines if "is not placed yet" not in line]

        wait_until(lambda: len(written()) >= count or self.process.poll() is not None)
        lines = written()[:count]
        assert len(lines) == count, lines
        return lines

    def place(self) -> tuple[int, str]:
        """Wait until the command runs, and return the process id of its raylet, and its GPUs."""
        placed, where = self.lines(2)
        assert "placed by Ray" in placed
        found = re.fullmatch(r"raylet (\d+) GPUs (.*)", where)
        assert found is not None, where
        return int(found[1]), found[2]

    def rest(self) -> tuple[str, int]:
        """Wait for the end, and return the output after the raylet and GPUs, and the exit code."""
        code = self.process.wait(END_S)
        return self.log.read_text().partition("\nraylet ")[2].partition("\n")[2], code


@contextmanager
def placed(
    cluster: RayCluster,
    program: str,
    *,
    gpus: int = 0,
    wait_s: float = START_S,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Placed]:
    """Place a Python program on a node that Ray chooses."""
    launcher = RayLauncher(RayConfig(address=cluster.address, wait_s=wait_s))
    command = (sys.executable, "-c", WHERE + program)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb") as log:
        process = subprocess.Popen(
            launcher.command(RoleProcess("engine", 0, command, gpus=gpus)),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})},
        )
        try:
            yield Placed(process, Path(folder) / "log")
        finally:
            end_process(process, grace_s=END_S)


def test_a_process_has_the_folder_and_environment_of_its_launcher_and_gpus_from_ray(
    cluster: RayCluster, tmp_path: Path
) -> None:
    RayLauncher(RayConfig(address=cluster.address)).check()
    program = "import sys; print(os.getcwd(), os.environ['OF_THE_RUN'], file=sys.stderr); sys.exit(7)"
    environment = {"OF_THE_RUN": "yes", "CUDA_VISIBLE_DEVICES": "5"}
    with placed(cluster, program, gpus=2, cwd=tmp_path, environment=environment) as process:
        assert process.place() == (cluster.raylets[2], "0,1")
        assert process.rest() == (f"{tmp_path} yes\n", 7)


def test_a_large_output_arrives_complete_and_in_order(cluster: RayCluster) -> None:
    with placed(cluster, "[print(i) for i in range(100_000)]") as process:  # 590 kB
        out, code = process.rest()
    assert code == 0, out[-2000:]
    assert out == "".join(f"{i}\n" for i in range(100_000))


def test_sigterm_reaches_the_process_and_the_launcher_ends_with_its_exit_code(cluster: RayCluster) -> None:
    handled = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True); "
    with placed(cluster, handled + "signal.pause()") as process:
        assert process.lines(3)[2] == "ready"
        process.process.terminate()
        assert process.rest() == ("ready\n", 3)


def test_the_launcher_ends_by_the_signal_that_killed_the_process(cluster: RayCluster) -> None:
    with placed(cluster, "os.kill(os.getpid(), 9)") as process:
        assert process.rest() == ("", -signal.SIGKILL)


def test_no_process_is_left_on_the_node_when_its_launcher_is_killed(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The process has time to shut down cleanly, and its child in another session is killed."""
    program = f"""
import pathlib, signal, subprocess
folder = pathlib.Path({str(tmp_path)!r})
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (folder / "ended").write_text("in order") and exit())
(folder / "pids").write_text(f"{{os.getpid()}} {{child.pid}}\\n")
print("ready", flush=True)
signal.pause()
"""
    with placed(cluster, program) as process:
        assert process.lines(3)[2] == "ready"
        process.process.kill()
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(_runs, pids)))
    assert (tmp_path / "ended").read_text() == "in order"


def test_a_process_that_fits_on_no_node_is_refused_with_the_nodes_resources(cluster: RayCluster) -> None:
    with placed(cluster, "", gpus=3, wait_s=1.0) as process:
        assert process.process.wait(START_S) == EXIT_REFUSED
        out = process.log.read_text()
    assert "was not placed within 1 s: it waited for a node with 3 GPU and 1 CPU free" in out
    assert out.count("1 GPU and 2 CPU") == 2 and out.count("2 GPU and 2 CPU") == 1


def test_a_lost_node_ends_the_launcher_with_sigkill_and_the_next_start_uses_another(
    cluster: RayCluster,
) -> None:
    with placed(cluster, "print(os.getpid(), flush=True); import time; time.sleep(1000)", gpus=2) as process:
        lost, _ = process.place()
        pid = int(process.lines(3)[2])
        cluster.lose(lost)
        out, code = process.rest()
        assert code == -signal.SIGKILL
        assert "engine-0 has lost its node" in out
        wait_until(lambda: not _runs(pid))
    with placed(cluster, "exit(5)", gpus=1) as again:
        raylet, _ = again.place()
        assert raylet in cluster.raylets and raylet != lost
        assert again.rest() == ("", 5)


def test_a_machine_without_a_cluster_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.ray\.address: no Ray cluster answers at 127\.0\.0\.1:1 "
    ):
        RayLauncher(RayConfig(address="127.0.0.1:1")).check()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
