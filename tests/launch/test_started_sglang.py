"""The arguments and the environment of a started SGLang, recorded by a stand-in for its Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_train import EXAMPLE

from areal_agents.config import Config, load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.engines import plan_engines
from areal_agents.launch.ready import wait_until_ready
from areal_agents.launch.run_folder import Endpoints, RunFolder

# Answers the probe of an environment with two GPUs; as a server, records its arguments and variables.
STAND_IN = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
if sys.argv[1].endswith("probe.py"):
    print(json.dumps({{"sglang": "0.5.21", "gpus": 2, "settings": sys.argv[2:], "error": None}}))
    sys.exit()
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
Path({seen!r}).write_text(json.dumps([sys.argv, dict(os.environ)]))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def stand_in(folder: Path) -> Path:
    """Make the `bin` folder of an environment, with the stand-in as its Python, and with a ninja."""
    programs = folder / "sglang" / "bin"
    programs.mkdir(parents=True)
    (programs / "ninja").write_text("#!/bin/sh\n")
    (programs / "python").write_text(STAND_IN.format(python=sys.executable, seen=str(folder / "seen.json")))
    for program in programs.iterdir():
        program.chmod(0o755)
    return programs


def configured(programs: Path, *settings: str) -> Config:
    chosen = ("engine.kind=sglang", f"engine.python={programs}/python", "trainer.device=cpu", *settings)
    return load_config(EXAMPLE, [f"run_dir={programs.parent.parent}/run", *chosen])


def started(config: Config) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of the engine that a run starts from `config`."""
    folder = RunFolder(Path(config.run_dir))
    folder.log("engine").parent.mkdir(parents=True)
    save_config(config, folder.config)
    (placement,) = plan_engines(config).placements
    with reserved_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        folder.write_endpoints(Endpoints((url,), "127.0.0.1", 1, "admin"))
        gpus = ",".join(map(str, placement.gpus))
        command = [sys.executable, "-m", "areal_agents.launch.processes", "engine"]
        command += ["--folder", str(folder.root), "--gpus", gpus]
        dead = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | dead)
        try:
            wait_until_ready(url + "/health", timeout_s=120)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    arguments, environment = json.loads((folder.root.parent / "seen.json").read_text())
    return arguments, environment


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_a_started_sglang_gets_its_programs_its_gpus_and_the_configured_flags(tmp_path: Path) -> None:
    programs = stand_in(tmp_path)
    settings = ("engine.fp32_head=true", "engine.deterministic=true", "engine.routed_experts=false")
    arguments, environment = started(configured(programs, *settings, "engine.device=cuda:1"))
    assert "--enable-fp32-lm-head" in arguments and "--enable-deterministic-inference" in arguments
    assert value_of(arguments, "--tp-size") == "1" and environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert shutil.which("ninja", path=environment["PATH"]) == str(programs / "ninja")
    assert environment["NCCL_CUMEM_ENABLE"] == "0" and environment["NCCL_NVLS_ENABLE"] == "0"
    assert "127.0.0.1" in environment["NO_PROXY"].split(",")


def test_numerics_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path: Path) -> None:
    programs = stand_in(tmp_path)
    python: Any = (programs / "python").read_text()
    (programs / "python").write_text(python.replace('"gpus": 2', '"gpus": 0'))
    with pytest.raises(ConfigError, match="engine.deterministic needs SGLang on a GPU, and there is none"):
        plan_engines(configured(programs, "engine.deterministic=true"))
    (programs / "python").write_text(python.replace("sys.argv[2:]", "[]"))
    with pytest.raises(
        ConfigError, match="engine.fp32_head: SGLang 0.5.21 of .* has no --enable-fp32-lm-head"
    ):
        plan_engines(configured(programs, "engine.fp32_head=true"))
    with pytest.raises(ConfigError, match="deterministic needs SGLang on a GPU, got device: cpu"):
        configured(programs, "engine.deterministic=true", "engine.device=cpu")
    with pytest.raises(ConfigError, match="fp32_head is for kind: sglang"):
        load_config(EXAMPLE, ["engine.fp32_head=true"])
