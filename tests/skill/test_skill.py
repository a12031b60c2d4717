"""The skill for coding agents: what it names exists, and installing it replaces a file only on request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.config.reference import explain_key
from areal_agents.errors import ConfigError
from areal_agents.skill import NAME, SKILL, install

TEXT = SKILL.read_text(encoding="utf-8")


def test_the_header_has_the_fields_that_coding_agents_read() -> None:
    head = yaml.safe_load(TEXT.split("---\n")[1])
    assert head["name"] == NAME and re.fullmatch(r"[a-z0-9-]{1,64}", NAME)
    assert 100 < len(head["description"]) <= 1024


def test_every_command_and_option_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"(?:^ {4}|&& |`)areal-agents ((?:[a-z]+ ?)+)([^\n`]*)", TEXT, re.MULTILINE)
    assert len(lines) > 10
    for words, rest in lines:
        name, *inner = words.split()
        command = commands[name]
        if hasattr(command, "commands"):
            command = command.commands.get(inner[0] if inner else "run") or command.commands["run"]
        known = {option for parameter in command.params for option in parameter.opts}
        asked = set(re.findall(r"(?<!\S)--?[a-z][-a-z]*", rest.partition("#")[0]))
        assert asked <= known, (words, asked - known)


def test_every_setting_exists() -> None:
    keys = set(re.findall(r"\b(?:rollout|trainer|eval|engine)\.[a-z_.]+\b", TEXT))
    assert len(keys) >= 6
    for key in keys:
        assert explain_key(key), key


def test_the_skill_is_written_once_and_replaced_only_on_request(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["skill", str(tmp_path)])
    path = tmp_path / ".claude" / "skills" / NAME / "SKILL.md"
    assert done.exit_code == 0 and path.read_text(encoding="utf-8") == TEXT
    assert install(tmp_path, folder=".claude/skills") == path  # the file is already the same
    path.write_text("mine")
    with pytest.raises(ConfigError, match="give --replace"):
        install(tmp_path, folder=".claude/skills")
    install(tmp_path, folder=".claude/skills", replace=True)
    assert path.read_text(encoding="utf-8") == TEXT
    with pytest.raises(ConfigError, match="there is no folder"):
        install(tmp_path / "nowhere", folder=".claude/skills")
