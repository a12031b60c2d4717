"""The fingerprint of a run changes with its agent, reward, environment, limits and held-out tasks only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.evaluation.folder import EvaluationFolder
from areal_agents.launch.evaluation import identity_of
from areal_agents.launch.fingerprint import Fingerprint, FingerprintFile
from areal_agents.launch.source_files import digests_of

AGENT = "import helper\nfrom package import inner\nimport json\n\nasync def agent(task, ep): ...\n"
FILES = {
    "agent.py": AGENT,
    "helper.py": "from package.deep.tool import use\n",
    "unused.py": "",
    "package/__init__.py": "",
    "package/inner.py": "from . import sibling\nfrom ..nowhere import nothing\n",
    "package/sibling.py": "import json\n",
    "package/deep/tool.py": "def use(): ...\n",
    "scoring.py": "def score(episode): return 1.0\n",
    "run.mjs": "console.log(1)\n",
    "train.jsonl": '{"n": 1}\n',
    "held.jsonl": '{"n": 2}\n',
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path


def config_of(project: Path, **given: object) -> Config:
    tree = {
        "model": str(project / "model"),
        "agent": "agent.py:agent",
        "reward": "scoring.py:score",
        "data": {"path": "train.jsonl"},
        "eval": {"data": {"path": "held.jsonl"}},
        **given,
    }
    if "environment" in given:
        del tree["agent"], tree["eval"], tree["reward"]
        if "data" not in given:
            del tree["data"]
    (project / "config.yaml").write_text(json.dumps(tree))
    return load_config(project / "config.yaml")


def edit(name: str) -> Callable[[Path], None]:
    return lambda project: (project / name).write_text(FILES[name] + "# changed\n") and None


def test_packages_of_another_environment_are_libraries(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "elsewhere/lib/python3/site-packages"  # as if added by a .pth file
    installed.mkdir(parents=True)
    (installed / "library.py").write_text("")
    (project / "helper.py").write_text("import library\n")
    monkeypatch.syspath_prepend(installed)
    before = Fingerprint.of(config_of(project)).digest
    (installed / "library.py").write_text("# another release\n")
    assert Fingerprint.of(config_of(project)).digest == before


def test_only_the_packages_that_pip_installed_into_a_folder_are_libraries(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "packages"  # pip install --target packages
    for name in ("library/__init__.py", "single.py", "own.py", "library-1.0.dist-info/RECORD"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("")
    (target / "library-1.0.dist-info/RECORD").write_text("library/__init__.py,,\nsingle.py,sha256=x,0\n")
    (tmp_path / "link").symlink_to(target)
    (project / "helper.py").write_text("import library, single, own\n")
    monkeypatch.syspath_prepend(tmp_path / "link")
    found = [name for name in digests_of(f"{project}/agent.py:agent") if name.startswith("packages/")]
    assert found == ["packages/own.py"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("agent.py", "the agent (agent.py)"),
        ("helper.py", "the agent (helper.py)"),
        ("package/__init__.py", "the agent (package/__init__.py)"),
        ("package/sibling.py", "the agent (package/sibling.py)"),
        ("package/deep/tool.py", "the agent (package/deep/tool.py)"),
        ("scoring.py", "the reward (scoring.py)"),
        ("held.jsonl", "the held-out tasks (held.jsonl)"),
        ("unused.py", ""),
        ("train.jsonl", ""),
    ],
)
def test_only_the_files_that_an_evaluation_uses_change_the_fingerprint(
    project: Path, name: str, changes: str
) -> None:
    before = Fingerprint.of(config_of(project))
    edit(name)(project)
    after = Fingerprint.of(config_of(project))
    assert after.changes_since(before.parts) == changes
    assert (after.digest == before.digest) == (changes == "")


def test_settings_and_the_script_of_a_command_change_the_fingerprint(project: Path) -> None:
    before = Fingerprint.of(config_of(project))
    longer = Fingerprint.of(config_of(project, rollout={"limits": {"max_turns": 3}}))
    assert longer.changes_since(before.parts) == "the limits of an episode (as the configuration names it)"
    command = Fingerprint.of(config_of(project, agent={"command": "node run.mjs --fast"}))
    edit("run.mjs")(project)
    edited = Fingerprint.of(config_of(project, agent={"command": "node run.mjs --fast"}))
    assert edited.changes_since(command.parts) == "the agent (run.mjs)"


def test_the_files_and_the_package_of_an_environment_change_the_fingerprint(project: Path) -> None:
    (project / "env.py").write_text("import helper\n\nclass Search: ...\n")
    line = "tools:env.py:Search?max_turns=3"
    with_tools = Fingerprint.of(config_of(project, environment=line, data={"path": "train.jsonl"}))
    edit("helper.py")(project)
    edited = Fingerprint.of(config_of(project, environment=line, data={"path": "train.jsonl"}))
    assert edited.changes_since(with_tools.parts) == "the environment (helper.py)"
    # Any installed package can serve as that of an environment.
    other = Fingerprint.of(config_of(project, environment={"use": "verifiers:pytest", "python": ""}))
    elsewhere = Fingerprint.of(
        config_of(project, environment={"use": "verifiers:pytest", "python": sys.executable})
    )
    assert other.parts["environment"]["package pytest"] == pytest.__version__
    assert elsewhere.parts["environment"]["package pytest"] == pytest.__version__
    older = {**other.parts, "environment": {**other.parts["environment"], "package pytest": "1.0"}}
    assert other.changes_since(older) == f"the environment (package pytest: 1.0 → {pytest.__version__})"


def test_a_pickled_function_has_the_same_fingerprint_from_another_kernel(project: Path) -> None:
    # The elements share objects, so the memo of the pickler depends on the iteration order of the set.
    body = "'a' if task in {('x', 'y'), ('y', 'z'), ('x', 'y', 'z', 'w')} else 'b'"

    def pickled(process: int, body: str) -> Fingerprint:
        code = (
            "import cloudpickle, pathlib, sys\n"
            f"source = {f'def agent(task, ep): return {body}'!r}\n"
            "space = {'__name__': '__main__'}\n"
            f"exec(compile(source, '/tmp/ipykernel_{process}/1.py', 'exec'), space)\n"
            "pathlib.Path('agent.pkl').write_bytes(cloudpickle.dumps(space['agent']))"
        )
        environment = {"PYTHONHASHSEED": str(process), "PATH": ""}
        subprocess.run([sys.executable, "-c", code], cwd=project, check=True, env=environment, timeout=60)
        return Fingerprint.of(config_of(project, agent=f"{project}/agent.pkl:agent"))

    first, *again, other = *(pickled(process, body) for process in range(1, 5)), pickled(5, body + " + 'c'")
    assert [one.changes_since(first.parts) for one in again] == [""] * 3
    regrouped = pickled(6, body.replace("('x', 'y'), ('y', 'z')", "('x', 'z'), ('y', 'y')"))
    assert regrouped.changes_since(first.parts) == "the agent (agent.pkl)"
    assert other.changes_since(first.parts) == "the agent (agent.pkl)"


def test_each_changed_fingerprint_is_recorded_once(project: Path) -> None:
    file = FingerprintFile(project / "fingerprint.json")
    first = Fingerprint.of(config_of(project))
    assert file.last() is None and file.record(first, step=0) == "" and file.record(first, step=3) == ""
    edit("agent.py")(project)
    second = Fingerprint.of(config_of(project))
    assert file.record(second, step=5) == "the agent (agent.py)"
    assert file.record(second, step=6) == ""
    assert file.changes() == {second.digest: "the agent (agent.py) changed after step 5"}


def test_an_evaluation_is_not_continued_with_a_changed_agent(project: Path) -> None:
    folder = EvaluationFolder(project / "out")
    assert not folder.begin(identity_of(config_of(project), model="weights", ablate_tool=False))
    assert folder.begin(identity_of(config_of(project), model="weights", ablate_tool=False))
    edit("agent.py")(project)
    with pytest.raises(ConfigError, match=r"it differs in sources\.agent\.agent\.py; choose another folder"):
        folder.begin(identity_of(config_of(project), model="weights", ablate_tool=False))


def test_run_files_do_not_change_the_fingerprint_of_a_command_that_names_the_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    config = config_of(project, agent={"command": f"node run.mjs --root . --home {project.parent}"})
    before = Fingerprint.of(config)
    (project / "runs").mkdir()
    (project / "runs" / "store.db").write_text("episodes")
    assert Fingerprint.of(config).changes_since(before.parts) == ""
    edit("run.mjs")(project)
    assert Fingerprint.of(config).changes_since(before.parts) == "the agent (run.mjs)"
