"""Tools that an agent calls: Python functions here, an MCP server's in `mcp.py`."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
from pydantic_core import ArgsKwargs

from ..rollouts.trajectory import Tools
from ..shared.errors import ConfigError


class ToolResult(NamedTuple):
    """What a call returned. An error is text too: the agent reads it and can try something else."""

    text: str
    failed: bool = False


class ToolSession(Protocol):
    """The tools of one rollout."""

    @property
    def tools(self) -> Tools: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. It raises only if no later call can succeed, because its server is gone,
        say."""


class Toolkit(Protocol):
    """A source of tools. Each rollout opens a session of its own."""

    def session(self) -> AbstractAsyncContextManager[ToolSession]: ...

    async def resources(self) -> Sequence[str]:
        """Texts, by their names, that generated tasks can be about."""


class FunctionTools:
    """Python functions as tools: annotations give their parameters, the docstring describes them.

    Functions may be async; others run in a thread. What a function raises, the agent is told.

    Raises:
        ConfigError: a parameter's annotation has no JSON form, or there is no function.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        if not functions:
            raise ConfigError("There is no tool. Give at least one function.")
        self._functions = {function.__name__: function for function in functions}
        try:
            self._adapters: dict[str, TypeAdapter[Any]] = {
                name: TypeAdapter(cast(Any, f)) for name, f in self._functions.items()
            }
            self.tools = cast(
                Tools, [_tool(f, self._adapters[name]) for name, f in self._functions.items()]
            )
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
            raise ConfigError(
                f"A tool's parameter has no JSON form: {error} Annotate it with str, int, float, "
                "bool, list, dict, Literal or a pydantic model."
            ) from error

    @classmethod
    def load(cls, path: Path) -> FunctionTools:
        """The public functions that the Python file `path` defines. Running it is up to you.

        Raises:
            ConfigError: there is no such file, it can't be run, or it defines no function.
        """
        spec = spec_from_file_location(f"art_tools_{path.stem}", path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ConfigError(f"{path} is no Python file with tools: give a path that ends in .py.")
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{path} can't be run: {type(error).__name__}: {error}") from error
        found = inspect.getmembers(module, inspect.isfunction)
        mine = [f for name, f in found if f.__module__ == spec.name and not name.startswith("_")]
        if not mine:
            raise ConfigError(f"{path} defines no public function, so there is no tool.")
        return cls(mine)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FunctionTools]:
        yield self

    async def resources(self) -> Sequence[str]:
        return []

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._functions:
            known = ", ".join(self._functions)
            return ToolResult(f"There is no tool {name}. There are: {known}.", failed=True)
        given = ArgsKwargs((), dict(arguments))
        try:
            if inspect.iscoroutinefunction(self._functions[name]):
                result = await self._adapters[name].validate_python(given)
            else:
                result = await asyncio.to_thread(self._adapters[name].validate_python, given)
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:  # whatever it is, it is the agent's to deal with
            return ToolResult(f"{type(error).__name__}: {error}", failed=True)
        return ToolResult(text)


def _tool(function: Callable[..., Any], adapter: TypeAdapter[Any]) -> dict[str, Any]:
    parameters = adapter.json_schema()
    description = inspect.getdoc(function) or ""
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": description,
            "parameters": parameters,
        },
    }
