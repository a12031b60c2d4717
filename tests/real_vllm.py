"""Starts a real vLLM server for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_agents.inference.config import EngineConfig
from areal_agents.inference.engine_process import CommandProcess
from areal_agents.inference.ports import reserved_ports
from areal_agents.inference.sglang.server import place
from areal_agents.inference.vllm.server import (
    find_environment,
    server_command,
    vllm_environment,
)


class VLLMUrl(str):
    """The URL of a server that speaks vLLM's protocol."""


@contextmanager
def running_vllm(
    python: str,
    model: str | Path,
    *arguments: str,
    start_timeout_s: float = 600.0,
    key: str = "",
    log_path: Path | None = None,
    **options: Any,
) -> Iterator[VLLMUrl]:
    """Run a float32 server of `model`, on a GPU if there is one; yields its URL.

    `arguments` are those of vLLM, `key` is the API key, and `options` are those of `server_command`.
    """
    config = EngineConfig(kind="vllm", python=python, arguments=arguments)
    (placement,) = place(config, find_environment(python).gpus, trainer_gpus=0)
    with reserved_ports(1) as (port,):
        command = server_command(config, model, placement, port=port, **options)
        environment = vllm_environment(config, placement, key=key)
        with CommandProcess(
            "vLLM", command, environment, port=port, start_timeout_s=start_timeout_s, log_path=log_path
        ) as server:
            yield VLLMUrl(server.url)
