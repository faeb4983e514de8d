"""A cluster from first to last: started or found again, watched, and ended.

async with art.up("local") as backend:      # ends with the block
backend = await art.up("local")             # stays, until `art-cloud down` or its idle limit
async with art.connect(url, token) as backend:      # somebody else's server
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .backend import Backend
from .errors import ArtCloudError, ConfigError, LaunchError, NotFoundError
from .http import ServerClient
from .progress import console, enabled, say
from .protocol import ServerInfo
from .providers import ClusterSpec, Instance, Provider, get_provider, provider_names
from .registry import ClusterRecord, Registry, default_name, home

LAUNCH_SECONDS = 1800.0
"""A cluster whose server does not listen after this long is given up, and ended."""
STATUS_SECONDS = 5.0
PING_SECONDS = 30.0
"""Far below the shortest idle limit that makes sense."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def up(
    provider: str = "local",
    *,
    name: str | None = None,
    store: str | None = None,
    base_model: str | None = None,
    engine: str = "transformers",
    idle: str | float = "15m",
    keep: bool = False,
) -> Up:
    """Start a cluster, or find the running one of this name, and connect to its server.

    Args:
        provider: Where it runs; "local" is this machine.
        name: Default: `art-<user>-<provider>`.
        store: URL under which every step is kept. Default of "local": a folder of this user.
        base_model: Name or path of the model to load at the start. Default: with the first model
            that is registered.
        engine: What samples on the server.
        idle: How long the server stays without a client and without work: "90s", "15m", "2h", or
            seconds. Then it exits, and its machine with it.
        keep: Leave the cluster running when the `async with` block ends.

    Returns:
        An object for `async with` (ends the cluster with the block, unless `keep` is set or it
        ran before) or for `await` (leaves it running). Both give a `Backend`.

    Raises:
        ConfigError: Before anything is started: an unknown provider, a duration without a unit, a
            cluster of this name with another base model, store or engine.
        LaunchError: The server did not come up. What was started has been ended.
    """
    try:
        spec = ClusterSpec(
            provider=provider,
            store=store_url(provider, store),
            base_model=base_model,
            engine=engine,
            idle_seconds=parse_duration(idle),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"up({'.'.join(map(str, first['loc']))}): {first['msg']}.") from error
    return Up(name or default_name(provider), spec, keep=keep)


class Up:
    """A cluster on its way: enter it with `async with`, or `await` it."""

    def __init__(self, name: str, spec: ClusterSpec, *, keep: bool) -> None:
        self.name = name
        self._spec = spec
        self._keep = keep
        self._own: ClusterRecord | None = None
        self._backend: Backend | None = None

    def __await__(self) -> Generator[Any, None, Backend]:
        return self._open().__await__()

    async def __aenter__(self) -> Backend:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._backend is not None:
                await self._backend.close()
        finally:
            if self._own is not None and self._keep:
                say(f"{self.name} stays. To end it: art-cloud down {self.name}")
            elif self._own is not None:
                await _end_ours(self._own)

    async def _open(self) -> Backend:
        provider = get_provider(self._spec.provider)
        registry = Registry()
        await self._clear(registry, provider)
        record, fresh = registry.claim(self.name, self._spec)
        _check_same(record, self._spec)
        self._own = record if fresh else None
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                self._backend = await _start(provider, record)
        except BaseException as error:
            if self._own is not None:
                await _end_ours(self._own)
            if isinstance(error, TimeoutError):
                raise LaunchError(
                    f"The server of {self.name} did not listen within {LAUNCH_SECONDS:.0f} s. "
                    f"What it wrote: art-cloud logs {self.name}"
                ) from error
            raise
        registry.set_state(self.name, "running")
        return self._backend

    async def _clear(self, registry: Registry, provider: Provider) -> None:
        """Forget a cluster of this name that ended, and finish one that was being ended."""
        record = registry.get(self.name)
        if record is None or record.state == "starting":
            return
        exists = any(instance.name == self.name for instance in await provider.list())
        if record.state == "ending" or (not exists and record.spec.provider == self._spec.provider):
            await provider.terminate(self.name)
            registry.remove(record)


def connect(
    url: str | None = None, token: str | None = None, *, name: str | None = None
) -> Connect:
    """Connect to a server that someone else runs, or to a recorded cluster by its `name`.

    Returns:
        An object for `async with` or `await`; both give a `Backend`. Nothing is started or ended.

    Raises:
        ConfigError: Neither `url` and `token` nor `name` are given.
        NotFoundError: No cluster of that name runs.
    """
    if (name is None) == (url is None or token is None):
        raise ConfigError("connect() takes the url and token of a server, or a cluster's name=.")
    return Connect(url, token, name)


