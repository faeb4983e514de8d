"""An MCP server with a list of things to do. Each session has a list of its own."""

from __future__ import annotations

import json

from mcp.server import MCPServer

server = MCPServer("to-do", instructions="Keeps a list of things to do.")
todo = {"water the plants": "Monday", "call the dentist": "Tuesday", "pay the rent": "Friday"}


@server.tool()
def show() -> str:
    """All that is on the list, with its day."""
    return json.dumps(todo)


@server.tool()
def add(what: str, day: str) -> str:
    """Put something on the list."""
    todo[what] = day
    return f"{len(todo)} things to do"


@server.tool()
def move(what: str, day: str) -> str:
    """Do it on another day."""
    if what not in todo:
        raise ValueError(f"There is no {what!r} on the list.")
    todo[what] = day
    return f"{what}: {day}"


@server.tool()
def done(what: str) -> str:
    """Take something off the list."""
    if what not in todo:
        raise ValueError(f"There is no {what!r} on the list.")
    del todo[what]
    return f"{len(todo)} things to do"


@server.resource("todo://list", description="What is on the list when a session begins.")
def listed() -> str:
    return show()


if __name__ == "__main__":
    server.run()
