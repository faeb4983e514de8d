"""A real MCP server: it keeps notes. As a script it speaks stdio."""

from __future__ import annotations

import os

from mcp.server import MCPServer
from pydantic import BaseModel


class Note(BaseModel):
    title: str
    text: str


def make_server() -> MCPServer:
    server = MCPServer("notes", instructions="Keeps notes.")
    notes = {"fox": "The fox is quick."}

    @server.tool()
    def read(title: str) -> str:
        """Read a note."""
        return notes[title]

    @server.tool(name="notes.write")
    def write(note: Note) -> str:
        """Write a note."""
        notes[note.title] = note.text
        return f"{len(notes)} notes"

    @server.tool()
    def crash() -> str:
        """End the server."""
        os._exit(3)

    @server.resource("notes://titles", description="All titles.")
    def titles() -> str:
        return "\n".join(notes)

    return server


if __name__ == "__main__":
    make_server().run()