class Connect:
    """A connection on its way: enter it with `async with`, or `await` it."""

    def __init__(self, url: str | None, token: str | None, name: str | None) -> None:
        self._url, self._token, self._name = url, token, name
        self._backend: Backend | None = None

    def __await__(self) -> Generator[Any, None, Backend]:
        return self._open().__await__()

    async def __aenter__(self) -> Backend:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        if self._backend is not None:
            await self._backend.close()

    async def _open(self) -> Backend:
        if self._name is not None:
            self._backend = await _connect_by_name(self._name)
        else:
            self._backend = await _handshake(str(self._url), str(self._token))
        return self._backend


async def _connect_by_name(name: str) -> Backend:
    record = Registry().get(name)
    if record is None:
        raise _unknown(name)
    provider = get_provider(record.spec.provider)
    if all(instance.name != name for instance in await provider.list()):
        raise NotFoundError(
            f"Cluster {name} is recorded but does not run any more (art-cloud logs {name} says "
            "why). Start it again with art.up(), or forget it: art-cloud down " + name
        )
    endpoint = await provider.endpoint(name)
    return await _handshake(endpoint.url, record.spec.token.get_secret_value())


async def down(name: str) -> None:
    """End the cluster `name` and forget it; `NotFoundError` if there is nothing of that name."""
    registry = Registry()
    record = registry.get(name)
    if record is not None:
        providers = [record.spec.provider]
    else:
        instances, _ = await _list_instances(provider_names())
        providers = [instance.provider for instance in instances if instance.name == name]
        if not providers:
            raise _unknown(name)
    registry.set_state(name, "ending")
    for provider in providers:
        await get_provider(provider).terminate(name)
    if record is not None:
        registry.remove(record)


async def address(name: str) -> dict[str, str]:
    """The `name`, `url`, `token` and `store` of a recorded cluster that runs."""
    record = Registry().get(name)
    if record is None:
        raise _unknown(name)
    return {
        "name": name,
        "url": (await get_provider(record.spec.provider).endpoint(name)).url,
        "token": record.spec.token.get_secret_value(),
        "store": record.spec.store,
    }


async def logs(name: str, *, follow: bool = False) -> AsyncIterator[str]:
    """The log of a cluster's server, line by line; also of one that has ended."""
    record = Registry().get(name)
    providers = [record.spec.provider] if record else provider_names()
    for provider in providers:
        try:
            async for line in get_provider(provider).logs(name, follow=follow):
                yield line
            return
        except NotFoundError:
            continue
    raise _unknown(name)


ClusterState = Literal["starting", "running", "ending", "stopped", "unreachable", "unknown"]


@dataclass(frozen=True)
class ClusterStatus:
    """What is recorded of a cluster, what runs of it, and what its server says."""

    name: str
    provider: str
    state: ClusterState
    recorded: bool
    detail: str = ""
    started_at: datetime | None = None
    server: ServerInfo | None = None


async def status(name: str | None = None) -> list[ClusterStatus]:
    """Every cluster that is recorded or exists, or only `name`. Changes nothing.

    Raises:
        NotFoundError: There is nothing of that name.
    """
    records = {record.name: record for record in Registry().list()}
    instances, failures = await _list_instances(provider_names())
    running = {instance.name: instance for instance in instances}
    names = sorted(records.keys() | running.keys())
    if name is not None:
        if name not in names:
            raise _unknown(name)
        names = [name]
    found = (_status(one, records.get(one), running.get(one), failures) for one in names)
    return list(await asyncio.gather(*found))


