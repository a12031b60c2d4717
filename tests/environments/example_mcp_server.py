"""A real MCP server over stdio, with one tool that remembers and one that fails."""

from __future__ import annotations

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


if __name__ == "__main__":
    server.run()
