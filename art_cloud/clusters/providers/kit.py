"""What providers have in common: options, one launch at a time, a server's last words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import AsyncFileLock
from pydantic import BaseModel, ValidationError

from ...shared.errors import LaunchError
from ...shared.validation import refused
from ..registry import folder_of
from ..spec import ClusterSpec, Instance

LOG_LINES = 15
"""Of a log, at its end, in an error."""

REASON = "art-server: "
"""How the line begins in which a server tells why it ends."""

Kind = TypeVar("Kind", bound=BaseModel)


def options_of(spec: ClusterSpec, kind: type[Kind], what: str) -> Kind:
    """The provider's own options of a cluster, which is called `what` in errors.

    Raises:
        ConfigError: it names the first option that can't be meant.
    """
    try:
        return kind.model_validate(spec.options)
    except ValidationError as error:
        raise refused(what, error, kind) from error


@asynccontextmanager
async def one_launch_at_a_time(name: str) -> AsyncIterator[Path]:
    """The folder of a cluster. Launches of one name by this user wait for each other here: the
    first decides."""
    folder = folder_of(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncFileLock(folder / "launch"):
        yield folder


def instance_of(
    provider: str, where: str, server: dict[str, Any], started_at: datetime
) -> Instance:
    """A server as `launch/ssh/servers.py` describes it."""
    return Instance(
        name=server["name"],
        provider=provider,
        state=server["state"],
        started_at=started_at,
        detail=f"{where}pid {server['pid']}",
        identity=server["identity"],
        owner=server["owner"],
    )


def ended(what: str, lines: Sequence[str], of: str = "what it wrote") -> LaunchError:
    """The error for a server that has ended; `what` says which one and how.

    Where the server itself has told why, nothing before that is quoted of the lines that it left.
    """
    told = [number for number, line in enumerate(lines) if line.startswith(REASON)]
    last = lines[told[-1] :] if told else lines[-LOG_LINES:]
    said = "\n".join(f"  {line}" for line in last) or "  (nothing)"
    return LaunchError(
        f"{what}. The last lines of {of}:\n{said}\nMend what they name, then start it again."
    )
