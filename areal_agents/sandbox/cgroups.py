"""Limits of memory, processes and processor time by cgroups, of version 1 or 2.

The cgroups of sandboxes are children of this process's own, or for root of the root cgroup where its own
cannot have children with limits. Where there is neither, nothing is started without the limits: the rlimits
of a process are no substitute, because RLIMIT_NPROC does nothing for root and RLIMIT_AS is per process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import SandboxUnavailable
from areal_agents.sandbox.sandbox import Limits

_OWNER = "areal-agents-owner"  # the leaf into which version 2 requires the processes of a parent to move
_TOP = "areal-agents"  # for root: the parent of the cgroups of sandboxes below the root cgroup
_PERIOD_US = 100_000
_WHAT_TO_DO = (
    "start the run under `systemd-run --user --scope -p Delegate=yes`, or as root on a machine whose "
    "/sys/fs/cgroup can be written (docker run --privileged --cgroupns=host), or set the limits memory_mb, "
    "processes and cpus to null, so that a sandbox can use up the machine"
)


@dataclass(frozen=True, slots=True)
class CgroupHome:
    """Where the cgroups of sandboxes are made.

    Attributes:
        version: 1 or 2.
        parents: the parent cgroup of each controller; with version 2 it is the same for all.
    """

    version: int
    parents: Mapping[str, Path]

    def create(self, name: str, limits: Limits) -> tuple[Path, ...]:
        """Make the cgroups of one sandbox and return their folders.

        Raises:
            SandboxUnavailable: a limit needs a controller that this process may not use.
        """
        made: list[Path] = []
        try:
            for controller, settings in _settings(self.version, limits).items():
                if controller not in self.parents:
                    raise SandboxUnavailable(f"there is no cgroup controller {controller}; {_WHAT_TO_DO}")
                folder = self.parents[controller] / name
                if folder not in made:
                    folder.mkdir()
                    made.append(folder)
                for file, value in settings.items():
                    if not file.startswith("?") or (folder / file[1:]).exists():
                        (folder / file.removeprefix("?")).write_text(value)
        except OSError as error:
            remove(made)
            raise SandboxUnavailable(f"cannot make a cgroup: {error}; {_WHAT_TO_DO}") from error
        except BaseException:
            remove(made)
            raise
        return tuple(made)


def find_home(limits: Limits) -> CgroupHome | None:
    """Return where this process can make cgroups with these limits; None if they need none.

    Raises:
        SandboxUnavailable: neither version is usable; says what to do.
    """
    needed = set(_settings(1, limits))
    if not needed:
        return None
    own = _own_cgroups(Path("/proc/self/cgroup").read_text())
    mounts = _mounts(Path("/proc/self/mountinfo").read_text())
    first = {
        name: mounts[name] / own[name].lstrip("/") for name in ("memory", "pids", "cpu") if name in mounts
    }
    if needed <= set(first):
        return CgroupHome(
            1, {name: parent if parent.is_dir() else mounts[name] for name, parent in first.items()}
        )
    if "" in mounts:
        parent = _second(mounts[""], own.get("", "/"), needed)
        return CgroupHome(2, dict.fromkeys(needed, parent))
    raise SandboxUnavailable(f"no cgroup file system is mounted; {_WHAT_TO_DO}")


def out_of_memory_kills(folders: tuple[Path, ...]) -> int:
    """Return how many processes the kernel has killed at the memory limit of a sandbox."""
    for folder in folders:
        for file in ("memory.events", "memory.oom_control"):
            if (folder / file).exists():
                words = (folder / file).read_text().split()
                return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return 0


def remove(folders: list[Path]) -> None:
    """Remove cgroups without processes."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


def _settings(version: int, limits: Limits) -> dict[str, dict[str, str]]:
    """Return the files to write, by controller; those with a question mark exist only on some machines."""
    found: dict[str, dict[str, str]] = {}
    if limits.memory_mb is not None:
        most = str(limits.memory_mb << 20)
        found["memory"] = (
            {"memory.limit_in_bytes": most, "?memory.memsw.limit_in_bytes": most}
            if version == 1
            else {"memory.max": most, "?memory.swap.max": "0", "?memory.oom.group": "1"}
        )
    if limits.processes is not None:
        found["pids"] = {"pids.max": str(limits.processes)}
    if limits.cpus is not None:
        quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
        found["cpu"] = (
            {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota}
            if version == 1
            else {"cpu.max": f"{quota} {_PERIOD_US}"}
        )
    return found


def _own_cgroups(text: str) -> dict[str, str]:
    """Read /proc/self/cgroup: the path of this process's cgroup by controller; by "" for version 2."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts(text: str) -> dict[str, Path]:
    """Read /proc/self/mountinfo: the mount point by controller; by "" for version 2.

    A mount that does not show the whole hierarchy is one of a container, whose root is its own cgroup.
    """
    found: dict[str, Path] = {}
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        point = Path(mount.split()[4].replace("\\040", " "))
        if kind == "cgroup2":
            found.setdefault("", point)
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, point)
    return found


def _second(mount: Path, own: str, needed: set[str]) -> Path:
    """Return a cgroup of version 2 whose children can have limits of the needed controllers."""
    here = mount / own.lstrip("/")
    if here.name == _OWNER:
        here = here.parent
    if here == mount and os.geteuid() == 0:
        here = mount  # the root cgroup may have processes and children
    elif os.geteuid() == 0 and not _may_move(here):
        here = mount
    try:
        if here != mount:
            _move_processes(here)
        _enable(here, needed)
        if here == mount:
            here = mount / _TOP
            here.mkdir(exist_ok=True)
            _enable(here, needed)
    except OSError as error:
        raise SandboxUnavailable(
            f"the cgroup {here} cannot have children with limits ({error.strerror}); {_WHAT_TO_DO}"
        ) from error
    return here


def _may_move(cgroup: Path) -> bool:
    """Whether every process in a cgroup belongs to this process's session: no service of the machine does."""
    session = os.getsid(0)
    for pid in (cgroup / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(pid)) != session:
                return False
    return True


def _move_processes(cgroup: Path) -> None:
    """Move the processes of a cgroup to a leaf, because one with processes cannot limit its children."""
    leaf = cgroup / _OWNER
    leaf.mkdir(exist_ok=True)
    for pid in (cgroup / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)


def _enable(cgroup: Path, needed: set[str]) -> None:
    enabled = set((cgroup / "cgroup.subtree_control").read_text().split())
    for controller in sorted(needed - enabled):
        (cgroup / "cgroup.subtree_control").write_text(f"+{controller}")
