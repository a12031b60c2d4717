from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sandbox_cgroups import cgroups_of

from areal_agents.errors import SandboxError
from areal_agents.sandbox.bubblewrap import Bubblewrap
from areal_agents.sandbox.local import LocalIsolation
from areal_agents.sandbox.pool import SandboxPool
from areal_agents.sandbox.sandbox import Isolation, Sandbox, SandboxSpec
from tests.sandbox.conftest import needs, spec_for


async def test_a_warm_sandbox_is_given_out_once(bubblewrap: Isolation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    pool = SandboxPool(bubblewrap, spec_for("bubblewrap", folder=tmp_path), warm=2)
    await pool.fill()
    taken = await asyncio.gather(*(pool.take() for _ in range(6)))
    assert len(set(taken)) == 6
    assert await taken[0].read("file") == b"1"

    async def write(sandbox: Sandbox, number: int) -> bytes:
        await sandbox.write("own", str(number).encode())
        return await sandbox.read("own")

    written = await asyncio.gather(*(write(sandbox, n) for n, sandbox in enumerate(taken)))
    assert written == [str(n).encode() for n in range(6)]
    await asyncio.gather(*(sandbox.end() for sandbox in taken))
    await pool.close()


async def test_nothing_is_left_when_a_pool_and_its_isolation_are_closed(tmp_path: Path) -> None:
    needs("bubblewrap")
    isolation = LocalIsolation(Bubblewrap(), base=tmp_path)  # not shared with other tests
    pool = SandboxPool(isolation, spec_for("bubblewrap"), warm=3)
    taken = await pool.take()
    taking = [asyncio.create_task(pool.take()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    (home,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    assert len(cgroups_of(home.name)) >= 1
    await pool.close()
    await isolation.close()
    assert not cgroups_of(home.name)
    with pytest.raises(SandboxError, match="has ended"):
        await taken.run(["true"], timeout_s=20)


async def test_a_sandbox_that_cannot_start_is_an_error(bubblewrap: Isolation, tmp_path: Path) -> None:
    spec = SandboxSpec(image=str(tmp_path / "nowhere"))
    pool = SandboxPool(bubblewrap, spec, warm=1)
    with pytest.raises(SandboxError, match="an image is a folder; there is no folder .*nowhere"):
        await pool.fill()
    await pool.close()
