"""Hostile code in a bubblewrap sandbox: each attack is contained, and the sandbox still works after it.

No attack here would harm the machine if it succeeded: writable files are found by the kernel's access check,
and bombs are bounded by small limits.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agents.errors import SandboxError
from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.relay import MOST_CONNECTIONS
from areal_agents.sandbox.sandbox import Finished, Isolation, Mount, Sandbox
from tests.polling import until
from tests.sandbox.conftest import needs, spec_for, timed_out

SHELL = ("/bin/sh", "-c")
LIMIT_S = 20.0


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = LIMIT_S) -> Finished:
    return await sandbox.run([sys.executable, "-c", code], timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["process", "bubblewrap"])
async def test_a_fork_bomb_stops_at_the_limit_of_processes(name: str) -> None:
    needs(name)
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    isolation = await open_isolation(name, spec_for(name))
    try:
        sandbox = await isolation.start(spec_for(name))
        done = await python(sandbox, code)
        assert 40 < int(done.stdout.text()) <= 64
        # The shell itself may fail to fork at the limit, so another program waits for the time limit.
        endless = """
import subprocess, time
subprocess.Popen(["/bin/sh", "-c", "b(){ b|b& };b 2>/dev/null"])
print("begun", flush=True)
time.sleep(60)
"""
        done = await timed_out(
            lambda timeout_s: python(sandbox, endless, timeout_s=timeout_s),
            lambda done: done.stdout.text() == "begun\n",
        )
        assert done.stdout.text() == "begun\n"
        assert (await sandbox.run(["true"], timeout_s=LIMIT_S)).status == 0
    finally:
        await isolation.close()


@pytest.mark.parametrize("name", ["process", "bubblewrap"])
async def test_a_memory_bomb_is_killed_at_the_limit(name: str) -> None:
    needs(name)
    code = (
        "blocks = []\nfor n in range(1, 41):\n    blocks.append(b'x' * (32 << 20)); print(32 * n, flush=True)"
    )
    isolation = await open_isolation(name, spec_for(name))
    try:
        sandbox = await isolation.start(spec_for(name))
        done = await python(sandbox, code)
        assert done.out_of_memory and done.status != 0
        assert int(done.stdout.text().split()[-1]) < 256
        assert not (await sandbox.run(["true"], timeout_s=LIMIT_S)).out_of_memory
    finally:
        await isolation.close()


async def test_many_processes_share_the_memory_limit(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        block = b'x' * (32 << 20)
        time.sleep(600)
os.wait()  # returns when a process was killed
"""
    done = await python(sandbox, code, timeout_s=60)
    assert done.out_of_memory and not done.timed_out


