"""A real MCP server, written with the library: a total that its process keeps."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")
total = 0


@server.tool()
def begin(seed: int, answer: str | None = None) -> str:
    """Say what to do."""
    return f"Reach {answer or seed % 10}."


@server.tool()
def add(number: int) -> int:
    """Add to the total."""
    global total
    total += number
    return total


@server.tool()
def divide(number: int) -> float:
    """Divide the total."""
    return total / number


@server.tool()
def environment() -> list[str]:
    """Names of the variables that the server has."""
    return sorted(os.environ)


@server.tool()
def score(seed: int, answer: str | None = None) -> float:
    """1 for the right total."""
    return float(total == int(answer or seed % 10))


if sys.argv[1:] != ["--list"]:
    server.run("stdio")
