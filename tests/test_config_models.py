"""Names of models in a configuration: folders, the quick-start model, and models of the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import hub_with

from areal_agents.config import load_config
from areal_agents.config.models import model_folder
from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.quickstart import quickstart_model

MODEL = Path(__file__).parent.parent / "examples" / "search_agent" / "model"
# The Hub's address is read when huggingface_hub is imported, so each download runs in a separate process.
_FIND = """
import sys
from pathlib import Path
from areal_agents.cli import run_app
import typer
commands = typer.Typer()
@commands.command()
def find(name: str):
    from areal_agents.config.models import model_folder
    print(model_folder(name, Path.cwd()))
run_app(commands)
"""


def find(name: str, hub: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", _FIND, name],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_folder_takes_precedence_over_a_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert model_folder("quickstart", tmp_path) == str(tmp_path / "quickstart")
    assert model_folder("org/model", tmp_path) == str(tmp_path / "org" / "model")
    assert model_folder("absent", tmp_path) == str(tmp_path / "absent")


def test_the_name_quickstart_is_that_of_the_quick_start_model(tmp_path: Path) -> None:
    assert quickstart_model() == MODEL
    config = tmp_path / "config.yaml"
    config.write_text("model: quickstart\nagent: a:b\ndata: {path: tasks.jsonl}\n")
    assert load_config(config).model == str(MODEL)


def test_a_model_of_the_hub_is_downloaded_once(tmp_path: Path) -> None:
    with hub_with({"org/small": MODEL}) as hub:
        first = find("org/small", hub, tmp_path)
        assert first.returncode == 0, first.stderr
        folder = Path(first.stdout.strip())
        assert {f.name: f.read_bytes() for f in folder.iterdir()} == {
            f.name: f.read_bytes() for f in MODEL.iterdir()
        }
    again = find("org/small", hub, tmp_path)  # the Hub has stopped, and the cache has the model
    assert Path(again.stdout.strip()) == folder, again.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "no model of this name on the Hugging Face Hub"),
        ("org/gated", "needs permission: accept its conditions"),
    ],
)
def test_a_refused_download_is_reported_with_the_reason(name: str, message: str, tmp_path: Path) -> None:
    with hub_with({}) as hub:
        refused = find(name, hub, tmp_path)
    assert refused.returncode == 1 and message in refused.stderr and "Traceback" not in refused.stderr


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    with reserved_ports(1) as (port,):
        refused = find("org/absent", f"http://127.0.0.1:{port}", tmp_path)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "hf download org/absent --local-dir FOLDER" in refused.stderr


def test_a_missing_folder_is_refused_before_anything_else(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: nowhere\nagent: a:b\ndata: {path: tasks.jsonl}\n")
    with pytest.raises(ConfigError, match="not a Hugging Face model folder"):
        load_config(config)
