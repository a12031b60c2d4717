"""Nothing remains of the sandboxes of a killed owner, at the latest after the next start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sandbox_cgroups import cgroups_of

from areal_agents.sandbox.bubblewrap import Bubblewrap
from areal_agents.sandbox.docker import LABEL
from areal_agents.sandbox.home import remove_leftovers
from areal_agents.sandbox.local import Local, LocalIsolation
from areal_agents.sandbox.process import Process
from areal_agents.sandbox.sandbox import Limits, SandboxSpec
from tests.sandbox.conftest import IMAGE, needs, spec_for

OWNER = """
import asyncio, sys
from pathlib import Path
from areal_agents.sandbox.bubblewrap import Bubblewrap
from areal_agents.sandbox.local import LocalIsolation
from areal_agents.sandbox.process import Process
from areal_agents.sandbox.sandbox import Limits, SandboxSpec

async def main():
    local = Bubblewrap() if sys.argv[1] == "bubblewrap" else Process()
    isolation = LocalIsolation(local, base=Path(sys.argv[2]))
    sandbox = await isolation.start(SandboxSpec(folder=Path(sys.argv[4]), limits=Limits(256, 64, None, 64)))
    script = "(setsid env -i sleep $0 &); echo > begun; exec sleep $0"
    await sandbox.run(["/bin/sh", "-c", script, sys.argv[3]], timeout_s=100)

asyncio.run(main())
"""


DOCKER_OWNER = """
import asyncio, sys
from areal_agents.sandbox.docker import DockerIsolation
from areal_agents.sandbox.sandbox import Limits, SandboxSpec

async def main():
    isolation = await DockerIsolation.open()
    sandbox = await isolation.start(SandboxSpec(image=sys.argv[1], limits=Limits(256, 64, None, 64)))
    await sandbox.run(["/bin/sh", "-c", "while :; do sleep 0.1; done"], timeout_s=100)

asyncio.run(main())
"""


def test_kill_9_leaves_no_container_of_docker() -> None:
    """The containers are removed without the next start of an owner."""
    needs("docker")

    def containers(pid: int) -> list[str]:
        form = f'{{{{.Names}}}} {{{{.Label "{LABEL}"}}}}'
        listed = ["docker", "ps", "--all", "--filter", f"label={LABEL}", "--format", form]
        lines = subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout
        return [line for line in lines.splitlines() if f"-{pid}-" in line]

    owner = subprocess.Popen([sys.executable, "-c", DOCKER_OWNER, IMAGE])
    try:
        _wait(lambda: len(containers(owner.pid)) == 1)
    finally:
        owner.kill()
        owner.wait(20)
    _wait(lambda: not containers(owner.pid))


@pytest.mark.parametrize("name", ["process", "bubblewrap"])
@pytest.mark.parametrize("keepers_too", [False, True], ids=["owner", "owner and keepers"])
def test_kill_9_leaves_nothing(name: str, keepers_too: bool, tmp_path: Path) -> None:
    needs(name)
    base, folder = tmp_path / "base", tmp_path / "folder"
    folder.mkdir()
    mark = f"{time.time_ns() % 10**9 + 10**9}"
    keepers: list[psutil.Process] = []
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name, str(base), mark, str(folder)])
    try:
        _wait(lambda: len(_sleeping(mark)) == 2)
        keepers = psutil.Process(owner.pid).children(recursive=True)
        keepers = [one for one in keepers if "launcher.py" in " ".join(one.cmdline())]
        assert len(keepers) == 2
        (home,) = base.iterdir()
        assert cgroups_of(home.name)
    finally:
        # The keepers are stopped first, so that none of them can clean up.
        for keeper in keepers if keepers_too else ():
            keeper.send_signal(signal.SIGSTOP)
        owner.kill()
        owner.wait(20)
    if keepers_too:
        for keeper in keepers:
            keeper.kill()
        assert [*base.iterdir()] == [home] and cgroups_of(home.name)
        _wait(lambda: remove_leftovers(base) == 1)
    else:
        _wait(lambda: not _sleeping(mark))
        _wait(lambda: not cgroups_of(home.name))
        _wait(lambda: remove_leftovers(base) == 1)  # the folder with the owner's lock
    _wait(lambda: not _sleeping(mark))
    assert not [*base.iterdir()]
    assert not cgroups_of(home.name)
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(base) in line]


async def test_the_next_start_removes_leftovers_but_no_running_sandbox(tmp_path: Path) -> None:
    needs("bubblewrap")
    living = LocalIsolation(Bubblewrap(), base=tmp_path)
    sandbox = await living.start(spec_for("bubblewrap"))
    dead = tmp_path / "0123456789ab"
    (dead / "x" / "closed").mkdir(parents=True)
    (dead / "x").chmod(0)
    (dead / "lock").touch()
    (tmp_path / "ba9876543210").mkdir()  # its owner was killed before it had the lock
    local: Local = Process()
    other = LocalIsolation(local, base=tmp_path)
    assert not dead.exists() and not (tmp_path / "ba9876543210").exists()
    assert (await sandbox.run(["true"], timeout_s=20)).status == 0
    await other.close()
    await living.close()
    assert not [*tmp_path.iterdir()]


async def test_a_sandbox_that_hides_its_files_is_removed(tmp_path: Path) -> None:
    """This cannot fail as root, because permissions do not apply to root."""
    local: Local = Process()
    isolation = LocalIsolation(local, base=tmp_path)
    sandbox = await isolation.start(SandboxSpec(limits=Limits(None, None, None, None)))
    script = "mkdir -p hidden/deep && chmod 0 hidden . .."
    assert (await sandbox.run(["/bin/sh", "-c", script], timeout_s=20)).status == 0
    await isolation.close()
    assert not [*tmp_path.iterdir()]


def _wait(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in 60 s"
        time.sleep(0.05)


def _sleeping(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", mark]]
