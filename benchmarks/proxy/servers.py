"""The servers of the proxy's benchmark, started as their users start them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.proxy.processes import Server

VOCABULARY, CONTEXT = 151_936, 131_072
LITELLM_FOLDER = "AREAL_AGENTS_LITELLM"  # environment variable: the virtual environment that has litellm
LITELLM_DEFAULT = ".venv-litellm"


def stub_engine(scratch: Path, replies: Mapping[int, Mapping[str, Any]], model: Path) -> Server:
    """An engine with prepared answers, by token limit; see `benchmarks.proxy.stub.Reply`."""
    info = {"model_path": str(model), "vocab_size": VOCABULARY, "context_length": CONTEXT}
    config = scratch / "stub.json"
    config.write_text(json.dumps({"replies": replies, "info": {**info, "weight_version": "default"}}))
    return Server([sys.executable, "-m", "benchmarks.proxy.stub", str(config)])


def scripted_engine(model: Path, arguments: Sequence[str]) -> Server:
    """An engine of `areal_agents.testing`."""
    return Server([sys.executable, "-m", "areal_agents.testing", "--model", str(model), *arguments])


def proxy_server(model: Path, engine_url: str, store: Path, admin_key: str, extra: Sequence[str]) -> Server:
    """`areal-agents serve`; `extra` contains additional options."""
    command = [
        *(sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(model), "--port", "0"),
        *("--engine-url", engine_url, "--store", str(store), *extra),
    ]
    return Server(command, ready="/health", env={"AREAL_AGENTS_ADMIN_KEY": admin_key})


def passthrough(engine_url: str) -> Server:
    """The minimal recording proxy."""
    return Server([sys.executable, "-m", "benchmarks.proxy.passthrough", engine_url])


def litellm_server(scratch: Path, engine_url: str, key: str) -> Server | None:
    """LiteLLM's proxy from its own environment; None, with a printed hint, if there is none."""
    command = Path(os.environ.get(LITELLM_FOLDER, LITELLM_DEFAULT)) / "bin" / "litellm"
    if not command.is_file():
        print(f"LiteLLM is not measured: no {command}; `make litellm` installs it", file=sys.stderr)
        return None
    config, port = scratch / "litellm.yaml", _free_port()  # JSON is valid YAML
    served = {"model": "openai/policy", "api_base": f"{engine_url}/v1", "api_key": "none"}
    models = [{"model_name": "policy", "litellm_params": served}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    return Server(
        [str(command), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
        url=f"http://127.0.0.1:{port}",
        ready="/health/liveliness",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
    )


def _free_port() -> int:
    """A free port, for a server that cannot report which port it chose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
