"""Every code block of the pages is valid: configurations load, commands parse, Python compiles."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
import yaml
from docs_support import PAGES, Block, block, blocks, commands

import areal_agents.cli
import benchmarks.__main__
from areal_agents.config import validate_config
from areal_agents.config.files import nested, parse_override, proxy_config, set_in
from areal_agents.quickstart import quickstart_model
from areal_agents.rollout.agents.cli.definition import load_definition
from areal_agents.store import Store

LANGUAGES = {"bash", "python", "sql", "js", "yaml", "json", "toml", "console", "text", "mermaid"}
CONFIGURED = ("train", "eval", "collect", "plan")  # the commands whose arguments are configuration keys


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of an empty store."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    with Store.open(path):
        return str(path)


@pytest.mark.parametrize("found", blocks(), ids=lambda b: b.id)
def test_every_block_names_its_language(found: Block) -> None:
    assert found.language in LANGUAGES, "it is highlighted, and checked, by its language"


def test_every_code_block_is_fenced() -> None:
    with pytest.raises(AssertionError, match="0 blocks"):
        block("README.md", "make nonsense")
    assert block("README.md", "make demo").language == "bash"
    indented = re.compile(r"(?<=\n\n)    \S.*")
    for page in PAGES:
        outside = re.sub(r"(?ms)^( *)```.*?^ *```", "", page.read_text())
        assert not indented.findall(outside), page


@pytest.mark.parametrize("found", blocks("yaml"), ids=lambda b: b.id)
def test_a_configuration_is_valid(found: Block, store: str) -> None:
    given = yaml.safe_load(found.text)
    given.get("engine", {}).pop("routed_experts", None)  # refused with a model that has no experts
    tree = {"agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}, "ablation": None, **given}
    if "environment" in given or "environments" in given:
        del tree["agent"], tree["data"]
    elif tree["data"].get("traffic"):
        del tree["agent"]
    elif "episodes" in tree["data"]:
        tree |= {"data": {"episodes": store}}
        del tree["agent"]
    for of, key in ((tree, "model"), (tree.get("trainer", {}), "teacher_model")):
        if of is tree or key in of:
            of[key] = str(quickstart_model())
    validate_config(tree, source=found.id)


@pytest.mark.parametrize("found", blocks("toml"), ids=lambda b: b.id)
def test_an_agent_definition_is_valid(found: Block, tmp_path: Path) -> None:
    (tmp_path / "definition.toml").write_text(found.text)
    load_definition(str(tmp_path / "definition.toml"))


@pytest.mark.parametrize("found", blocks("bash"), ids=lambda b: b.id)
def test_a_command_parses(found: Block, store: str) -> None:
    programs = {
        ("areal-agents",): areal_agents.cli.app,
        ("python", "-m", "benchmarks"): benchmarks.__main__.app,
    }
    for words in commands(found.text):
        for program, app in programs.items():
            if tuple(words[: len(program)]) == program:
                parsed = _parse(app, words[len(program) :])
                _check_overrides(words, parsed, store)


def _parse(app: typer.Typer, words: list[str]) -> dict[str, Any]:
    """The parameters of a command line; an unknown option or a missing argument raises."""
    command = typer.main.get_command(app)
    context = None
    while isinstance(command, typer.core.TyperGroup):
        context = command.make_context("areal-agents", [], parent=context, resilient_parsing=True)
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    return command.make_context(command.name, list(words), parent=context).params


def _check_overrides(words: list[str], parameters: dict[str, Any], store: str) -> None:
    """Check the KEY=VALUE arguments of a command that takes configuration keys."""
    given = parameters.get("overrides") or []
    if words[1] == "serve":
        proxy_config(given)
    if words[1] not in CONFIGURED:
        return
    from_store = any(override.startswith("data.episodes=") for override in given)
    tree: dict[str, Any] = {"eval": {"data": {"path": "heldout.jsonl"}}}
    if not from_store:
        tree |= {"agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}}
    for override in given:
        override = f"data.episodes={store}" if override.startswith("data.episodes=") else override
        key, value = parse_override(override.replace("seed=n", "seed=0").replace("PORT", "30000"))
        set_in(tree, key, nested(key, value))
    tree["model"] = str(quickstart_model())  # also in place of a model that an earlier command creates
    if "teacher_model" in tree.get("trainer", {}):
        tree["trainer"]["teacher_model"] = tree["model"]
    validate_config(tree, source=" ".join(words))


@pytest.mark.parametrize("found", blocks("python"), ids=lambda b: b.id)
def test_python_compiles_and_its_imports_exist(found: Block) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(found.text, found.id, "exec", flags, dont_inherit=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("areal_agents"):
            if node.module.endswith(".tapered"):  # the module that the page tells the reader to write
                continue
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
