"""The real Node client of OpenAI against the running proxy."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from integration_support import Stack, check

from integrations.cases import CASES, Case
from integrations.environments import FOLDER, node_environment

RUN_TIMEOUT_S = 120
NODE = [case for case in CASES if case.folder == "openai_node"]


@pytest.mark.parametrize("case", NODE, ids=lambda case: case.id)
def test_the_node_client_is_recorded_exactly(case: Case, stack: Stack) -> None:
    node = node_environment(FOLDER / case.folder).node  # the first time, this needs the npm registry
    episode = stack.open_episode(case.conversation.script())
    argument = json.dumps({"questions": case.conversation.questions, **case.options})
    done = subprocess.run(
        [str(node), str(FOLDER / case.folder / "agent.mjs"), argument],
        env={**os.environ, "OPENAI_BASE_URL": episode["base_url"], "OPENAI_API_KEY": episode["key"]},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answer"] == case.conversation.answer
    if case.options.get("stream"):
        assert said["streamed"] == "Two more.Yes: take one. ☂Yes, again."
    check(case, stack.turns(episode), stack.engine.exchanges)
