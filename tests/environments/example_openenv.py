"""Example servers, as authors of OpenEnv environments write them: `python example_openenv.py KIND PORT`."""

from __future__ import annotations

import asyncio
import sys
import time

import uvicorn
from fastapi import FastAPI, WebSocket
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess a word."""

    word: str


class Move(Action):
    """Move on the line."""

    steps: int
    to_the_left: bool = False


class Seen(Observation):
    text: str = ""


class Words(Environment):
    """Rewards a guess of the letter that the seed selects."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, letters="abc", **kwargs):
        self.wanted, self.guesses = letters[seed % len(letters)], 0
        return Seen(text=f"Guess one of {letters}.")

    def step(self, action, timeout_s=None, **kwargs):
        self.guesses += 1
        if action.word == "sleep":
            time.sleep(60)
        if action.word == "raise":
            raise ValueError("that is no word")
        right = action.word == self.wanted
        return Seen(text="Right." if right else "Wrong.", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State()


class Line(Environment):
    """A position on a line, which is rewarded from 3 on."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.position = 0
        return Seen(text="You are at 0.")

    def step(self, action, timeout_s=None, **kwargs):
        self.position += -action.steps if action.to_the_left else action.steps
        done = self.position >= 3
        return Seen(text=f"You are at {self.position}.", reward=0.5 if done else None, done=done)

    @property
    def state(self):
        return State()


class Notes(MCPEnvironment):
    """A tool that stores notes, with a reward once one of them is b."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.notes: list[str] = []
        server = FastMCP("notes")

        @server.tool
        def note(text: str) -> str:
            """Write a note."""
            self.notes.append(text)
            return f"There are {len(self.notes)} notes."

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.notes.clear()
        return Seen(text="Write a note about b.")

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = float("b" in self.notes), "b" in self.notes
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("there are only tools")

    @property
    def state(self):
        return State()


def liar() -> FastAPI:
    """Implements the protocol, but sends an invalid message, which the word of the action selects."""
    app = FastAPI()

    @app.get("/health")
    def health():
        return {}

    @app.get("/schema")
    def schema():
        return {"action": Guess.model_json_schema()}

    @app.websocket("/ws")
    async def session(socket: WebSocket):
        await socket.accept()
        while True:
            message = await socket.receive_json()
            lie = message["data"].get("word", "")
            good = '{"type": "observation", "data": {"observation": {"text": "Lie."}, "done": false}}'
            if lie == "silence":
                await asyncio.sleep(60)
            await socket.send_text(
                {
                    "nonsense": "{",
                    "nan": good.replace('"done"', '"reward": NaN, "done"'),
                    "list": good.replace('{"text": "Lie."}', "[]"),
                    "done": good.replace("false", '"no"'),
                    "endless": good.replace("Lie.", "x" * (40 << 20)),
                }.get(lie, good)
            )

    return app


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    apps = {
        "words": lambda: create_fastapi_app(Words, Guess, Seen, max_concurrent_envs=8),
        "line": lambda: create_fastapi_app(Line, Move, Seen),
        "notes": lambda: create_fastapi_app(
            Notes, CallToolAction, CallToolObservation, max_concurrent_envs=2
        ),
        "liar": liar,
    }
    if kind not in apps:
        sys.exit(f"there is no kind {kind}")
    uvicorn.run(apps[kind](), port=port, log_level="warning", ws_max_size=1 << 30)
