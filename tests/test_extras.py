"""An install without an extra says which one a command needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_agents.extras import MODULES, install_command

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "search_agent" / "model"
NAMES = {  # distributions whose module has another name
    "agent-client-protocol": "acp",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyyaml": "yaml",
}


def test_every_requirement_of_an_extra_is_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in MODULES.items():
        required = {name.split(">=")[0].split("[")[0] for name in extras[extra]} - {"areal-agents"}
        assert {NAMES.get(name, name.replace("-", "_")) for name in required} == set(modules)


def test_a_module_of_no_extra_is_not_explained() -> None:
    assert install_command("torch.nn") == "pip install 'areal-agents[train]'"
    assert install_command("my_module") is None and install_command(None) is None


def test_ctrl_c_while_modules_are_imported_prints_no_stack(tmp_path: Path) -> None:
    done = without("typer", tmp_path, "--help", raises="KeyboardInterrupt()")
    assert done.returncode == 130 and done.stderr == ""


def without(
    module: str,
    folder: Path,
    *arguments: str,
    raises: str = "ModuleNotFoundError(f'No module named {name!r}', name=name)",
) -> subprocess.CompletedProcess[str]:
    """Run the command line where the import of a module raises."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {module!r}:\n"
        f"            raise {raises}\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", "areal_agents", *arguments],
        capture_output=True, text=True, timeout=60, env=environment, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("typer", ("--help",), "areal-agents[proxy]"),
        ("rich", ("--help",), "areal-agents[proxy]"),
        ("typer", ("serve", "--model", "m", "--engine-url", "http://gpu-host"), "areal-agents[proxy]"),
        ("typer", ("serve", "--model", "m"), "areal-agents[train]"),
        ("typer", ("train", "config.yaml"), "areal-agents[train]"),
        ("torch", ("serve", "--model", str(MODEL)), "areal-agents[train]"),
        ("torch", ("engine", "--model", str(MODEL)), "areal-agents[train]"),
        ("torch", ("train", "config.yaml"), "areal-agents[train]"),
        ("torch", ("eval", str(MODEL.parent / "config.yaml")), "areal-agents[train]"),
    ],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, module: str, arguments: tuple[str, ...], extra: str
) -> None:
    done = without(module, tmp_path, *arguments)
    assert done.returncode == 1 and f"pip install '{extra}'" in done.stderr
    assert "Traceback" not in done.stderr
