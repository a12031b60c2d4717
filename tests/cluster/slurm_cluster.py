"""A Slurm cluster for tests: Debian's packages, a controller and some emulated nodes on this machine.

Each node is a slurmd in a PID namespace of its own, so that killing the first process of the namespace ends
the node's daemon and every process of its job steps at once, as a power failure would. All state is in a
temporary folder, and all processes end with the tests, even if the tests are killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from areal_agents.inference.ports import reserved_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "setpriv")
CPUS = 4  # of each node, regardless of the machine
GPU_FILES = ("/dev/null", "/dev/zero")  # Slurm allocates device files without checking what they are
START_S = 60.0
COMMAND_S = 120.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONFIG = """
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdTimeout={missing_s}
SlurmdParameters=config_overrides
KillWait=20
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# An unused cgroup hierarchy: slurmd requires one, and a container may not have the system's.
_CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupMountpoint={folder}/cgroup
CgroupAutomount=no
"""


class SlurmCluster:
    """A controller and nodes named node1, node2, …, each with 4 CPUs and 2 emulated GPUs.

    Args:
        missing_s: how long a node does not answer until Slurm marks it as down.

    Attributes:
        environment: the variables with which Slurm's commands find this cluster.
    """

    def __init__(self, nodes: int = 2, *, missing_s: int = 6) -> None:
        # Not in pytest's folder: its path is too long for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="areal-agents-slurm-"))
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.environment = {"PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._missing_s = missing_s
        self._held = ExitStack()  # the ports, while the daemons use them

    @staticmethod
    def missing() -> str | None:
        """Return why a cluster cannot be started here; None if it can."""
        lacking = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
        if lacking:
            return f"{', '.join(lacking)} not installed: make cluster-tools"
        if os.geteuid() != 0:
            return "emulated nodes of Slurm need root"
        tried = subprocess.run([*_OWN_PIDS, "true"], capture_output=True, text=True, timeout=COMMAND_S)
        return f"no PID namespace can be made: {tried.stderr.strip()}" if tried.returncode else None

    def __enter__(self) -> SlurmCluster:
        with ExitStack() as on_failure:
            on_failure.callback(self._end)
            self._write_files()
            munged = [
                "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
                *(f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")),
                f"--socket={self.folder}/munge.socket",
            ]  # fmt: skip
            self._start("munged", munged)
            self.until((self.folder / "munge.socket").exists, "munged to listen")
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: set(self.node_states().values()) == {"idle"}, "the nodes to be idle")
            on_failure.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def start_controller(self) -> None:
        """Start the controller, for the first time or after `stop_controller`."""
        self._start("slurmctld", ["slurmctld", "-D"])

    def stop_controller(self) -> None:
        """End the controller, which saves its state; the nodes keep running."""
        daemon = self._daemons.pop("slurmctld")
        for child in Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
        daemon.wait(timeout=COMMAND_S)

    def start_node(self, node: str) -> None:
        """Start a node, for the first time or after `kill_node`; it registers with the controller."""
        # The shell is the namespace's first process, and reaps orphaned processes.
        self._start(node, ["sh", "-c", f"slurmd -D -N {node} & wait"])

    def kill_node(self, node: str, *, noticed: bool = False) -> None:
        """End a node's daemon and the processes of its steps by SIGKILL.

        Slurm detects the loss within half a minute, unless `missing_s` is longer. With `noticed`, the node is
        marked as down at once.
        """
        _kill_namespace(self._daemons.pop(node))
        if noticed:
            self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def command(
        self, *arguments: str, environment: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm in the cluster's folder."""
        done = subprocess.run(
            arguments, cwd=self.folder, env={**os.environ, **self.environment, **(environment or {})},
            capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, such as idle or down; a * follows if it does not respond."""
        done = self.command("sinfo", "--noheader", "--Node", "--format=%N %t", check=False)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return {name: state for name, state in (line.split() for line in lines)}

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job from the controller: JobState, NodeList, Restarts, ExitCode and more."""
        text = self.command("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def until(self, condition: Callable[[], object], what: str, *, timeout_s: float = START_S) -> None:
        """Wait until a condition holds. Raise AssertionError with the ends of all logs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{self.logs()}"
            time.sleep(0.1)

    def pids(self) -> set[int]:
        """Return the process ids of the cluster: those of its daemons and jobs, and of their descendants."""
        wanted = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # the process has ended
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
        return found

    def logs(self) -> str:
        """Return the ends of the logs of all daemons."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def _write_files(self) -> None:
        controller, *ports = self._held.enter_context(reserved_ports(1 + len(self.nodes)))
        for name in ("state", "cgroup", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        host = socket.gethostname().partition(".")[0]
        config = _CONFIG.format(host=host, port=controller, folder=self.folder, missing_s=self._missing_s)
        for node, port in zip(self.nodes, ports, strict=True):
            config += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
                f"RealMemory=4000 Gres=gpu:{len(GPU_FILES)}\n"
            )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in GPU_FILES))
        (self.folder / "cgroup.conf").write_text(_CGROUPS.format(folder=self.folder))

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}-output.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*_OWN_PIDS, *command],
                cwd=self.folder, env={**os.environ, **self.environment}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _end(self) -> None:
        while self._daemons:
            _kill_namespace(self._daemons.popitem()[1])
        self._held.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# A process started with this prefix is killed, with all its descendants, when the starting thread ends.
_OWN_PIDS = (
    "setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
)  # fmt: skip


def _kill_namespace(unshare: subprocess.Popen[bytes]) -> None:
    """Kill the first process of a namespace; `unshare` ends when the kernel has ended all the others too."""
    pid = unshare.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    try:
        unshare.wait(timeout=COMMAND_S)
    finally:
        unshare.kill()
