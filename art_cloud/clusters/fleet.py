"""All clusters of this user, recorded or not: what they do, what they log, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from ..backend import Backend
from ..client.http import ServerClient
from ..links.endpoint import Endpoint
from ..links.tunnel import Tunnel, open_tunnel, port_of, reached
from ..shared.errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    IncompleteListError,
    NotFoundError,
    RegistryError,
)
from ..shared.protocol import ServerInfo
from ..shared.validation import is_loopback
from .costs import Receipt
from .providers import get_provider, provider_names
from .providers.ssh.login import require_ssh
from .registry import ClusterRecord, Registry, in_use, unknown
from .spec import Instance, Which

STATUS_SECONDS = 40.0
"""How long `status` waits for a server's answer; a login on the way there may take most of it."""


Seen = Sequence[ClusterRecord | Instance]


async def down(name: str, *, seen: Seen = ()) -> Receipt | None:
    """End the cluster `name` and return its receipt; None if it was not recorded here, as its price
    is not known.

    Args:
        seen: What a person was shown, and no other that has taken its name since; empty: whatever
            has the name.

    Raises:
        NotFoundError: There is nothing of that name.
        ConflictError: There is, but not what was seen.
        RegistryError: It is ended, but that can't be noted.
    """
    record = Registry().get(name)
    if record is not None:
        if seen and record.key not in [one.key for one in seen if isinstance(one, ClusterRecord)]:
            raise _another(name)
        return await end(record)
    strangers = await not_recorded(name)
    if not strangers:
        raise unknown(name)
    known = {one.identity for one in seen if isinstance(one, Instance)}
    meant = [one for one in strangers if not seen or one.identity in known]
    if not meant:
        raise _another(name)
    for one in meant:
        await get_provider(one.provider).terminate(name, only=_very(one))
    return None


def _another(name: str) -> ConflictError:
    return ConflictError(f"{name} is another one by now, so it was left. See: art-cloud status")


def _very(instance: Instance) -> Which:
    return lambda one: one.identity == instance.identity


async def not_recorded(name: str) -> list[Instance]:
    """The instances that run under the name, if no cluster of that name is recorded here."""
    if Registry().get(name) is not None:
        return []
    instances, _ = await list_instances(provider_names())
    return [instance for instance in instances if instance.name == name]


async def end(record: ClusterRecord, *, ask: bool = True) -> Receipt:
    """End a recorded cluster and forget it but for its receipt. Instances that others started under
    its name stay.

    With `ask` its server is asked first what it has done; if it does not answer, the receipt tells
    what it said when it was asked last.

    Raises:
        RegistryError: It is ended, but that can't be noted.
    """
    registry, provider = Registry(), record.spec.provider
    record = registry.current(record) or record
    with suppress(RegistryError):  # what costs money goes first
        registry.set_state(record, "ending")
    instances, _ = await list_instances([provider])
    states = [instance.state for instance in instances if record.has(instance)]
    if ask and "running" in states:
        with suppress(ArtCloudError, TimeoutError):
            registry.note(record, await server_info(record))
    await get_provider(provider).terminate(record.name, only=record.has)
    try:
        return registry.end(record, seen_to_end=bool(states))
    except RegistryError as error:
        receipt = registry.receipt(record, seen_to_end=bool(states))
        raise RegistryError(
            f"{record.name} is ended, but stays on the list of clusters: {error} Then strike it "
            f"off: art-cloud down {record.name}. Its receipt: {receipt.summary}"
        ) from error


async def forget(name: str) -> Receipt:
    """Forget a cluster whose provider can't be asked any more because its machine is gone for good.
    Its server, if it still runs, ends by its own lease.

    Raises:
        ConflictError: Its provider answers; `down` ends it.
        NotFoundError: Nothing of that name is recorded.
    """
    record = Registry().get(name)
    if record is None:
        raise unknown(name)
    provider = record.spec.provider
    _, failures = await list_instances([provider])
    if not _unsure(name, failures.get(provider)):
        raise ConflictError(
            f"{provider} answers, so {name} needs no forgetting. To end it: art-cloud down {name}"
        )
    return Registry().end(record, seen_to_end=False)


