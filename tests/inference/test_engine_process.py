"""The engine as a process: it starts, reports why it cannot start, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from inference_support import Missed, again_if_missed, prompt_of

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference import EmbeddedEngineConfig, EngineProcess, SGLangEngine


def gone(pid: int, timeout_s: float = 60.0) -> bool:
    """Return whether a process ends in time."""
    deadline = time.monotonic() + timeout_s
    try:
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass
    return True


@again_if_missed
async def test_sigterm_ends_an_engine_during_generations(model_folder: Path) -> None:
    with EngineProcess(EmbeddedEngineConfig(model=str(model_folder), port=0, threads=1)) as process:
        async with SGLangEngine(process.url) as engine:
            tasks = [
                asyncio.create_task(
                    engine.generate(f"r{i}", prompt_of(50), SamplingParams(3000, ignore_eos=True))
                )
                for i in range(3)
            ]
            while (await engine._call("GET", "/get_server_info"))["running"] < 3:
                if any(task.done() for task in tasks):
                    await asyncio.gather(*tasks)
                    raise Missed
                await asyncio.sleep(0.005)
            os.kill(process.pid, signal.SIGTERM)
            done = await asyncio.gather(*tasks)
        if any(completion.finish_reason == "length" for completion in done):
            raise Missed
        assert [c.finish_reason for c in done] == ["abort"] * 3
        assert await asyncio.to_thread(gone, process.pid)
        assert "Traceback" not in process.log_tail()
    assert process.returncode == 0


def test_an_engine_can_be_stopped_while_it_starts(model_folder: Path) -> None:
    """SIGTERM is enough."""
    config = EmbeddedEngineConfig(model=str(model_folder), port=0, threads=1)
    process = EngineProcess(config, stop_timeout_s=60.0)
    process.start()
    time.sleep(0.5)
    process.stop()
    assert process.returncode in (0, -signal.SIGTERM)


def test_an_engine_ends_when_its_parent_is_killed(model_folder: Path) -> None:
    script = (
        "import sys, time\n"
        "from areal_agents.inference import EmbeddedEngineConfig, EngineProcess\n"
        "engine = EngineProcess(EmbeddedEngineConfig(model=sys.argv[1], port=0, threads=1))\n"
        "engine.start(); engine.wait_ready(); print(engine.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(model_folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_model_that_cannot_be_loaded_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"(?s)ended with status 1.*is not a folder"):
        EngineProcess(EmbeddedEngineConfig(model=str(tmp_path / "missing"), port=0)).__enter__()


def test_a_port_that_is_taken_is_refused(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            EngineProcess(EmbeddedEngineConfig(model=str(model_folder), port=port)).start()


async def test_a_port_without_a_server_is_an_unavailable_engine() -> None:
    with socket.socket() as held:  # bound, but it does not listen
        held.bind(("127.0.0.1", 0))
        async with SGLangEngine(f"http://127.0.0.1:{held.getsockname()[1]}") as engine:
            with pytest.raises(EngineUnavailable, match="not reachable"):
                await engine.health()
