"""The agent of the player that changes tests: a command-line agent whose program is `edit_tests.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from areal_agents.doctor.rewards import edit_tests
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import CliAgentConfig


def editor_of_tests(workdir: str, home: Path) -> CliAgent:
    """Return the agent.

    Args:
        workdir: the setting `agent.workdir` of the run's own agent.
        home: a folder for the description of the program.
    """
    definition = home / "test_editor.toml"
    # A string of JSON is also a string of TOML.
    definition.write_text(
        f"""program = "python"
install = "it comes with Python"
least_version = "3.11"
dialect = "chat"
arguments = ["-I", {json.dumps(edit_tests.__file__)}]
stdin = "{{prompt}}"

[environment]
OPENAI_BASE_URL = "{{base_url}}"
OPENAI_API_KEY = "{{key}}"
"""
    )
    return CliAgent(
        CliAgentConfig(cli=str(definition), executable=sys.executable, workdir=workdir, prompt="{task}")
    )
