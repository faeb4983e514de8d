"""Where a server is, and the way to it from this machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from ..shared.config import Frozen


class SSHRoute(Frozen):
    """A machine that is reached by ssh, under the name by which the user's ssh knows it."""

    host: str
    config: str | None = None
    """Another file than ~/.ssh/config."""

    @property
    def options(self) -> list[str]:
        """Those of `ssh`."""
        return ["-F", str(Path(self.config).expanduser())] if self.config else []

    @property
    def command(self) -> list[str]:
        """What a person would type to log in."""
        return ["ssh", *self.options, self.host]


class Endpoint(Frozen):
    """How this machine reaches a cluster's server."""

    url: str
    ssh: SSHRoute | None = None
    """Where `url` is an address of another machine: the way there."""
    headers: dict[str, SecretStr] = Field(default={}, repr=False)
    """What a proxy before the server asks for in every request."""
    sleeps: bool = False
    """Whether the server scales to zero: a request wakes it, so nobody asks without need, and
    whoever does waits."""
    inference_url: str | None = None
    """Where completions are answered, if not at `url`: by servers that only read the store."""

    @property
    def plain_headers(self) -> dict[str, str]:
        return {name: value.get_secret_value() for name, value in self.headers.items()}