def _unsure(name: str, failure: ArtCloudError | None) -> bool:
    """Whether a provider that failed with `failure` can't tell if `name` exists. None: it did not
    fail."""
    if isinstance(failure, IncompleteListError):
        return name in failure.unsure
    return failure is not None


async def server_info(record: ClusterRecord) -> ServerInfo:
    """Ask the server of `record` for its ServerInfo. Being asked renews no lease.

    Raises:
        ArtCloudError: It does not answer as it should, or not at all.
        TimeoutError: Not within `STATUS_SECONDS`.
    """
    async with asyncio.timeout(STATUS_SECONDS):
        endpoint = await get_provider(record.spec.provider).endpoint(record.name)
        token = record.spec.token.get_secret_value()
        headers = endpoint.plain_headers
        async with (
            reached(endpoint) as url,
            Backend(url, token, patience=0, headers=headers) as backend,
        ):
            return await backend.info()


async def address(name: str) -> dict[str, str]:
    """The `name`, `url`, `host`, `token` and `store` of a recorded cluster that runs."""
    record, endpoint = await _find(name)
    return {
        "name": name,
        "url": endpoint.url,
        "host": _host(endpoint, record.spec.provider),
        "token": record.spec.token.get_secret_value(),
        "store": record.spec.store,
    }


async def _find(name: str) -> tuple[ClusterRecord, Endpoint]:
    record = Registry().get(name)
    if record is None:
        raise unknown(name)
    return record, await get_provider(record.spec.provider).endpoint(name)


def _host(endpoint: Endpoint, provider: str) -> str:
    if endpoint.ssh is not None:
        return endpoint.ssh.host
    return "this machine" if is_loopback(endpoint.url) else provider


@asynccontextmanager
async def connection(name: str) -> AsyncIterator[ServerClient]:
    """A connection to the server of a recorded cluster, for single calls."""
    record, endpoint = await _find(name)
    async with reached(endpoint) as url:
        token = record.spec.token.get_secret_value()
        server = ServerClient(url, token, patience=0, headers=endpoint.plain_headers)
        try:
            yield server
        finally:
            await server.close()


async def tunnel(name: str, port: int) -> Tunnel:
    """Open a port of this machine (0: a free one) that leads to the server of a recorded cluster.

    Raises:
        ConfigError: the server is on this machine, or the port is taken.
        NotFoundError: there is nothing of that name.
    """
    _, endpoint = await _find(name)
    if endpoint.ssh is None:
        raise ConfigError(f"{name} takes no tunnel: it is at {endpoint.url}")
    return await open_tunnel(endpoint.ssh, port_of(endpoint), local_port=port)


async def ssh_command(name: str) -> list[str]:
    """The command that logs in to the machine of a recorded cluster, as the user's own `ssh` does.

    Raises:
        ConfigError: there is no such login.
        NotFoundError: there is nothing of that name.
    """
    record, endpoint = await _find(name)
    if endpoint.ssh is None:
        raise ConfigError(
            f"{name} has no ssh: its server is at {endpoint.url} of "
            f"{_host(endpoint, record.spec.provider)}."
        )
    require_ssh()
    return endpoint.ssh.command


async def logs(name: str, *, follow: bool = False) -> AsyncIterator[str]:
    """Yield the log of a cluster's server line by line, also of one that has ended."""
    record = Registry().get(name)
    providers = [record.spec.provider] if record else provider_names()
    for provider in providers:
        try:
            async for line in get_provider(provider).logs(name, follow=follow):
                yield line
            return
        except NotFoundError:
            continue
        except ConfigError:  # what is not set up here has no logs of ours
            if record:
                raise
    raise unknown(name)


