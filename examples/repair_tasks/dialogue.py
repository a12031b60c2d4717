"""What the policy sees and says in mini-swe-agent, as `mini.toml` configures it.

The warm-up and the agent share these texts, so the starting policy is trained on exactly the conversations
that mini-swe-agent holds.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template
from warmup.transcripts import call_text

DEFINITION = Path(__file__).parent / "mini.toml"
SETTINGS: dict[str, Any] = yaml.safe_load(tomllib.loads(DEFINITION.read_text())["files"]["mini.yaml"])
_OBSERVATION = Template(SETTINGS["model"]["observation_template"])
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what ends an episode of mini-swe-agent

# The tool of minisweagent.models.utils.actions_toolcall, which is not installed beside areal-agents.
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "description": "The bash command to execute",
                }
            },
            "required": ["command"],
        },
    },
}


def opening(instruction: str) -> list[dict[str, str]]:
    """The messages that an episode starts with."""
    templates = SETTINGS["agent"]
    return [
        {"role": "system", "content": Template(templates["system_template"]).render()},
        {"role": "user", "content": Template(templates["instance_template"]).render(task=instruction)},
    ]


def command_text(command: str) -> str:
    """How the model writes a command, as a call of its tool."""
    return call_text(BASH_TOOL["function"]["name"], {"command": command})


def observation(output: str) -> str:
    """What the model is shown of the output of a command."""
    return _OBSERVATION.render(output={"output": output})


def look(file: str) -> str:
    """The command that shows a file."""
    return f"cat {file}"


def fix(file: str, code: str, *, in_place: bool = True) -> str:
    """The command that replaces the last line and runs the test; without `in_place` it changes nothing."""
    return f"sed {'-i ' if in_place else ''}'3s/return .*/{code}/' {file}; python3 test.py"