async def _status(
    name: str,
    record: ClusterRecord | None,
    instance: Instance | None,
    failures: dict[str, ArtCloudError],
) -> ClusterStatus:
    if instance is None:
        assert record is not None
        provider = record.spec.provider
        if provider in failures:
            detail = f"{provider} can't say: {failures[provider]}"
            return ClusterStatus(name, provider, "unknown", recorded=True, detail=detail)
        detail = f"its server ended; why: art-cloud logs {name}"
        return ClusterStatus(name, provider, "stopped", recorded=True, detail=detail)
    found = ClusterStatus(
        name,
        instance.provider,
        instance.state,
        recorded=record is not None,
        detail=instance.detail,
        started_at=instance.started_at,
    )
    if record is None:
        return replace(found, detail=f"{instance.detail}, started by other means: no token known")
    if instance.state != "running":
        return found
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            endpoint = await get_provider(instance.provider).endpoint(name)
            token = record.spec.token.get_secret_value()
            async with Backend(endpoint.url, token, patience=0) as backend:
                return replace(found, server=await backend.info())
    except (ArtCloudError, TimeoutError) as error:
        why = str(error) or f"no answer within {STATUS_SECONDS:g} s"
        return replace(found, state="unreachable", detail=f"{instance.detail}: {why}")


async def _list_instances(
    names: list[str],
) -> tuple[list[Instance], dict[str, ArtCloudError]]:
    """What exists at these providers, and the errors of those that could not tell."""
    instances: list[Instance] = []
    failures: dict[str, ArtCloudError] = {}
    for name in names:
        try:
            instances += await get_provider(name).list()
        except ArtCloudError as error:
            failures[name] = error
    return instances, failures


async def _start(provider: Provider, record: ClusterRecord) -> Backend:
    spec = record.spec
    with _phase(record.name, f"provisioning on {spec.provider}"):
        await provider.launch(spec, record.name)
    with _phase(record.name, "boot"):
        endpoint = await provider.endpoint(record.name)
    with _phase(record.name, "ready"):
        return await _handshake(endpoint.url, spec.token.get_secret_value())


async def _handshake(url: str, token: str) -> Backend:
    backend = AttachedBackend(url, token)
    try:
        return await backend.__aenter__()
    except BaseException:
        await backend.close()
        raise


class AttachedBackend(Backend):
    """A `Backend` whose server sees, from opening to closing, that it has a client."""

    _pinging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Backend:
        await super().__aenter__()
        self._pinging = asyncio.create_task(self._ping())
        return self

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        await super().close()

    async def _ping(self) -> None:
        server = ServerClient(self.url, self._token, patience=0)
        try:
            while True:
                await asyncio.sleep(PING_SECONDS)
                with suppress(ArtCloudError):  # whoever calls the server next is told
                    await server.call("GET", "server")
        finally:
            await server.close()


@contextmanager
def _phase(name: str, label: str) -> Iterator[None]:
    """Show what is waited for, with the seconds it takes."""
    start = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not (enabled() and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        progress.add_task(f"{name}: {label}", total=None)
        yield
    if enabled():
        say(f"{name}: {label}, {time.monotonic() - start:.1f} s")


async def _end_ours(record: ClusterRecord) -> None:
    """End what this process started, also while it is being cancelled; say so if it can't."""
    try:
        provider = get_provider(record.spec.provider)
        Registry().set_state(record.name, "ending")
        with _phase(record.name, "ending"):
            await provider.terminate(record.name)
        Registry().remove(record)
    except BaseException:
        say(f"{record.name} may still run. To end it: art-cloud down {record.name}")
        raise


def _check_same(record: ClusterRecord, asked: ClusterSpec) -> None:
    """Refuse to hand out a running cluster as something that it is not."""
    for field in ("provider", "store", "base_model", "engine"):
        has, wants = getattr(record.spec, field), getattr(asked, field)
        if has != wants and None not in (has, wants):
            raise ConfigError(
                f"Cluster {record.name} is there already, with {field} {has}, not {wants}. End it "
                f"(art-cloud down {record.name}) or give the new one another name."
            )


def _unknown(name: str) -> NotFoundError:
    known = ", ".join(record.name for record in Registry().list()) or "none"
    return NotFoundError(f"There is no cluster {name!r}. Known are: {known}.")


def store_url(provider: str, store: str | None) -> str:
    """The URL of `store`: a folder becomes absolute, none is this user's own folder."""
    if store is not None:
        return store if "://" in store else Path(store).expanduser().resolve().as_uri()
    if provider != "local":
        raise ConfigError(
            f"A cluster on {provider} needs store=, the URL where its steps are kept: what is on "
            "its own disk goes with the machine."
        )
    return (home() / "store").as_uri()


def parse_duration(value: str | float) -> float:
    """Seconds in "90s", "15m", "2h", "1.5d" or a plain number of seconds, always above 0."""
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ConfigError(
            f"{value!r} is not a duration. Write it like '90s', '15m', '2h' or '1d', or as a "
            "number of seconds above 0."
        )
    return seconds
