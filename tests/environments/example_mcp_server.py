"""A real MCP server over stdio, whose tools store notes, fail, and show its environment variables."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Write a note."""
    notes.append(text)
    return f"There are {len(notes)} notes."


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("this tool is broken")


@server.tool()
def variables() -> str:
    """Show the environment variables."""
    return str(dict(os.environ))


if __name__ == "__main__":
    server.run()
