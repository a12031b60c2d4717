"""Resources servers of NeMo Gym, through the running proxy: a substitute for one, and a real one."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import example_nemo_gym
import pytest
import uvicorn
from environment_support import REQUEST_S, Heard, handle, played
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.started_server import StartedServer
from areal_agents.errors import TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import environment_agent, environment_tasks
from areal_agents.sockets import listen, url_of
from integrations.conversations import call

FOLDER = Path(__file__).parent
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Add 1, then add 2, then get the count."}],
        "tools": [
            {
                "type": "function",
                "name": "increment_counter",
                "description": "Add to the counter.",
                "parameters": {
                    "type": "object",
                    "properties": {"count": {"type": "integer", "description": "how much"}},
                    "required": ["count"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
            {
                "type": "function",
                "name": "get_counter_value",
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {},
                    "required": [],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        ],
    },
    "expected_count": 6,
    "initial_count": 3,
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(example_nemo_gym.app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield url_of(listener)
        server.force_exit = server.should_exit = True
        thread.join()


def counts(stack: Stack, url: str) -> None:
    """Play a session that counts correctly, and one that does not."""

    async def play() -> None:
        agent = environment_agent(EnvironmentConfig(use=f"nemo-gym:{url}"))
        try:
            async with asyncio.timeout(REQUEST_S):
                said = Heard(
                    call("increment_counter", '{"count": "many"}') + call("verify", "{}"),
                    call("increment_counter", '{"count": 1}') + call("increment_counter", '{"count": 2}'),
                    call("get_counter_value", "{}"),
                    "It is 6.",
                )
                assert await agent.run(ROW, handle(stack, said)) == 1.0
                assert "how much" in said.prompts[0] and "integer" in said.news[1]
                assert "there is no tool 'verify'" in said.news[1]
                assert "success" in said.news[2] and '"count":6' in said.news[3].replace("\\", "")
                assert await agent.run(ROW, handle(stack, ["It is 6."])) == 0.0
        finally:
            await agent.close()

    asyncio.run(play())


def test_sessions_are_played_and_verified(stack: Stack, server: str) -> None:
    counts(stack, server)


@pytest.mark.environments
def test_a_server_of_the_real_package_is_played(stack: Stack, nemo_gym_python: str) -> None:
    """The package needs Python 3.12 and fills 1.4 GB: `make environments-nemo-gym`."""

    async def start() -> StartedServer:
        command = f"{nemo_gym_python} {FOLDER / 'real_nemo_gym.py'} {{port}}"
        return await StartedServer.start(command, ready_path="/openapi.json")

    with asyncio.Runner() as runner:
        started = runner.run(start())
        try:
            counts(stack, started.url)
        finally:
            runner.run(started.end())


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        ("no json", "/verify gave no JSON: fine"),
        ("list", "/verify must give an object, got []"),
        ("nan", "/verify: a reward must be finite, got nan"),
        ("nothing", "/verify gave no reward"),
        ("error", "/verify answered with status 500: no such answer"),
        ("endless", "the answer of /verify is longer than 16777216 bytes"),
        ("silence", "no answer of /verify within 5 s"),
    ],
)
def test_an_invalid_response_of_the_server_fails_the_episode(
    stack: Stack, server: str, lie: str, fault: str
) -> None:
    # The limit of the silence applies to /seed_session as well, which must succeed.
    use = f"nemo-gym:{server}?step_timeout_s={5 if lie == 'silence' else 60}"
    with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
        played(stack, use, {**ROW, "initial_count": lie}, ["It is 6."])


def test_rows_are_the_tasks(tmp_path: Path, server: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**ROW, "initial_count": n}) + "\n" for n in range(20)))

    def rows(options: str, split: Any = "train") -> list[dict[str, Any]]:
        return environment_tasks(EnvironmentConfig(use=f"nemo-gym:{server}{options}"), split)

    use = f"?rows={file}&held_out=%5B%221%22,%222%22%5D"
    assert [row["initial_count"] for row in rows(use, "eval")] == [0, 1] and len(rows(use)) == 18
    for options, fault in (
        ("", "a server has no rows; name a JSONL file"),
        (f"?rows={tmp_path}/none", "cannot read the rows"),
        ("?row=1", "nemo-gym has no option row; it has"),
    ):
        with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
            rows(options)
