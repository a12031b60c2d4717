"""Sandboxes on hosts: access, places, folders, and the loss of an owner or a host."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from tls_files import made_tls_files
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus

from areal_agents.direct_http import direct_async_client
from areal_agents.errors import SandboxError
from areal_agents.sandbox.remote import client
from areal_agents.sandbox.remote import host as host_module
from areal_agents.sandbox.remote import hosts as hosts_module
from areal_agents.sandbox.remote.archives import packed, unpack
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.sandbox.remote.host import SandboxHost
from areal_agents.sandbox.remote.hosts import HostAddress, SandboxHosts
from areal_agents.sandbox.remote.messages import PATH
from areal_agents.sandbox.sandbox import Mount
from areal_agents.sockets import listen, url_of
from areal_agents.tls import trusting
from tests.sandbox.conftest import needs, sandbox_host, spec_for

SPEC = spec_for("process")
_LONGEST_PATH = 4095  # in bytes, on Linux
NOWHERE = HostAddress("http://127.0.0.1:9", "the token")  # the discard port, on which nothing listens


@pytest.mark.parametrize("token", ["", "the tokem", "the tok\u00e9n"])
async def test_a_caller_without_the_token_is_refused(token: str) -> None:
    async with sandbox_host() as host:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with pytest.raises(InvalidStatus) as refused:
            await connect("ws" + host.url.removeprefix("http") + PATH, additional_headers=headers, proxy=None)
        assert refused.value.response.status_code == 401
        async with direct_async_client(timeout_s=5, base_url=host.url) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/")).status_code == 404
        isolation = RemoteIsolation(
            "process", SandboxHosts(lambda: [HostAddress(host.url, token)], place_s=0)
        )
        with pytest.raises(SandboxError, match="no sandbox host had a place"):
            await isolation.start(SPEC)


async def test_a_caller_with_two_tokens_is_refused() -> None:
    async with sandbox_host() as host:
        twice = [("Authorization", f"Bearer {token}") for token in ("another", "the token")]
        with pytest.raises(InvalidStatus) as refused:
            await connect("ws" + host.url.removeprefix("http") + PATH, additional_headers=twice, proxy=None)
        assert refused.value.response.status_code == 401


async def cut(connection: ServerConnection) -> None:
    connection.transport.abort()


async def goodbye(_: ServerConnection) -> None:
    """Send nothing before the connection is closed, like a host that is shutting down."""


async def another_program(connection: ServerConnection) -> None:
    await connection.send("[]")


@pytest.mark.parametrize("answer", [cut, goodbye, another_program])
async def test_a_host_that_offers_no_place_is_skipped(
    answer: Callable[[ServerConnection], Awaitable[None]],
) -> None:
    async with serve(answer, "127.0.0.1", 0) as broken, sandbox_host() as host:
        url = f"http://127.0.0.1:{next(iter(broken.sockets)).getsockname()[1]}"
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [HostAddress(url, "the token"), host]))
        sandbox = await isolation.start(SPEC)
        assert sandbox.place.url == host.url
        await isolation.close()
        alone = SandboxHosts(lambda: [HostAddress(url, "the token")], place_s=0)
        with pytest.raises(SandboxError, match="no sandbox host had a place"):
            await RemoteIsolation("process", alone).start(SPEC)


async def test_the_start_of_a_sandbox_on_a_host_that_does_not_respond_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(connection: ServerConnection) -> None:
        await connection.send('{"is": "place", "free": 1}')
        await connection.wait_closed()

    monkeypatch.setattr(client, "_START_S", 0.2)
    async with serve(silent, "127.0.0.1", 0) as host:
        url = f"http://127.0.0.1:{next(iter(host.sockets)).getsockname()[1]}"
        hosts = SandboxHosts(lambda: [HostAddress(url, "the token")])
        with pytest.raises(SandboxError, match=r"started no sandbox within 0\.2 s"):
            await RemoteIsolation("process", hosts).start(SPEC)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    with pytest.raises(SandboxError, match="cannot be copied"):
        unpack(gzip.compress(packed(tmp_path / "from")), tmp_path, is_trusted=False)


async def test_a_caller_waits_in_line_for_a_place() -> None:
    async with sandbox_host(places=1) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [NOWHERE, host]))
        first = await isolation.start(SPEC)
        waiting = [asyncio.create_task(isolation.start(SPEC)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done and (await first.run(["true"], timeout_s=20)).status == 0
        waiting[0].cancel()  # a cancelled caller takes no place
        await first.end()
        async with asyncio.timeout(20):
            await (await waiting[1]).end()
        await isolation.close()


async def test_the_host_with_the_most_free_places_is_chosen() -> None:
    async with sandbox_host(places=1) as small, sandbox_host(places=4) as large:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [small, large]))
        started = [await isolation.start(SPEC) for _ in range(5)]
        urls = [sandbox.place.url for sandbox in started]
        assert (urls.count(small.url), urls.count(large.url)) == (1, 4)
        await isolation.close()


async def test_a_host_with_tls_is_verified(tmp_path: Path) -> None:
    tls, other = made_tls_files(tmp_path / "tls"), made_tls_files(tmp_path / "other")
    async with sandbox_host(tls=tls) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host], place_s=0))
        with trusting(other), pytest.raises(SandboxError, match="no sandbox host had a place"):
            await isolation.start(SPEC)
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host], place_s=20))
        with trusting(tls):
            await (await isolation.start(SPEC)).end()
        await isolation.close()


async def test_nothing_is_left_of_a_sandbox_whose_owner_is_lost() -> None:
    async with sandbox_host(places=1) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]))
        sandbox = await isolation.start(SPEC)
        mark = f"{time.time_ns() % 10**9 + 10**9}"
        running = asyncio.create_task(sandbox.run(["sleep", mark], timeout_s=None))
        await _until(lambda: _sleeping(mark))
        sandbox.place.connection.transport.abort()
        with pytest.raises(SandboxError, match="is lost"):
            await running
        await _until(lambda: not _sleeping(mark) and not Path(sandbox.workdir).exists())
        await (await isolation.start(SPEC)).end()  # the place is free again
        await isolation.close()


async def test_a_sandbox_can_be_ended_while_a_command_runs() -> None:
    async with sandbox_host() as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]))
        sandbox = await isolation.start(SPEC)
        mark = f"{time.time_ns() % 10**9 + 10**9}"
        running = asyncio.create_task(sandbox.run(["sleep", mark], timeout_s=None))
        await _until(lambda: _sleeping(mark))
        await isolation.close()
        with pytest.raises(SandboxError, match="is lost"):
            await running
        await _until(lambda: not _sleeping(mark))


async def test_after_the_loss_of_a_host_sandboxes_start_on_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(hosts_module, "_AGAIN_S", 0.05)
    async with sandbox_host(places=1) as lasting:
        host = SandboxHost("the token", places=9)
        listener = listen("127.0.0.1", 0)
        await host.listen(listener)
        found = [HostAddress(url_of(listener), "the token")]
        isolation = RemoteIsolation("process", SandboxHosts(lambda: found))
        sandbox = await isolation.start(SPEC)
        found.append(lasting)
        await host.close()
        with pytest.raises(SandboxError, match="is lost"):
            await sandbox.run(["true"], timeout_s=20)
        await sandbox.end()
        async with asyncio.timeout(20):
            other = await isolation.start(SPEC)
        assert other.place.url == lasting.url
        await isolation.close()


async def test_commands_call_the_model_server_of_their_host() -> None:
    async with sandbox_host(model_server="http://127.0.0.1:9") as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]))
        sandbox = await isolation.start(SPEC)
        assert sandbox.inner_url("https://rollout:8000/e/key/v1") == "http://127.0.0.1:9/e/key/v1"
        await isolation.close()


async def test_a_folder_is_sent_once_and_again_after_it_has_changed(tmp_path: Path) -> None:
    folder, base = tmp_path / "folder", tmp_path / "base"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_text("1")
    (folder / "link").symlink_to("deep/file")
    async with sandbox_host(base=base) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]))
        for content in ("1", "1", "22"):
            (folder / "deep/file").write_text(content)
            sandbox = await isolation.start(spec_for("process", folder=folder))
            assert await sandbox.read("link") == content.encode()
            await sandbox.end()
        assert len([*base.glob("*/folders/*")]) == 2
        await isolation.close()
    assert not [*base.iterdir()]


async def test_a_folder_that_a_host_cannot_write_leaves_nothing_on_it(tmp_path: Path) -> None:
    """The longest path in the folder is as long as the system allows, and would be longer on the host."""
    base, deep = tmp_path / "base", tmp_path / "folder"
    while len(str(deep)) < 3900:
        deep = deep / ("d" * 90)
    deep.mkdir(parents=True)
    deep = deep / ("e" * (_LONGEST_PATH - 1 - len(str(deep))))
    deep.mkdir()
    async with sandbox_host(base=base) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]))
        with pytest.raises(SandboxError, match=r"cannot be copied to another machine: .*File name too long"):
            await isolation.start(spec_for("process", folder=tmp_path / "folder"))
        assert not [*base.glob("*/folders/*")]
        await (await isolation.start(SPEC)).end()
        await isolation.close()


async def test_a_writable_folder_has_the_changes_of_the_command(tmp_path: Path) -> None:
    needs("bubblewrap")
    for name in ("kept", "gone", "deep/gone", "replaced/gone"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    command = "cd /logs && rm -r gone deep/gone replaced && echo after > replaced && mkdir new"
    async with sandbox_host() as host:
        isolation = RemoteIsolation("bubblewrap", SandboxHosts(lambda: [host]))
        sandbox = await isolation.start(spec_for("bubblewrap"))
        done = await sandbox.run(
            ["/bin/sh", "-c", command], timeout_s=20, mounts=[Mount("/logs", tmp_path, is_writable=True)]
        )
        assert (done.status, done.stderr.text()) == (0, "")
        await isolation.close()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["deep", "kept", "new", "replaced"]
    assert ((tmp_path / "kept").read_text(), (tmp_path / "replaced").read_text()) == ("before", "after\n")


def test_a_folder_is_read_only_up_to_the_size_that_may_be_sent(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 5000)
    assert len(packed(tmp_path, most_bytes=20_480)) <= 20_480
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(1 << 40)  # a sparse file that does not fit into memory
    with pytest.raises(SandboxError, match=r"it has more than the 1 MiB that can be sent at once"):
        packed(tmp_path, most_bytes=1 << 20)


async def test_mounted_folders_are_in_the_folder_of_the_host_and_sent_back_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("bubblewrap")
    monkeypatch.setattr(host_module, "MOST_DATA", 1 << 20)
    base, folder = tmp_path / "base", tmp_path / "folder"
    folder.mkdir()
    async with sandbox_host(base=base) as host:
        isolation = RemoteIsolation("bubblewrap", SandboxHosts(lambda: [host]))
        sandbox = await isolation.start(spec_for("bubblewrap"))

        async def run(command: str) -> int:
            mounts = [Mount("/logs", folder, is_writable=True)]
            return (await sandbox.run(["/bin/sh", "-c", command], timeout_s=60, mounts=mounts)).status

        running = asyncio.create_task(run("while [ ! -e /logs/go ]; do sleep 0.02; done"))
        await _until(lambda: [*base.glob("*/mounts/*/0")])
        [inside] = base.glob("*/mounts/*/0")  # so that the next host removes it if this host is killed
        (inside / "go").touch()
        assert await running == 0 and (folder / "go").exists() and not [*base.glob("*/mounts/*")]
        with pytest.raises(SandboxError, match="it has more than the 1 MiB that can be sent at once"):
            await run("head -c 3000000 /dev/zero > /logs/much")
        assert [path.name for path in folder.iterdir()] == ["go"] and not [*base.glob("*/mounts/*")]
        assert await run("true") == 0
        await isolation.close()


async def test_a_warm_sandbox_is_started_before_it_is_requested(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    spec = spec_for("process", folder=tmp_path)
    async with sandbox_host(warm=spec) as host:
        isolation = RemoteIsolation("process", SandboxHosts(lambda: [host]), warm=2)
        begun = time.time()
        sandbox = await isolation.start(spec)
        assert Path(sandbox.workdir).stat().st_ctime < begun and await sandbox.read("file") == b"here"
        await isolation.close()


async def _until(condition: object) -> None:
    async with asyncio.timeout(20):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


def _sleeping(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", mark]]
