"""How commands fail: a message on standard error and an exit code, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from .errors import ArtCloudError


def complain(error: ArtCloudError) -> None:
    typer.secho("Error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo(str(error), err=True)


@contextmanager
def reported() -> Iterator[None]:
    """What goes wrong on purpose becomes a message and exit code 1, an interruption 130."""
    try:
        yield
    except ArtCloudError as error:
        complain(error)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
