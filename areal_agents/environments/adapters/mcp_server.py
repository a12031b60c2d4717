"""Tools of an MCP server: `mcp:python my_server.py` or `mcp:https://host/mcp`.

The model calls the server's tools until it answers without a call. For each episode a command is started
anew, so that episodes share nothing, or a connection to the URL is opened. A server has neither tasks nor
rewards: `data` gives the tasks and `reward` the rewards. The option `max_turns` is the largest number of
calls of the model.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.players import Model, Tool, opening_messages, play_with_tools
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError
from areal_agents.secret_variables import without_secrets


def open(line: EnvironmentLine) -> McpServer:
    """Open a server. Raises TaskEnvironmentError if the command or an option cannot be read."""
    return McpServer(line)


class McpServer:
    """A server that speaks the Model Context Protocol."""

    def __init__(self, line: EnvironmentLine) -> None:
        own, _ = SCHEMES["mcp"].take(line)
        self._line, self._max_turns = line, own["max_turns"]
        self._model = Model()
        self._server: str | StdioServerParameters = line.name
        if not line.name.startswith(("http://", "https://")):
            try:
                command, *arguments = shlex.split(line.name)
            except ValueError as error:
                raise TaskEnvironmentError(f"{line.text!r}: the command cannot be read: {error}") from error
            # The model chooses what the server does, so the server gets no keys of the run.
            environment = without_secrets(os.environ)
            self._server = StdioServerParameters(command=command, args=arguments, env=environment)

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Raise TaskEnvironmentError: a server has no tasks."""
        raise TaskEnvironmentError(
            f"{self._line.text!r} has tools and no tasks; give the tasks in data.path (and eval.data.path)"
        )

    async def play(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Let the model call the tools until it answers."""
        messages = opening_messages(task)
        async with Client(self._server) as server:
            page = await server.list_tools()
            tools = [_tool(server, tool) for tool in page.tools]
            while page.next_cursor:
                page = await server.list_tools(cursor=page.next_cursor)
                tools += [_tool(server, tool) for tool in page.tools]
            await play_with_tools(self._model, ep, messages, tools, max_turns=self._max_turns)

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()


def _tool(server: Client, described: Any) -> Tool:
    async def call(arguments: dict[str, Any]) -> str:
        result = await server.call_tool(described.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return f"Error: {text}" if result.is_error else text

    return Tool(described.name, call, described.description or "", described.input_schema)
