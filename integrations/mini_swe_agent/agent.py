"""A coding agent on mini-swe-agent: its default agent, which has the model call bash until the task is done.

python agent.py "Which word is in word.txt?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def run(questions: Sequence[str]) -> str:
    """Work on the first task in the current folder; what the agent submits."""
    config = yaml.safe_load(Path(package_dir / "config" / "mini.yaml").read_text())
    settings = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors")
    (task,) = questions
    return DefaultAgent(model, LocalEnvironment(), **settings).run(task)["submission"]


if __name__ == "__main__":
    print(run(sys.argv[1:]))
