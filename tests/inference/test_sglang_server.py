"""How SGLang is started: from which environment, on which devices, and with which flags."""

from __future__ import annotations

import io
import json
import logging
import os
import runpy
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_engine_process import gone

from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference import EngineConfig
from areal_agents.inference.engine_process import CommandProcess
from areal_agents.inference.sglang.server import (
    DETERMINISTIC,
    FP32_HEAD,
    GpuPlacement,
    ServerSetting,
    find_environment,
    nccl_environment,
    numerics,
    place,
    server_command,
    server_environment,
)
from areal_agents.secret_variables import ENGINE_KEY

SERVE = Path(__file__).parents[2] / "areal_agents/inference/sglang/environment/serve.py"


def script(path: Path, text: str) -> str:
    """Write an executable that replaces a Python, and return its path."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def engine(**options: Any) -> EngineConfig:
    return EngineConfig(**{"kind": "sglang", "python": "sglang/bin/python", **options})


def test_the_version_and_the_gpus_of_an_environment_are_found(tmp_path: Path) -> None:
    python = script(tmp_path / "python", """echo '{"sglang": "0.5.23.post1", "gpus": 2, "error": null}'""")
    found = find_environment(python)
    assert (found.python, found.version, found.gpus) == (python, "0.5.23.post1", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            """echo '{"sglang": "0.5.9", "gpus": 0, "error": null}'""",
            "has SGLang 0.5.9, older than 0.5.21; make an environment",
        ),
        ("echo boom >&2; exit 1", "is not a working Python: boom; make an environment"),
        ("exit 0", "is not a working Python"),
    ],
)
def test_an_environment_that_cannot_serve_is_refused_with_a_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_environment(script(tmp_path / "python", text))


def test_a_python_without_sglang_and_a_missing_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"sglang is not installed there; make an environment .*make sglang"
    ):
        find_environment(sys.executable)
    with pytest.raises(ConfigError, match=r"cannot be run \(No such file or directory\)"):
        find_environment(str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("options", "gpus", "trainer_gpus", "expected"),
    [
        ({}, 0, 1, [()]),
        ({"device": "cpu", "replicas": 2}, 8, 1, [(), ()]),
        ({"replicas": 2}, 4, 1, [(1,), (2,)]),
        ({"replicas": 2, "tensor_parallel": 2}, 6, 2, [(2, 3), (4, 5)]),
        ({"replicas": 2, "device": "cuda:1"}, 4, 2, [(1,), (2,)]),
        ({"colocate": "sleep", "replicas": 2}, 2, 2, [(0,), (1,)]),
        ({"device": "cuda"}, 1, 0, [(0,)]),
    ],
)
def test_replicas_are_placed_on_gpus_according_to_the_trainer_and_the_settings(
    options: dict[str, Any], gpus: int, trainer_gpus: int, expected: list[tuple[int, ...]]
) -> None:
    placements = place(engine(**options), gpus, trainer_gpus=trainer_gpus)
    assert [placement.gpus for placement in placements] == expected


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"from GPU 1 on, need 2 GPUs, .*1, and there are 1; .*colocate"):
        place(engine(), 1, trainer_gpus=1)
    with pytest.raises(ConfigError, match="need 3 GPUs, and there are 2"):
        place(engine(colocate="split", replicas=3), 2, trainer_gpus=1)


def test_the_log_of_a_server_has_its_key_neither_in_messages_nor_in_tracebacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENGINE_KEY, raising=False)
    gpu_build = SimpleNamespace(version=SimpleNamespace(cuda="12.8"))
    monkeypatch.setitem(sys.modules, "torch", gpu_build)  # importing torch takes seconds
    without_key = runpy.run_path(str(SERVE))["_without_key"]
    monkeypatch.setattr(logging, "raiseExceptions", False)
    written = io.StringIO()
    log = logging.Logger("sglang")
    log.addHandler(logging.StreamHandler(written))
    earlier = logging.getLogRecordFactory()
    logging.setLogRecordFactory(without_key(earlier, "hush"))
    try:
        log.info("key=%s", "hush")
        log.info("%d", "not a number")  # the caller sees no error
        try:
            raise ValueError("hush is wrong")
        except ValueError:
            log.exception("failed")
    finally:
        logging.setLogRecordFactory(earlier)
    lines = written.getvalue().splitlines()
    assert lines[:3] == ["key=***", "failed", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: *** is wrong" and "hush" not in written.getvalue()


ONE_GPU = GpuPlacement((0,))


def flags(config: EngineConfig, placement: GpuPlacement = ONE_GPU, **options: Any) -> str:
    command = server_command(config, "/models/m", placement, port=30000, **options)
    assert command[0] == "sglang/bin/python" and command[1].endswith("serve.py")
    return " ".join(command[2:])


def test_a_server_gets_the_flags_of_its_config() -> None:
    plain = flags(engine(), seed=7)
    assert "--model-path /models/m --host 127.0.0.1 --port 30000 --random-seed 7 --dtype " in plain
    assert "--incremental-streaming-output" in plain and "--tp-size 1" in plain
    for absent in ("lora", "routed", "mem-fraction", "saver", "context-length", "overlap", "--device"):
        assert absent not in plain

    assert "--tp-size 2" in flags(engine(tensor_parallel=2), GpuPlacement((2, 3)))
    assert "--context-length 4096" in flags(engine(max_context=4096))
    assert "--dtype bfloat16" in flags(engine(dtype="bfloat16"))
    assert "--mem-fraction-static 0.4" in flags(engine(colocate="split"))
    assert "--mem-fraction-static 0.3" in flags(engine(colocate="split", memory_fraction=0.3))
    sleeping = flags(engine(colocate="sleep"))
    assert "--mem-fraction-static 0.6 --enable-memory-saver --enable-weights-cpu-backup" in sleeping
    adapters = flags(engine(), lora_rank=8, lora_targets=("q_proj", "v_proj"))
    assert "--enable-lora --max-lora-rank 8" in adapters
    assert "--lora-target-modules q_proj v_proj" in adapters
    assert "--enable-fp32-lm-head" in flags(engine(fp32_head=True)) and "fp32" not in plain
    assert "--enable-deterministic-inference" in flags(engine(deterministic=True))
    assert "deterministic" not in plain
    assert "--enable-return-routed-experts" in flags(engine(), routed_experts=True)
    assert "--disable-overlap-schedule --disable-radix-cache" in flags(engine(), exact_in_place=True)
    without = flags(engine(), prefix_cache=False)
    assert "--disable-radix-cache" in without and "--disable-overlap-schedule" not in without
    assert "--incremental" not in flags(engine(), cumulative=True)


@pytest.mark.parametrize(
    ("saved", "on_gpu", "want"),
    [
        ({"dtype": "bfloat16"}, True, "bfloat16"),
        ({"torch_dtype": "float16"}, True, "float16"),
        ({"dtype": "float32"}, True, "bfloat16"),
        ({}, True, "bfloat16"),
        ({"dtype": "bfloat16"}, False, "float32"),
    ],
)
def test_the_dtype_depends_on_the_model_files_and_the_device(
    saved: dict[str, str], on_gpu: bool, want: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved))
    placement = ONE_GPU if on_gpu else GpuPlacement()
    command = server_command(engine(), tmp_path, placement, port=30000)
    assert command[command.index("--dtype") + 1] == want


def test_on_a_cpu_the_flags_are_those_that_a_cpu_supports() -> None:
    on_cpu = flags(engine(colocate="sleep"), GpuPlacement(), lora_rank=8)
    assert "--device cpu --attention-backend torch_native --sampling-backend pytorch" in on_cpu
    assert "--sleep-on-idle" in on_cpu and "--lora-backend torch_native" in on_cpu
    assert "saver" not in on_cpu and "mem-fraction" not in on_cpu


def test_a_users_arguments_come_last() -> None:
    assert flags(engine(arguments=["--dtype", "auto", "--max-running-requests", 64])).endswith(
        "--dtype auto --max-running-requests 64"
    )


def test_a_server_sees_its_own_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_environment(engine(), GpuPlacement((2, 3)))["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-a, 6")
    assert server_environment(engine(), GpuPlacement((1, 2)))["CUDA_VISIBLE_DEVICES"] == "GPU-a,6"
    assert "PYTHONDONTWRITEBYTECODE" not in server_environment(engine(), GpuPlacement())


def test_a_server_has_the_programs_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang compiles kernels with the ninja on PATH, which must be that of its own environment."""
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    programs = tmp_path / "sglang" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)  # as in a virtual environment
    ninja = script(programs / "ninja", "exit 0")
    monkeypatch.chdir(tmp_path)
    environment = server_environment(engine(python="sglang/bin/python"), GpuPlacement())
    assert shutil.which("ninja", path=environment["PATH"]) == ninja
    assert environment["PATH"].endswith(os.environ["PATH"]) and "VIRTUAL_ENV" not in environment
    (tmp_path / "sglang" / "pyvenv.cfg").write_text("")
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)  # to be found by its name
    assert server_environment(engine(python="python"), GpuPlacement())["VIRTUAL_ENV"] == str(programs.parent)


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ({}, [], ("0", "0")),
        ({"NCCL_CUMEM_ENABLE": "1"}, [], ("1", "0")),
        ({}, ["--enable-nccl-nvls"], ("0", "1")),
        ({"NCCL_CUMEM_ENABLE": "0"}, ["--enable-symm-mem"], ("1", "1")),
    ],
)
def test_trainer_and_engine_have_the_nccl_settings_that_sglang_chooses(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], arguments: list[str], expected: tuple[str, str]
) -> None:
    """SGLang 0.5.21 chooses them in its function `_set_envs_and_config`."""
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = engine(arguments=arguments)
    found = nccl_environment(config)
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == expected
    assert found.items() <= server_environment(config, GpuPlacement()).items()


