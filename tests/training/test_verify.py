"""`areal-agents verify` checks every engine of a run, and reports which weights it has."""

from __future__ import annotations

import shutil
from pathlib import Path

from publish_support import disturb, publisher
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.config import load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.inference import SGLangEngine
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"


def test_every_engine_of_a_run_is_compared_with_what_was_published(
    group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    folder, policy = RunFolder(run_dir), load_policy(model_folder, group)
    save_config(load_config(EXAMPLE, [f"run_dir={run_dir}", f"model={model_folder}"]), folder.config)
    missing = "http://127.0.0.1:9"
    folder.write_endpoints(Endpoints((engine_url, missing), "127.0.0.1", 1, "key"))
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        for version in (0, 1):
            out.publish(version=version, step=version)
            disturb(policy, version)
    found = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert found.exit_code == 1 and f"{engine_url}: version 1, " in found.output
    assert "weights agree" in found.output and f"{missing}: " in found.output
    current = run_dir / "weights" / "v1" / "model.safetensors"
    shutil.copy(run_dir / "weights" / "v0" / "model.safetensors", current)
    assert f"{engine_url} serves other weights" in CliRunner().invoke(app, ["verify", str(run_dir)]).output


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert isinstance(found.exception, ConfigError) and "is not the folder of a run" in str(found.exception)
