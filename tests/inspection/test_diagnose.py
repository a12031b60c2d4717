"""The report on a run that a user attaches to an issue, which must contain no secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.config import load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.inspection.diagnose import HIDDEN, diagnose
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.store import NewEpisode, Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"
SECRETS = {
    "of the configuration": "project-key-0123456789",
    "of the proxy": "admin-abcdefghijklmnop",
    "of the environment": "plain-words-as-password",
    "by its form": "sk-proj-ABCDEFGHIJKLMNOP1234",
    "in a header": "opaque.value/with+signs==",
    "in a URL": "someone:hunter2hunter2",
    "by its name": "zzzz-9999-xxxx",
    "of an option": "option.value.0123",
    "of basic authentication": "dXNlcjpwYXNzd29yZA==",
    "in a URL without a user": "redispassword99",
    "of an episode": "ep-key-0123456789",
    "of a numbered variable": "the-second-of-two-keys",
    "in JSON": 'a"quoted\\value',
    "in PEM": "MIIEvQIBADANBgkqhkiG9w0",
    "at the cut of an error": "cut-in-the-middle-of-it",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that has ended after eight steps without a gradient, and whose files contain secrets."""
    monkeypatch.setenv("SOME_PASSWORD", SECRETS["of the environment"])
    monkeypatch.setenv("PROVIDER_API_KEY_2", SECRETS["of a numbered variable"])
    monkeypatch.setenv("DB_PASS", SECRETS["in JSON"])
    monkeypatch.setenv("OTHER_TOKEN", SECRETS["at the cut of an error"])
    folder = RunFolder(tmp_path / "run")
    folder.log("x").parent.mkdir(parents=True)
    (folder.root / "lock").touch()
    key = SECRETS["of the configuration"]
    settings = [f"run_dir={folder.root}", f'proxy.project_keys=["{key}"]']
    save_config(load_config(EXAMPLE, settings), folder.config)
    folder.write_endpoints(Endpoints(("http://127.0.0.1:9",), "127.0.0.1", 9, SECRETS["of the proxy"]))
    row = {"time": 0.0, "groups_solved_some": 0, "groups_solved_all": 0, "groups_solved_none": 8}
    row["kl_behavior_k3"] = 0.0
    rows = [{**row, "step": step, "skipped_steps": 0} for step in range(1, 9)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store.open(folder.store) as store:
        store.open_episode(NewEpisode("e", "hash")).result()
        store.seal("e", "failed", error=f"refused: api_key={SECRETS['by its name']}").result()
        store.open_episode(NewEpisode("long", "other-hash")).result()
        padding = "x" * (290 - len("it failed "))
        error = f"it failed {padding} {SECRETS['at the cut of an error']}"
        store.seal("long", "failed", error=error).result()
    folder.log("rollout").write_text(
        f"asked with {SECRETS['by its form']}\nAuthorization: Bearer {SECRETS['in a header']}\n"
        f"http://{SECRETS['in a URL']}@host/path\nthe password {SECRETS['of the environment']}\n"
        f"the admin {SECRETS['of the proxy']}, max_tokens=512\n"
        f"ran server --api-key {SECRETS['of an option']} --port 8000\n"
        f"Authorization: Basic {SECRETS['of basic authentication']}\n"
        f"redis://:{SECRETS['in a URL without a user']}@host\n"
        f"404 for http://127.0.0.1:9/e/{SECRETS['of an episode']}/v1/models\n"
        f"the second {SECRETS['of a numbered variable']}\n{json.dumps({'db': SECRETS['in JSON']})}\n"
        f"-----BEGIN PRIVATE KEY-----\n{SECRETS['in PEM']}\n-----END PRIVATE KEY-----\nthe end\n"
    )
    return folder


def test_the_file_contains_what_an_issue_needs(folder: RunFolder, tmp_path: Path) -> None:
    said: list[str] = []
    path = diagnose(folder.root, tmp_path / "out.zip", say=said.append)
    with zipfile.ZipFile(path) as file:
        texts = {name.partition("/")[2]: file.read(name).decode() for name in file.namelist()}
    assert {"summary.txt", "config.json", "machine.txt", "packages.txt", "metrics.jsonl"} < texts.keys()
    assert texts["summary.txt"].splitlines() == said
    for part in (
        "stopped, step 8 of",
        "health: in the last 5 steps, all groups",
        "failed episode e: refused",
    ):
        assert part in texts["summary.txt"]
    assert json.loads(texts["config.json"])["trainer"]["steps"] and "torch==" in texts["packages.txt"]
    assert len(texts["metrics.jsonl"].splitlines()) == 8 and "max_tokens=512" in texts["logs/rollout.log"]
    assert path.stat().st_mode & 0o077 == 0  # readable by its owner only


def test_no_secret_is_in_the_file_or_on_the_terminal(folder: RunFolder, tmp_path: Path) -> None:
    said: list[str] = []
    path = diagnose(folder.root, tmp_path / "out.zip", say=said.append)
    with zipfile.ZipFile(path) as file:
        everything = "\n".join([*said, *(file.read(name).decode() for name in file.namelist())])
    forms = {where: (secret, json.dumps(secret)[1:-1]) for where, secret in SECRETS.items()}
    assert {where for where, of in forms.items() if any(form in everything for form in of)} == set()
    assert SECRETS["at the cut of an error"][:8] not in everything
    assert "--port 8000" in everything and "/v1/models" in everything and "the end" in everything
    assert everything.count(HIDDEN) >= len(SECRETS)


def test_the_command_names_the_file_and_refuses_another_folder(folder: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "named.zip"
    done = CliRunner().invoke(app, ["diagnose", str(folder.root), "-o", str(out)])
    assert done.exit_code == 0 and f"written to {out}" in done.output and out.exists()
    with pytest.raises(ConfigError, match="not the folder of a run"):
        diagnose(tmp_path, tmp_path / "none.zip")
    assert not (tmp_path / "none.zip").exists()


def test_damaged_metrics_are_named_and_the_rest_is_written(folder: RunFolder, tmp_path: Path) -> None:
    with folder.metrics.open("a") as file:
        file.write("{half\n")
    said: list[str] = []
    diagnose(folder.root, tmp_path / "out.zip", say=said.append)
    assert any("the metrics cannot be read: line 9 of" in line for line in said)
    with pytest.raises(ConfigError, match="there is no folder"):
        diagnose(folder.root, tmp_path / "none" / "out.zip")
