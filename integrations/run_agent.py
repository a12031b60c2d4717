"""Runs an agent of this folder in the interpreter of its group, which has only its framework.

    python -P run_agent.py FOLDER '{"questions": […], "options": {…}}'

The agent finds the proxy through its environment variables. The last line of standard output is a JSON object
with the answer. It imports nothing of this project.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType


def load_agent(folder: str) -> ModuleType:
    """Return FOLDER/agent.py as a module."""
    file = Path(__file__).parent / folder / "agent.py"
    spec = importlib.util.spec_from_file_location(f"integration_{folder}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # frameworks resolve annotations through it
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    answer = load_agent(sys.argv[1]).run(told["questions"], **told["options"])
    print("\n" + json.dumps({"answer": answer}))
