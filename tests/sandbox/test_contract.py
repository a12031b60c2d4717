"""The behavior that all isolations have in common."""

from __future__ import annotations

import asyncio
import io
import os
import select
import time
from pathlib import Path

import psutil
import pytest

from areal_agents.errors import SandboxError
from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.sandbox import Finished, Isolation, SandboxSpec
from tests.sandbox.conftest import spec_for, timed_out

SHELL = ("/bin/sh", "-c")


async def test_a_command_gets_its_input_its_variables_and_the_working_folder(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name, environment={"A": "1"}))
    script = 'cat; echo "$A$B" "$SECRET"; pwd; echo oops >&2; exit 3'
    done = await sandbox.run([*SHELL, script], timeout_s=20, environment={"B": "2"}, stdin=b"hello\n")
    assert (done.status, done.timed_out, done.out_of_memory) == (3, False, False)
    assert done.stdout.text() == f"hello\n12 \n{sandbox.workdir}\n"
    assert done.stderr.text() == "oops\n"
    assert (await sandbox.run([*SHELL, 'echo "$B"'], timeout_s=20)).stdout.text() == "\n"


async def test_a_caller_exchanges_data_with_a_running_command(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    inputs, outputs = os.pipe(), os.pipe()

    async def written() -> bytes:
        readable, _, _ = await asyncio.to_thread(select.select, [outputs[0]], [], [], 60)
        assert readable, "the command wrote nothing"
        return os.read(outputs[0], 99)

    script = "echo ready; read said; echo got $said; echo oops >&2"
    streams = (inputs[0], outputs[1])
    running = asyncio.create_task(sandbox.run([*SHELL, script], timeout_s=60, streams=streams))
    assert await written() == b"ready\n"
    os.write(inputs[1], b"hello\n")
    done = await running
    assert await written() == b"got hello\n"
    assert (done.status, done.stdout.length, done.stderr.text()) == (0, 0, "oops\n")
    for fd in (*inputs, *outputs):  # the call closed none of them
        os.close(fd)


@pytest.mark.parametrize("isolation", ["bubblewrap", "docker"], indirect=True)
async def test_variables_of_a_command_reach_no_program_of_the_machine(
    isolation: Isolation, tmp_path: Path
) -> None:
    """A task that sets such variables could make the loader or the client of Docker run its code."""
    given = {
        "LD_DEBUG": "files",
        "LD_DEBUG_OUTPUT": f"{tmp_path}/loaded",  # a file for each program that reads the variable
        "DOCKER_HOST": "tcp://127.0.0.1:9",
        "HOME": "/tmp",
        "SAID": "$(echo 1) \"'\n`",
        "not-for.shells": "1",
    }
    sandbox = await isolation.start(spec_for(isolation.name, environment=given))
    done = await sandbox.run(["env"], timeout_s=20)
    assert not [*tmp_path.iterdir()]
    for name, value in given.items():
        assert name == "not-for.shells" or f"{name}={value}\n" in done.stdout.text()
    assert "AREAL_AGENTS" not in done.stdout.text()


async def test_variables_of_the_owner_do_not_reach_a_command(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNERS_SECRET", "xyzzy")
    sandbox = await isolation.start(spec_for(isolation.name))
    done = await sandbox.run(
        [*SHELL, "env; cat /proc/1/environ /proc/self/environ 2>/dev/null"], timeout_s=20
    )
    if isolation.name == "process":  # it can read /proc of this machine
        done = await sandbox.run(["env"], timeout_s=20)
    assert "xyzzy" not in done.stdout.text()


async def test_a_command_inherits_no_descriptor_of_its_keeper(isolation_name: str) -> None:
    """The owner's lock is passed to the keepers by its number, which may be high."""
    held = [os.dup(0) for _ in range(40)]
    opened = await open_isolation(isolation_name, spec_for(isolation_name))
    try:
        sandbox = await opened.start(spec_for(isolation_name))
        done = await sandbox.run([*SHELL, "ls -l /proc/self/fd"], timeout_s=20)
    finally:
        for fd in held:
            os.close(fd)
        await opened.close()
    numbers = {line.split(" -> ")[0].split()[-1] for line in done.stdout.text().splitlines()[1:]}
    assert numbers == {"0", "1", "2", "3"}, done.stdout.text()  # 3 is the listing itself


async def test_a_sandbox_works_in_a_copy_of_its_folder(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("original")
    (tmp_path / "removed").write_text("still here")
    spec = spec_for(isolation.name, folder=tmp_path)
    first, second = [await isolation.start(spec) for _ in range(2)]
    script = "cat deep/file; echo changed > deep/file; rm removed; mv deep moved; mkdir deep; ls deep"
    done = await first.run([*SHELL, script], timeout_s=20)
    assert done.stdout.text() == "original" and done.status == 0, done.stderr.text()
    assert await first.read("moved/file") == b"changed\n"  # files persist between commands
    assert await second.read("deep/file") == b"original"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "removed"]
    assert (tmp_path / "deep" / "file").read_text() == "original"


async def test_files_are_written_and_read_whole(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    data = bytes(range(256)) * 1000
    await sandbox.write("new/folder/file", data)
    assert await sandbox.read("new/folder/file") == data
    with pytest.raises(SandboxError, match="longer than 1000 bytes"):
        await sandbox.read("new/folder/file", most_bytes=1000)
    with pytest.raises(SandboxError, match="there is no file nowhere"):
        await sandbox.read("nowhere")
    await sandbox.run(["mkfifo", "pipe"], timeout_s=20)
    with pytest.raises(SandboxError, match="there is no file pipe"):
        await sandbox.read("pipe")
    with pytest.raises(SandboxError, match="cannot write"):
        await sandbox.write("new", b"a folder is there")


async def test_the_end_of_long_output_is_kept(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    log = io.BytesIO()
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo end"
    done = await sandbox.run([*SHELL, script], timeout_s=20, kept_bytes=10, log=log)
    assert done.stdout.kept == b"xxxxxxend\n" and done.stdout.length == 3_000_004
    assert done.stdout.is_cut and done.stdout.text().startswith("[2999994 bytes before this are left out]\n")
    assert len(log.getvalue()) == 1 << 20
    assert not done.stderr.is_cut


async def test_a_command_ends_at_its_time_limit_with_all_of_its_processes(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    mark = f"{time.time_ns() % 10**9 + 10**9}"  # a duration that no other process sleeps
    script = f"setsid sleep {mark} & (sleep {mark} &) ; env -i sleep {mark} & echo begun; sleep {mark}"

    async def run(timeout_s: float) -> Finished:
        done = await sandbox.run([*SHELL, script], timeout_s=timeout_s)
        assert not _sleeping(mark)
        return done

    done = await timed_out(run, lambda done: done.stdout.text() == "begun\n")
    assert done.stdout.text() == "begun\n"
    assert (await sandbox.run(["true"], timeout_s=20)).status == 0


async def test_processes_that_a_command_leaves_running_are_killed_when_it_ends(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    mark = f"{time.time_ns() % 10**9 + 10**9}"
    done = await sandbox.run([*SHELL, f"setsid nohup sleep {mark} >/dev/null 2>&1 & echo left"], timeout_s=20)
    assert (done.status, done.stdout.text()) == (0, "left\n")
    assert not _sleeping(mark)


async def test_cancelling_kills_the_command(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    mark = f"{time.time_ns() % 10**9 + 10**9}"
    running = asyncio.create_task(sandbox.run([*SHELL, f"echo > begun; sleep {mark}"], timeout_s=60))
    async with asyncio.timeout(20):
        while not _sleeping(mark):
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _sleeping(mark)
    assert await sandbox.read("begun") == b"\n"  # the sandbox can still be used


async def test_a_program_that_does_not_exist_is_reported(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    if isolation.name == "process":
        with pytest.raises(SandboxError, match="cannot run /no/such/program: No such file"):
            await sandbox.run(["/no/such/program"], timeout_s=20)
    else:
        done = await sandbox.run(["/no/such/program"], timeout_s=20)
        assert done.status != 0 and "/no/such/program" in done.stderr.text()


async def test_an_ended_sandbox_refuses_commands(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    await sandbox.end()
    await sandbox.end()
    with pytest.raises(SandboxError, match="has ended"):
        await sandbox.run(["true"], timeout_s=20)


async def test_large_variables_and_arguments_arrive(isolation: Isolation) -> None:
    sandbox = await isolation.start(spec_for(isolation.name))
    big = "x" * 120_000
    done = await sandbox.run([*SHELL, "echo ${#BIG} ${#1}", "-", big], timeout_s=20, environment={"BIG": big})
    assert done.stdout.text() == "120000 120000\n"


async def test_two_isolations_can_be_open_at_the_same_time(isolation_name: str) -> None:
    """The start and the end of the second isolation remove nothing of the first."""
    spec = spec_for(isolation_name)
    first = await open_isolation(isolation_name, spec)
    try:
        sandbox = await first.start(spec)
        await (await open_isolation(isolation_name, spec)).close()
        assert (await sandbox.run(["true"], timeout_s=20)).status == 0
    finally:
        await first.close()


def test_an_invalid_spec_is_refused() -> None:
    with pytest.raises(ValueError, match="the folder /no/such/folder does not exist"):
        SandboxSpec(folder=Path("/no/such/folder"))
    with pytest.raises(ValueError, match="must be absolute and without"):
        SandboxSpec(workdir="/app/../etc")


def _sleeping(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["cmdline"] and process.info["cmdline"][-1] == mark:
            found.append(process.pid)
    return found