ClusterState = Literal[
    "starting", "running", "ending", "asleep", "stopped", "unreachable", "unknown"
]


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster as seen from three sides: its record, its instance at the provider, its server's
    own words."""

    name: str
    provider: str
    state: ClusterState
    recorded: bool
    detail: str = ""
    started_at: datetime | None = None
    """When the machine that runs now was started."""
    launched_at: datetime | None = None
    """When the cluster was launched: its cost counts from then."""
    identity: str | None = None
    """The identity of the instance that runs; None: nothing runs."""
    price_per_hour: float = 0.0
    """US dollars."""
    phases: Sequence[tuple[str, float]] = ()
    """The phases of the launch, with the seconds that each took."""
    server: ServerInfo | None = None

    @property
    def cost(self) -> float:
        """US dollars that the cluster has cost until now."""
        if self.launched_at is None:
            return 0.0
        seconds = (datetime.now(UTC) - self.launched_at).total_seconds()
        return max(0.0, seconds) / 3600 * self.price_per_hour


async def status(name: str | None = None) -> list[ClusterStatus]:
    """The status of every cluster that is recorded or exists, or of `name` only. Changes nothing.

    Raises:
        NotFoundError: There is nothing of that name.
    """
    instances, failures = await list_instances(provider_names())
    there = pairs(Registry().list(), instances)
    if name is not None:
        there = [one for one in there if name_of(*one) == name]
        if not there:
            raise unknown(name)
    return list(await asyncio.gather(*(_status(*one, failures) for one in there)))


def pairs(
    records: Sequence[ClusterRecord], instances: Sequence[Instance]
) -> list[tuple[ClusterRecord | None, Instance | None]]:
    """Pairs of a record and an instance by name; one of the two is None where there is only the
    other. Instances that others started under a record's name are not paired with it."""
    found: list[tuple[ClusterRecord | None, Instance | None]] = []
    for record in records:
        found += [(record, one) for one in instances if record.has(one)] or [(record, None)]
    for instance in instances:
        if not any(record.has(instance) for record in records):
            found.append((None, instance))
    return sorted(found, key=lambda pair: (name_of(*pair), pair[0] is None))


def name_of(record: ClusterRecord | None, instance: Instance | None) -> str:
    one = record or instance
    assert one is not None
    return one.name


async def _status(
    record: ClusterRecord | None,
    instance: Instance | None,
    failures: dict[str, ArtCloudError],
) -> ClusterStatus:
    if instance is None:
        assert record is not None
        return _absent(record, failures)
    found = ClusterStatus(
        instance.name,
        instance.provider,
        instance.state,
        recorded=record is not None,
        detail=instance.detail,
        started_at=instance.started_at,
        identity=instance.identity,
    )
    if record is None:
        return replace(found, detail=f"{instance.detail}, started by other means: no token known")
    found = replace(
        found,
        launched_at=record.spec.launched_at,
        price_per_hour=record.spec.price_per_hour,
        phases=Registry().phases(record),
    )
    if instance.state != "running":
        return found
    try:
        return replace(found, server=await server_info(record))
    except (ArtCloudError, TimeoutError) as error:
        why = str(error) or f"no answer within {STATUS_SECONDS:g} s"
        return replace(found, state="unreachable", detail=f"{instance.detail}: {why}")


def _absent(record: ClusterRecord, failures: dict[str, ArtCloudError]) -> ClusterStatus:
    """The status of a cluster that is recorded and was not found at its provider."""
    name, provider = record.name, record.spec.provider
    failure = failures.get(provider)
    if _unsure(name, failure):
        detail = f"{provider} can't say: {failure}. Gone for good? art-cloud down {name} --forget"
        return ClusterStatus(name, provider, "unknown", recorded=True, detail=detail)
    if record.state == "starting" and in_use(name):
        detail = f"{provider} is being asked for its machine"
        return ClusterStatus(name, provider, "starting", recorded=True, detail=detail)
    ended = "its launch broke off" if record.state == "starting" else "its server ended"
    detail = f"{ended}; why: art-cloud logs {name}, what it cost: art-cloud down {name}"
    return ClusterStatus(name, provider, "stopped", recorded=True, detail=detail)


async def list_instances(
    names: list[str],
) -> tuple[list[Instance], dict[str, ArtCloudError]]:
    """All instances at these providers, and the errors of providers that could not list them."""
    instances: list[Instance] = []
    failures: dict[str, ArtCloudError] = {}
    for name in names:
        try:
            instances += await get_provider(name).list()
        except IncompleteListError as error:
            instances += error.instances
            failures[name] = error
        except ArtCloudError as error:
            failures[name] = error
    return instances, failures
