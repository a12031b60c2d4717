"""Starts a real SGLang server for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_agents.inference.config import EngineConfig
from areal_agents.inference.engine_process import CommandProcess
from areal_agents.inference.ports import reserved_ports
from areal_agents.inference.sglang.server import (
    find_environment,
    place,
    server_command,
    server_environment,
)


@contextmanager
def running_sglang(
    python: str,
    model: str | Path,
    *arguments: str,
    start_timeout_s: float = 600.0,
    key: str = "",
    log_path: Path | None = None,
    **options: Any,
) -> Iterator[str]:
    """Run a float32 server of `model`, on a GPU if there is one; yields its URL.

    `arguments` are those of SGLang, `key` is the API key, and `options` are those of `server_command`.
    """
    config = EngineConfig(kind="sglang", python=python, arguments=arguments)
    (placement,) = place(config, find_environment(python).gpus, trainer_gpus=0)
    with reserved_ports(1) as (port,):
        command = server_command(config, model, placement, port=port, **options)
        environment = server_environment(config, placement, key=key)
        with CommandProcess(
            "SGLang", command, environment, port=port, start_timeout_s=start_timeout_s, log_path=log_path
        ) as server:
            yield server.url
