"""A server of the Model Context Protocol with one tool, over standard input and output."""

from mcp.server import MCPServer

server = MCPServer("Weather")


@server.tool()
def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


if __name__ == "__main__":
    server.run(transport="stdio")
