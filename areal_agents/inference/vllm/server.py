"""Starts vLLM servers: chooses their environment, arguments and GPUs.

vLLM has an environment of its own, which nothing here imports. On a machine without a GPU the build for CPUs
serves, which is slow and meant for tests.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.inference.sglang.server import (
    GpuPlacement,
    release_of,
    server_environment,
    serving_dtype,
)
from areal_agents.tls import TlsConfig

SCRIPTS = Path(__file__).parent / "environment"
OLDEST, TRIED = (0, 32, 0), "0.32.0"
PROBE_TIMEOUT_S = 120.0  # the first import of torch from a cold disk is slow
CPU_CACHE_GIB, CPU_SEQUENCES = 1, 32  # by default vLLM would use most of the machine's memory
LORA_LOADED = 8  # adapters that a server holds in total
HOW_TO = (
    f"make an environment for it (python3 -m venv vllm; vllm/bin/pip install vllm=={TRIED}; on a machine "
    "without a GPU: make vllm) and give engine.python: vllm/bin/python, or give engine.urls"
)


@dataclass(frozen=True, slots=True)
class VLLMEnvironment:
    """An environment with vLLM.

    Attributes:
        python: the path of its Python.
        version: the version of vLLM.
        gpus: the number of visible GPUs.
        nccl: the version of NCCL that its torch uses; None with a build for the CPU.
    """

    python: str
    version: str
    gpus: int
    nccl: str | None = None


def find_environment(python: str) -> VLLMEnvironment:
    """Find out which vLLM the environment of `python` has.

    Raises:
        ConfigError: `python` cannot be run, or its environment has no vLLM or one that is too old.
    """
    command = [python, str(SCRIPTS / "probe.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(f"engine.python: {python} cannot be run ({error.strerror}); {HOW_TO}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"engine.python: {python} did not answer within {PROBE_TIMEOUT_S:g} s") from None
    try:
        found = json.loads(done.stdout)
        version, gpus, fault = found["vllm"], int(found["gpus"]), found["error"]
    except (ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout).strip()[-300:]
        raise ConfigError(f"engine.python: {python} is not a working Python: {said}; {HOW_TO}") from None
    if fault:
        raise ConfigError(f"engine.python: {python}: {fault}; {HOW_TO}")
    if release_of(version) < OLDEST:
        raise ConfigError(f"engine.python: {python} has vLLM {version}, older than {TRIED}; {HOW_TO}")
    return VLLMEnvironment(python, version, gpus, found.get("nccl"))


def server_command(
    config: EngineConfig,
    model: str | Path,
    placement: GpuPlacement,
    *,
    port: int,
    host: str = "127.0.0.1",
    seed: int = 0,
    lora_rank: int = 0,
    tls: TlsConfig | None = None,
) -> list[str]:
    """Return the command that starts one server with the Python of `config`.

    `serve.py` adds the flags that every server needs.

    Args:
        lora_rank: largest rank of the adapters that it may load; 0 disables adapters.
        tls: the files to serve HTTPS with; None: HTTP is served.
    """
    command = [config.python, str(SCRIPTS / "serve.py"), "--end-with-stdin", "--model", str(model)]
    command += ["--host", host, "--port", str(port), "--seed", str(seed)]
    command += ["--dtype", serving_dtype(config, Path(model), placement)]
    command += ["--disable-uvicorn-access-log"]
    if config.max_context:
        command += ["--max-model-len", str(config.max_context)]
    if lora_rank:
        command += ["--enable-lora", "--max-lora-rank", str(_lora_rank(lora_rank))]
        command += ["--max-loras", "2", "--max-cpu-loras", str(LORA_LOADED)]
    if placement.gpus:
        command += ["--tensor-parallel-size", str(len(placement.gpus))]
        if config.static_memory:
            command += ["--gpu-memory-utilization", f"{config.static_memory:g}"]
    else:
        command += ["--enforce-eager", "--max-num-seqs", str(CPU_SEQUENCES)]
        command += ["--kv-cache-memory-bytes", str(CPU_CACHE_GIB * 2**30)]
    if tls is not None:
        command += ["--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key]
    return [*command, *config.arguments]


def vllm_environment(
    config: EngineConfig, placement: GpuPlacement, host: str = "127.0.0.1", key: str = ""
) -> dict[str, str]:
    """Return the environment variables of a server process on `host`.

    They are those of an SGLang server, and on a CPU vLLM does not bind its threads to cores, which other
    processes of the run use too.
    """
    environment = server_environment(config, placement, host, key)
    if not placement.gpus:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment


def _lora_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can be started with and that is at least `rank`."""
    known = (8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [size for size in known if size >= rank]
    if not fitting:
        raise ConfigError(f"trainer.lora.rank: vLLM takes at most {known[-1]}, got {rank}")
    return fitting[0]
