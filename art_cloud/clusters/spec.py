"""What a cluster is asked to be, what exists of it, and what a provider has to answer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Literal, Protocol

from pydantic import AwareDatetime, Field, JsonValue, NonNegativeFloat, PositiveFloat, SecretStr

from ..links.endpoint import Endpoint
from ..shared.config import Frozen
from ..shared.limits import reserve
from ..shared.protocol import Durability, EngineName

TOKEN = "ART_CLOUD_TOKEN"  # noqa: S105
CAP_SECONDS = 60.0
"""How far after budget and deadline a provider's own limit lies: the server ends before it."""


class Offer(Frozen):
    """One machine that could be had for a spec."""

    provider: str
    region: str
    price_per_hour: NonNegativeFloat
    """US dollars."""
    spot: bool = False
    machine: str = ""
    """The machine in the provider's words: an instance type, a GPU."""


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
    """When the cluster was launched: budget and deadline count from then, also for a machine that
    replaces a lost one."""
    options: dict[str, JsonValue] = {}
    """Options of the provider, which it checks in `offers`."""
    token: SecretStr = Field(default=SecretStr(""), exclude=True, repr=False)
    """The bearer token that the server must ask for."""
    secrets: dict[str, SecretStr] = Field(default={}, exclude=True, repr=False)
    """Environment variables that the server needs beside its token: credentials of the store."""

    @property
    def owner(self) -> str:
        """The first half of the token's SHA-256: it may be shown, and tells this owner's clusters
        from those of others."""
        return hashlib.sha256(self.token.get_secret_value().encode()).hexdigest()[:32]

    @property
    def price_per_hour(self) -> float:
        return self.offer.price_per_hour if self.offer else 0.0

    @property
    def deadline_seconds(self) -> float | None:
        """Seconds from the launch to the deadline."""
        if isinstance(self.deadline, datetime):
            seconds = (self.deadline - (self.launched_at or datetime.now(UTC))).total_seconds()
            return max(seconds, 1.0)
        return self.deadline

    @property
    def life_seconds(self) -> float:
        """Seconds that budget and deadline allow from the launch to the very end."""
        price = self.price_per_hour
        affordable = self.budget / price * 3600 if self.budget and price else math.inf
        return min(affordable, self.deadline_seconds or math.inf)

    @property
    def spent_seconds(self) -> float:
        """Seconds since the launch, by this machine's clock."""
        since = self.launched_at or datetime.now(UTC)
        return max(0.0, (datetime.now(UTC) - since).total_seconds())

    @property
    def cap_seconds(self) -> float:
        """Seconds from now after which a provider ends the machine from outside, if its server has
        not."""
        return max(0.0, self.life_seconds - self.spent_seconds) + CAP_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether budget or deadline have ended the server by now, or are about to."""
        life = self.life_seconds
        return self.spent_seconds >= life - reserve(life)

    def server_arguments(self, name: str) -> list[str]:
        """The arguments of `art-server` that describe this cluster. The provider adds where its
        state is kept."""
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


class Instance(Frozen):
    """Something of ours that exists at a provider, and may cost money."""

    name: str
    provider: str
    state: Literal["starting", "running", "ending", "asleep", "stopped"]
    """`asleep`: it costs nothing until somebody asks something of it. `stopped`: its disk may cost,
    and it has no server."""
    started_at: datetime
    detail: str
    """Words by which a person finds it: a process id, a machine's address."""
    identity: str = ""
    """An id that no other instance has, be it of the same name later or elsewhere."""
    owner: str | None = None
    """The `ClusterSpec.owner` of the cluster that it was started for; None: not known."""


Which = Callable[[Instance], bool]
"""A predicate: whether an instance is meant."""


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


State = Literal["ok", "warning", "broken"]


class Check(Frozen):
    """One thing that was checked, and its cure if something is wrong.

    A provider may have a method `check` of its own that gives a list of these.
    """

    subject: str
    state: State
    message: str
    cure: str = ""
