"""An MCP server's tools and resources, over stdio or streamable HTTP, through the official SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ..rollouts.trajectory import Tools
from ..shared.errors import ConfigError, ServerUnavailableError
from ..shared.validation import is_loopback
from .tools import ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

SESSIONS = 16
"""How many sessions with one server are open at once: over stdio, each is a process."""
CALL_SECONDS = 60.0
RESOURCES, RESOURCE_CHARACTERS = 16, 4000
"""How many resources are read, and how many characters of each."""


class MCPServer:
    """An MCP server, as the tools of an agent. Each rollout has a session of its own with it.

    Args:
        server: the URL of a server that runs (streamable HTTP), or the command that starts one
            (stdio), as a list: ["npx", "-y", "some-server"].
        env: for a command: variables beside the few that the SDK hands on (PATH, HOME, ...).
        headers: for a URL: say an `Authorization`. They are sent over https or to loopback only.

    Raises:
        ConfigError: the SDK is not installed, or an argument can't be meant.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        _check_sdk()
        self._url = server if isinstance(server, str) else None
        self._command = [] if isinstance(server, str) else list(server)
        if self._url is None and not self._command:
            raise ConfigError("There is no command that starts the MCP server.")
        if self._url is not None and not self._url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self._url!r} is no URL. Give the http(s) URL of an MCP server, or the command "
                "that starts one as a list of words."
            )
        if headers and not (
            self._url and (self._url.startswith("https") or is_loopback(self._url))
        ):
            raise ConfigError("Headers are sent to an https URL, or to this machine, only.")
        self._env = dict(env or {})
        self._headers = dict(headers or {})
        self._permits = asyncio.Semaphore(SESSIONS)

    def __str__(self) -> str:
        return self._command[0] if self._command else re.sub("//[^/]*@", "//", self._url or "")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[MCPSession]:
        """The tools of one rollout.

        Raises:
            ServerUnavailableError: the server did not start or does not answer.
        """
        failed: Exception | None = None
        async with self._permits, AsyncExitStack() as stack:
            client = await self._connect(stack)
            tools = await _all_tools(client)
            try:
                yield MCPSession(str(self), client, tools)
            except Exception as error:  # raised below: the SDK's task group would wrap it
                failed = error
        if failed is not None:
            raise failed

    async def resources(self) -> Sequence[str]:
        """Name, description and the beginning of each text resource."""
        async with self.session() as session:
            return await session.resources()

    async def instructions(self) -> str | None:
        """What the server says about itself to the programs that use it."""
        async with self.session() as session:
            return session.client.instructions

    async def _connect(self, stack: AsyncExitStack) -> Client:
        import httpx2  # what the SDK is built on
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        try:
            if self._url is None:
                name, *arguments = self._command
                transport: Any = StdioServerParameters(command=name, args=arguments, env=self._env)
            else:
                http = httpx2.AsyncClient(
                    headers=self._headers,
                    timeout=httpx2.Timeout(30.0, read=300.0),  # as the SDK's own
                    trust_env=not is_loopback(self._url),
                )
                await stack.enter_async_context(http)
                transport = streamable_http_client(self._url, http_client=http)
            client = Client(transport, read_timeout_seconds=CALL_SECONDS)
            return await stack.enter_async_context(client)
        except Exception as error:
            raise ServerUnavailableError(
                f"The MCP server {self} does not answer: {_reason(error)}. Is it up, and does its "
                "command or URL work by hand?"
            ) from error


class MCPSession:
    """A session with an MCP server. Use it in the task that opened it."""

    def __init__(self, server: str, client: Client, tools: Tools) -> None:
        self.client = client
        self.tools, self._names = _valid_names(tools)
        self._server = server

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool.

        Raises:
            ServerUnavailableError: the connection to the server is lost.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self.client.call_tool(self._names.get(name, name), dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ServerUnavailableError(
                    f"The MCP server {self._server} closed the connection during a call of {name}."
                ) from error
            return ToolResult(error.message, failed=True)
        return ToolResult(_text(result), failed=bool(result.is_error))

    async def resources(self) -> list[str]:
        """Name, description and the beginning of each text resource that the server lists."""
        if self.client.server_capabilities.resources is None:
            return []
        listed = (await self.client.list_resources()).resources[:RESOURCES]
        found = []
        for resource in listed:
            contents = (await self.client.read_resource(resource.uri)).contents
            text = "\n".join(part.text for part in contents if hasattr(part, "text"))
            about = f"{resource.name} ({resource.uri}) {resource.description or ''}".strip()
            found.append(f"{about}\n{text[:RESOURCE_CHARACTERS]}")
        return found


def _check_sdk() -> None:
    try:
        from mcp import Client as _  # noqa: F401  of the second version of the SDK
    except ImportError as error:
        raise ConfigError(
            "MCP servers need the official SDK: pip install 'art-cloud[mcp]'."
        ) from error


async def _all_tools(client: Client) -> Tools:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return cast(Tools, tools)


def _valid_names(tools: Tools) -> tuple[Tools, dict[str, str]]:
    """Tools under names that OpenAI's protocol allows, and the server's own name for each."""
    names: dict[str, str] = {}
    renamed = []
    for tool in cast(list[dict[str, Any]], tools):
        own = tool["function"]["name"]
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", own)[:64]
        if name in names:
            raise ConfigError(f"The tools {names[name]!r} and {own!r} can't be told apart.")
        names[name] = own
        renamed.append({**tool, "function": {**tool["function"], "name": name}})
    return cast(Tools, renamed), names


def _text(result: CallToolResult) -> str:
    """The text of a result; parts that are no text (images, sound) are only named."""
    parts = []
    for part in result.content:
        if part.type == "text":
            parts.append(part.text)
        elif part.type == "resource" and hasattr(part.resource, "text"):
            parts.append(part.resource.text)
        else:
            parts.append(f"[{part.type}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The first error inside `error`: task groups wrap what they raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
