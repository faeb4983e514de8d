"""Where a cluster can run: what every provider answers, and how one is found by name.

A provider is a class without constructor arguments, registered under the entry point group
`art_cloud.providers`. It keeps no record of its own: the client's registry holds the intent, and
`list` tells what really exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, Protocol

from pydantic import AwareDatetime, Field, JsonValue, NonNegativeFloat, PositiveFloat, SecretStr

from ..config import Frozen
from ..durations import reserve
from ..errors import ConfigError
from ..protocol import Durability, EngineName

ENTRY_POINTS = "art_cloud.providers"
TOKEN = "ART_CLOUD_TOKEN"  # noqa: S105
CAP_SECONDS = 60.0
"""How far beyond budget and deadline a cap from outside lies: the server ends before it."""


class Offer(Frozen):
    """One machine that could be had for a spec."""

    provider: str
    region: str
    price_per_hour: NonNegativeFloat
    """US dollars."""
    spot: bool = False
    machine: str = ""
    """In the provider's words: an instance type, a GPU."""


class ClusterSpec(Frozen):
    """What a cluster is asked to be. What is secret is never part of its JSON or its repr."""

    provider: str
    store: str
    base_model: str | None = None
    engine: EngineName = "transformers"
    durability: Durability = "sync"
    lease_seconds: PositiveFloat = 600.0
    idle_seconds: PositiveFloat = 900.0
    budget: PositiveFloat | None = None
    """US dollars that the cluster may cost."""
    deadline: PositiveFloat | AwareDatetime | None = None
    """Seconds after the launch, or a point in time."""
    max_hourly: PositiveFloat | None = None
    """US dollars that an hour of the machine may cost."""
    offer: Offer | None = None
    """The machine that was chosen, for the provider to launch."""
    launched_at: AwareDatetime | None = None
    """Budget and deadline count from then, also for a machine that replaces a lost one."""
    options: dict[str, JsonValue] = {}
    """The provider's own, which it checks in `offers`."""
    token: SecretStr = Field(default=SecretStr(""), exclude=True, repr=False)
    """The bearer token that the server must ask for."""
    secrets: dict[str, SecretStr] = Field(default={}, exclude=True, repr=False)
    """Environment variables that the server needs beside it: credentials of the store."""

    @property
    def owner(self) -> str:
        """What may be shown of the token, and tells its owner's clusters from those of others: the
        first half of its SHA-256."""
        return hashlib.sha256(self.token.get_secret_value().encode()).hexdigest()[:32]

    @property
    def price_per_hour(self) -> float:
        return self.offer.price_per_hour if self.offer else 0.0

    @property
    def deadline_seconds(self) -> float | None:
        """After the launch."""
        if isinstance(self.deadline, datetime):
            seconds = (self.deadline - (self.launched_at or datetime.now(UTC))).total_seconds()
            return max(seconds, 1.0)
        return self.deadline

    @property
    def life_seconds(self) -> float:
        """What budget and deadline allow, from the launch to the very end."""
        price = self.price_per_hour
        affordable = self.budget / price * 3600 if self.budget and price else math.inf
        return min(affordable, self.deadline_seconds or math.inf)

    @property
    def spent_seconds(self) -> float:
        """Since the launch, by this machine's clock."""
        since = self.launched_at or datetime.now(UTC)
        return max(0.0, (datetime.now(UTC) - since).total_seconds())

    @property
    def cap_seconds(self) -> float:
        """After which from now a provider ends the machine from outside, should its server not."""
        return max(0.0, self.life_seconds - self.spent_seconds) + CAP_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the server has ended by now, or is about to, for budget or deadline."""
        life = self.life_seconds
        return self.spent_seconds >= life - reserve(life)

    def server_arguments(self, name: str) -> list[str]:
        """Those of `art-server` that say what this cluster is; where it keeps its state is the
        provider's business."""
        arguments = ["--name", name, "--store", self.store]
        arguments += ["--engine", self.engine]
        arguments += ["--durability", self.durability]
        arguments += ["--lease", f"{self.lease_seconds:g}", "--idle", f"{self.idle_seconds:g}"]
        if self.price_per_hour:
            arguments += ["--price", f"{self.price_per_hour:g}"]
        if self.budget is not None:
            arguments += ["--budget", f"{self.budget:g}"]
        if self.deadline_seconds is not None:
            arguments += ["--deadline", f"{self.deadline_seconds:g}"]
        if self.launched_at is not None:
            arguments += ["--launched", f"{self.launched_at.timestamp():.3f}"]
            arguments += ["--spent", f"{self.spent_seconds:.0f}"]
        if self.base_model is not None:
            arguments += ["--model", self.base_model]
        return arguments

    def server_environment(self) -> dict[str, str]:
        """Environment variables of `art-server`; all of them are secrets."""
        secrets = {TOKEN: self.token, **self.secrets}
        return {key: value.get_secret_value() for key, value in secrets.items()}


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


class Instance(Frozen):
    """Something of ours that exists at a provider, and may cost money."""

    name: str
    provider: str
    state: Literal["starting", "running", "ending", "asleep", "stopped"]
    """`asleep`: it costs nothing until somebody asks something of it. `stopped`: its disk may cost,
    and it has no server."""
    started_at: datetime
    detail: str
    """What a person would look for: a process id, a machine's address."""
    identity: str = ""
    """What another one under the same name, later or elsewhere, has not."""
    owner: str | None = None
    """`ClusterSpec.owner` of whoever started it; None: that is not known."""


Which = Callable[[Instance], bool]
"""Whether an instance is meant."""


class Provider(Protocol):
    """All calls may be repeated; they raise `ProviderError`, or `ConfigError` before they act."""

    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        """Machines for `spec`, cheapest first. Has no side effect."""
        ...

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        """Start the machine and its server. Does nothing if the cluster `name` exists;
        `ConflictError` if it was started with another token."""
        ...

    async def endpoint(self, name: str) -> Endpoint:
        """Wait until the server of `name` listens; `LaunchError` if it ended before it did."""
        ...

    async def list(self) -> list[Instance]:
        """Everything of ours that exists, whether the registry knows it or not."""
        ...

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        """End the server and its machine; returns when `list` no longer shows them. With `only`
        nothing is touched but what it says yes to, of all that runs under the name."""
        ...

    def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        """The server's log, line by line; with `follow` until the server ends."""
        ...


def provider_names() -> list[str]:
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def get_provider(name: str) -> Provider:
    points = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    if not points:
        known = ", ".join(provider_names()) or "none: is art-cloud installed?"
        raise ConfigError(f"There is no provider {name!r}. Known are: {known}.")
    return _load(points[0])


def _load(point: EntryPoint) -> Provider:
    try:
        provider: Provider = point.load()()
    except ImportError as error:
        raise ConfigError(
            f"Provider {point.name!r} can't be loaded: {error}. If it is one of art-cloud's own, "
            f"install what it needs: pip install 'art-cloud[{point.name}]'."
        ) from error
    return provider
