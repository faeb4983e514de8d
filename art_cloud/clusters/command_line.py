"""What programs with a command line share: options, errors as messages, exit codes."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from ..shared.errors import ArtCloudError, ConfigError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work; an ArtCloudError becomes a message and an exit code."""
    import asyncio

    try:
        return asyncio.run(work)
    except ArtCloudError as error:
        complain(error)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        _say_what_runs()
        raise SystemExit(130) from None


def _say_what_runs() -> None:
    import asyncio

    from . import fleet

    names = [one.name for one in asyncio.run(fleet.status()) if one.state != "stopped"]
    if names:
        typer.echo(f"Still running: {', '.join(names)}. To end it: art-cloud down NAME", err=True)
    else:
        typer.echo("Nothing is left running.", err=True)


def provider_options(given: list[str] | None) -> dict[str, Any]:
    """Parse `KEY=VALUE`s. A value that is JSON is parsed as that, any other is text."""
    found: dict[str, Any] = {}
    for option in given or []:
        key, is_given, value = option.partition("=")
        if not is_given or not key.isidentifier():
            complain(ConfigError(f"Option {option!r} is not KEY=VALUE."))
            raise SystemExit(1)
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def complain(error: ArtCloudError) -> None:
    typer.secho("Error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo(str(error), err=True)


@contextmanager
def reported() -> Iterator[None]:
    """Turn an ArtCloudError in the block into a message and exit code 1, an interruption into
    130."""
    try:
        yield
    except ArtCloudError as error:
        complain(error)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