def test_a_setting_that_the_installed_sglang_lacks_is_refused_by_its_key(tmp_path: Path) -> None:
    answer = """echo '{"sglang": "0.5.21", "gpus": 1, "settings": ["enable_fp32_lm_head"], "error": null}'"""
    python = script(tmp_path / "python", answer)
    assert find_environment(python, numerics(engine(fp32_head=True))).nccl is None
    with pytest.raises(
        ConfigError,
        match=r"engine.deterministic: SGLang 0.5.21 of .* has no --enable-deterministic-inference",
    ):
        find_environment(python, numerics(engine(fp32_head=True, deterministic=True)))


@pytest.mark.sglang
def test_the_real_sglang_knows_the_settings(sglang_python: str) -> None:
    found = find_environment(sglang_python, (DETERMINISTIC, FP32_HEAD))
    assert found.version >= "0.5.21"
    with pytest.raises(ConfigError, match="engine.other: SGLang .* has no --no-such-flag"):
        find_environment(sglang_python, (ServerSetting("engine.other", "--no-such-flag"),))


def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [script(tmp_path / "python", "echo no such flag >&2; exit 2")]
    with pytest.raises(
        EngineUnavailable, match=r"(?s)SGLang ended with status 2 .*its log ends:\nno such flag"
    ):
        CommandProcess("SGLang", command, os.environ, port=1).__enter__()


def test_stopping_a_server_ends_the_processes_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [script(tmp_path / "python", f"sleep 600 & echo $! > {pids}.tmp; mv {pids}.tmp {pids}; wait")]
    server = CommandProcess("SGLang", command, os.environ, port=1)
    server.start()
    while not pids.exists():
        assert server.alive
        time.sleep(0.01)
    server.stop()
    assert gone(int(pids.read_text()))