async def test_files_of_the_machine_are_not_visible(
    bubblewrap: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("xyzzy")
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    for path in (
        secret,
        Path.home(),
        "/etc/shadow",
        "/var",
        "/sys",
        "/run",
        "/proc/1/root/work",
        Path(__file__),
    ):
        done = await sandbox.run(["cat", str(path)], timeout_s=LIMIT_S)
        missing = any(
            why in done.stderr.text() for why in ("No such file", "Permission denied", "Is a directory")
        )
        assert done.status != 0 and missing and not done.stdout.length, path
    # The home folder may be there as the parent of this Python's folder, but nothing else of it is.
    shown = (await sandbox.run(["find", str(Path.home()), "-maxdepth", "1"], timeout_s=LIMIT_S)).stdout.text()
    assert ".ssh" not in shown and ".bash_history" not in shown
    await sandbox.run(["ln", "-s", str(secret), "link"], timeout_s=LIMIT_S)
    with pytest.raises(SandboxError, match="there is no file link"):
        await sandbox.read("link")


async def test_only_the_working_folder_tmp_and_home_can_be_written(bubblewrap: Isolation) -> None:
    """The kernel's settings in /proc belong to root, whose processes need no capabilities to write them."""
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    code = """
import os
for top, folders, files in os.walk('/'):
    if top == '/proc':
        folders[:] = [name for name in folders if not name.isdigit()]
    if top == '/dev':
        folders[:] = []
        files[:] = []
    if top in ('/workspace', '/tmp', '/home/agent', '/dev/shm'):
        folders[:] = []
        continue
    for path in [top, *(os.path.join(top, name) for name in files)]:
        if not os.path.islink(path) and os.access(path, os.W_OK):
            print(path)
"""
    done = await python(sandbox, code, timeout_s=60)
    assert done.status == 0 and done.stdout.text() in ("", "/dev\n"), done
    done = await sandbox.run([*SHELL, "ls /dev; mknod /tmp/disk b 8 0 && echo made"], timeout_s=LIMIT_S)
    assert "made" not in done.stdout.text()
    assert set(done.stdout.text().split()) <= {
        "console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
        "tty", "urandom", "zero",
    }  # fmt: skip


async def test_no_network_and_no_socket_of_the_machine_can_be_reached(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    name = f"\0areal-agents-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {inet.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_INET, ("169.254.169.254", 80)), (socket.AF_UNIX, {name!r}),
):
    try:
        with socket.socket(family) as tried:
            tried.settimeout(3)
            tried.connect(address)
        print("reached", address)
    except OSError as error:
        print(error.errno)
print(sorted(name for _, name in socket.if_nameindex()))
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
except PermissionError: print("no raw socket")
"""
        done = await python(sandbox, code)
    lines = done.stdout.text().split("\n")
    assert "reached" not in done.stdout.text() and len(lines) == 7, done
    assert lines[4:6] == ["['lo']", "no raw socket"]


async def test_other_processes_are_not_visible_and_cannot_be_signalled(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    with subprocess.Popen(["sleep", "600"]) as other:
        code = f"""
import os
print(*(name for name in os.listdir('/proc') if name.isdigit()), flush=True)
try: os.kill({other.pid}, 9); print("signalled", flush=True)
except OSError as error: print(type(error).__name__, flush=True)
os.kill(-1, 9)
"""
        try:
            done = await python(sandbox, code)
            assert other.poll() is None
        finally:
            other.kill()
    visible, signalling = done.stdout.text().splitlines()
    # The ids in the sandbox are its own and begin at 1, so the later one of the other process is not in use.
    assert len(visible.split()) <= 3 and str(other.pid) not in visible.split()
    assert signalling == "ProcessLookupError"


async def test_privileges_cannot_be_gained(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    script = (
        "unshare -Ur true; unshare -m true; mount -t tmpfs x /tmp; chroot / true; hostname evil; su -c id"
    )
    for attempt in script.split("; "):
        assert (await sandbox.run([*SHELL, attempt], timeout_s=LIMIT_S)).status != 0, attempt
    done = await sandbox.run(
        ["grep", "-E", "CapEff|CapBnd|NoNewPrivs", "/proc/self/status"], timeout_s=LIMIT_S
    )
    values = dict(line.split(":\t") for line in done.stdout.text().splitlines())
    assert int(values["CapEff"], 16) == 0 and values["NoNewPrivs"] == "1"


async def test_a_command_that_is_root_in_the_sandbox_has_no_privileges(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap", user=0))
    done = await sandbox.run([*SHELL, "id -u; touch /usr/x /etc/x; mount -t tmpfs x /mnt"], timeout_s=LIMIT_S)
    assert done.stdout.text() == "0\n" and done.status != 0
    assert not Path("/usr/x").exists() and not Path("/etc/x").exists()


async def test_endless_output_is_bounded_and_ends_at_the_time_limit(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    done = await timed_out(
        lambda timeout_s: sandbox.run([*SHELL, "yes & exec yes >&2"], timeout_s=timeout_s),
        lambda done: min(done.stdout.length, done.stderr.length) > 65_536,
    )
    assert len(done.stdout.kept) <= 65_536 < done.stdout.length
    assert len(done.stderr.kept) <= 65_536 < done.stderr.length


async def test_files_cannot_exceed_the_disk_limit(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    for path in ("file", "/tmp/file", "/home/agent/file"):
        done = await sandbox.run(
            [*SHELL, f"head -c 200000000 /dev/zero > {path}; stat -c %s {path}; rm {path}"], timeout_s=LIMIT_S
        )
        assert "No space left" in done.stderr.text(), path
        assert int(done.stdout.text()) <= 64 << 20
    assert (
        await sandbox.run([*SHELL, "echo still > works; cat works"], timeout_s=LIMIT_S)
    ).stdout.text() == "still\n"


async def test_a_command_that_ignores_input_and_signals_ends_at_its_time_limit(bubblewrap: Isolation) -> None:
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    script = "trap '' TERM INT HUP QUIT; echo begun; while :; do sleep 1; done"
    done = await timed_out(
        lambda timeout_s: sandbox.run([*SHELL, script], timeout_s=timeout_s, stdin=b"x" * (8 << 20)),
        lambda done: done.stdout.text() == "begun\n",
    )
    assert done.stdout.text() == "begun\n"


async def test_connections_to_the_model_are_bounded(bubblewrap: Isolation) -> None:
    """A command with thousands of connections must not use up this process's open files."""
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    code = """
import socket
made = [socket.socket() for _ in range(600)]
for one in made:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", 8000))
input()  # until then they are all open
print(len(made))
"""
    # Two sockets for each open connection, and the one that accepts them; further connections wait.
    most = 2 * MOST_CONNECTIONS + 1
    inputs, outputs = os.pipe(), os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as server,
        open(inputs[1], "wb", buffering=0) as to_command,
        open(outputs[0], "rb") as from_command,
    ):
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        before = sockets()
        running = asyncio.create_task(
            sandbox.run(
                [sys.executable, "-c", code],
                timeout_s=120,
                streams=(inputs[0], outputs[1]),
                model_url=url,
            )
        )
        await until(lambda: running.done() or len(sockets() - before) >= most, within_s=60)
        await asyncio.sleep(0.2)  # without a bound, more connections would be accepted at once
        assert len(sockets() - before) == most
        to_command.write(b"\n")
        done = await running
        for fd in (inputs[0], outputs[1]):
            os.close(fd)
        assert from_command.read() == b"600\n", done
        # Connections are closed in later iterations of the event loop.
        await until(lambda: not sockets() - before, within_s=60)


def sockets() -> set[str]:
    """Return the sockets of this process by the names that the system gives them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # it was closed meanwhile, as that of the listing is
            continue
    return {name for name in found if name.startswith("socket:")}


async def test_a_mount_is_read_only_and_visible_to_only_one_command(
    bubblewrap: Isolation, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text("42")
    sandbox = await bubblewrap.start(spec_for("bubblewrap"))
    shown = await sandbox.run(["cat", "/tests/answer"], timeout_s=LIMIT_S, mounts=[Mount("/tests", tmp_path)])
    assert shown.stdout.text() == "42"
    assert (await sandbox.run(["cat", "/tests/answer"], timeout_s=LIMIT_S)).status != 0
    done = await sandbox.run(
        [*SHELL, "echo 43 > /tests/answer"], timeout_s=LIMIT_S, mounts=[Mount("/tests", tmp_path)]
    )
    assert done.status != 0 and (tmp_path / "answer").read_text() == "42"
