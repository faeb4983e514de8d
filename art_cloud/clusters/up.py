"""A cluster from first to last: started or found again, watched, and ended.

async with art.up("local") as backend:      # ends with the block
backend = await art.up("local")             # stays, until `art-cloud down` or its idle limit
async with art.connect(url, token) as backend:      # somebody else's server
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Generator, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import SecretStr, ValidationError

from ..backend import Backend
from ..links.endpoint import Endpoint
from ..shared.errors import (
    ConfigError,
    ConflictError,
    IncompleteListError,
    LaunchError,
    NoMachineError,
    NotFoundError,
    RegistryError,
)
from ..shared.limits import parse_deadline, parse_duration, words
from ..shared.names import whole_path
from ..shared.progress import console, enabled, say
from ..shared.protocol import Durability, EngineName
from ..shared.validation import check_url, complaint
from . import fleet
from .attached import AttachedBackend, Replace
from .costs import choose
from .credentials import with_secrets
from .providers import get_provider
from .registry import ClusterRecord, Registry, Use, default_name, home, in_use, unknown
from .relaunch import LAUNCH_SECONDS, OnLoss, Relauncher
from .spec import ClusterSpec, Instance, Offer, Provider
from .timeline import phase, phases_of

T = TypeVar("T")

SAME = ["provider", "store", "base_model", "engine", "durability", "options"]
SAME += ["lease_seconds", "idle_seconds", "budget", "deadline"]
"""Fields of a spec that, if given, must be those of the cluster that runs under the name."""


def up(
    provider: str = "local",
    *,
    name: str | None = None,
    store: str | None = None,
    base_model: str | None = None,
    engine: EngineName = "transformers",
    durability: Durability = "sync",
    lease: str | float | None = None,
    idle: str | float | None = None,
    budget: float | None = None,
    deadline: str | float | datetime | None = None,
    max_hourly: float | None = None,
    on_loss: OnLoss = "relaunch",
    keep: bool = False,
    **options: Any,
) -> Up:
    """Start a cluster, or find the running one of this name, and connect to its server.

    Args:
        provider: Where it runs; "local" is this machine.
        name: Default: `art-<user>-<provider>`.
        store: URL under which every step is kept. Default of "local": a folder of this user.
        base_model: Name or path of the model to load at the start. Default: with the first model
            that is registered.
        engine: What samples on the server: "transformers" or "vllm".
        durability: When a training call returns: "sync", once its step is in the store, or "async",
            once it is served. It is then stored while the next step is rolled out, and this program
            keeps what it was made from until it is.
        lease: How long the server stays without hearing of a client: "90s", "10m" (the default),
            "2h", or seconds. Then it finishes its step and exits, and its machine goes with it.
        idle: How long it stays without a client and without work. Default: "15m".
        budget: US dollars that the cluster may cost from its launch to its end. The server ends
            before they are spent.
        deadline: When it has ended, whatever happens: a duration since the launch ("6h"), or a
            point in time ("2026-12-24T18:00", or a datetime).
        max_hourly: US dollars that an hour of the machine may cost. Without such an offer nothing
            is started.
        on_loss: What to do when its machine is lost while this program uses it: "relaunch" starts
            another by the same spec, which goes on from the store while calls wait; "raise" lets
            them fail.
        keep: Leave the cluster running when the `async with` block ends.
        options: The provider's own; see its page.

    Returns:
        An object for `async with` (ends the cluster with the block, unless `keep` is set, it ran
        before or another program uses it) or for `await` (leaves it running). Both give a
        `Backend`.

    Raises:
        ConfigError: Before anything is started: an unknown provider or engine, a folder of a base
            model that is not there, what is no duration, no offer within `max_hourly`, a budget for
            a machine without a price, a cluster of this name with another base model, store, engine
            or limit.
        ConflictError: A server of this name runs that was not started from here.
        LaunchError: The server did not come up. What was started has been ended.
    """
    get_provider(provider)  # before all else: nothing helps without it
    limits: dict[str, Any] = {
        "lease_seconds": None if lease is None else parse_duration(lease),
        "idle_seconds": None if idle is None else parse_duration(idle),
        "budget": budget,
        "deadline": None if deadline is None else parse_deadline(deadline),
        "max_hourly": max_hourly,
    }
    try:
        spec = ClusterSpec(
            provider=provider,
            store=store_url(provider, store),
            base_model=None if base_model is None else _base_model(provider, base_model),
            engine=engine,
            durability=durability,
            options=options,
            **{field: value for field, value in limits.items() if value is not None},
        )
    except ValidationError as error:
        what, _, why = complaint(error).partition(": ")
        raise ConfigError(f"up({what}): {why}.") from error
    return Up(name or default_name(provider), spec, on_loss=on_loss, keep=keep)


class _Unopened:
    """An object that becomes a `Backend` when it is entered, and says so to a script that uses it
    before."""

    if not TYPE_CHECKING:  # type checkers see by themselves that there is no such attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            what = "art.up(...)" if isinstance(self, Up) else "art.connect(...)"
            raise ConfigError(
                f"{what} is no backend yet, so it has no {name!r}. Enter it: `async with {what} as "
                f"backend:`, or `backend = await {what}`."
            )


class Up(_Unopened):
    """A cluster on its way: enter it with `async with`, or `await` it."""

    def __init__(self, name: str, spec: ClusterSpec, *, on_loss: OnLoss, keep: bool) -> None:
        self.name = name
        self._spec = spec
        self._on_loss = on_loss
        self._keep = keep
        self._own: ClusterRecord | None = None
        self._lease_seconds = spec.lease_seconds
        """The lease of the cluster that was found or started."""
        self._backend: Backend | None = None

    def __await__(self) -> Generator[Any, None, Backend]:
        return self._open().__await__()

    async def __aenter__(self) -> Backend:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | KeyboardInterrupt):
            say(
                f"Interrupted. The steps made so far are in {self._spec.store}; the same script "
                "goes on from the newest of them."
            )
        try:
            if self._backend is not None:
                await self._backend.close()
        finally:
            await self._leave()

    async def _leave(self) -> None:
        if self._own is not None and not self._keep and not in_use(self.name):
            await _end_ours(self._own)
            return
        why = "it ran before this program"
        if self._own is not None:
            why = "as keep=True asked" if self._keep else "another program uses it"
        say(
            f"{self.name} stays, {why}. It ends by itself after {words(self._lease_seconds)} "
            f"without a client. To end it now: art-cloud down {self.name}"
        )

    async def _open(self) -> Backend:
        provider, registry = get_provider(self._spec.provider), Registry()
        offers = await provider.offers(self._spec)
        alone_since = None if in_use(self.name) else datetime.now(UTC)
        mark = Use(self.name)
        try:
            await self._clear(registry, provider, alone_since)
            return await self._launch(provider, registry, offers)
        finally:
            mark.end()

    async def _launch(self, provider: Provider, registry: Registry, offers: list[Offer]) -> Backend:
        spec = self._spec
        if registry.get(self.name) is None:
            spec = spec.model_copy(update={"offer": choose(spec, offers)})
        record, fresh = registry.claim(self.name, spec)
        _check_same(record, self._spec)
        self._own = record if fresh else None
        self._lease_seconds = record.spec.lease_seconds
        if fresh and enabled() and not console.is_terminal:  # there a spinner says it
            say(f"Starting {self.name} on {spec.provider} ...")
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                self._backend = await _start(provider, record, fresh=fresh, on_loss=self._on_loss)
        except (ConflictError, NoMachineError):  # this process started nothing
            if self._own is not None:
                registry.remove(self._own)
            raise
        except BaseException as error:
            if self._own is not None:
                await _end_ours(self._own)
            if isinstance(error, TimeoutError):
                raise LaunchError(
                    f"The server of {self.name} did not listen within {LAUNCH_SECONDS:.0f} s. "
                    f"What it wrote: art-cloud logs {self.name}"
                ) from error
            raise
        try:
            registry.set_state(record, "running")
        except RegistryError as error:
            say(f"{self.name} runs, but that can't be noted: {error}")
        return self._backend

    async def _clear(
        self, registry: Registry, provider: Provider, alone_since: datetime | None
    ) -> None:
        """Forget a cluster of this name that ended or was never started, and finish one that was
        being ended. `alone_since`: when no other program was at work on the name."""
        record = registry.get(self.name)
        there = await self._instances(provider, sure=record is not None)
        record = registry.get(self.name) if record is None else record
        exists = record is not None and any(map(record.has, there))
        same_provider = record is None or record.spec.provider == self._spec.provider
        if there and not exists and same_provider:
            raise ConflictError(
                f"A server {self.name} runs already that is not recorded here "
                f"({there[0].detail}), so its token is not known. Choose another name (name=). If "
                f"it is yours after all, end it: art-cloud down {self.name}"
            )
        if record is None or not same_provider:
            return
        if record.state == "ending":
            await provider.terminate(self.name, only=record.has)
        broke_off = alone_since is not None and record.created_at < alone_since
        gone = not exists and (record.state == "running" or broke_off)
        if record.state == "ending" or gone:
            registry.end(record, seen_to_end=exists)

    async def _instances(self, provider: Provider, *, sure: bool) -> list[Instance]:
        """The instances under this name. With `sure`, raise if the provider can't tell."""
        try:
            instances = await provider.list()
        except IncompleteListError as error:
            instances = error.instances
            found = any(instance.name == self.name for instance in instances)
            if sure and not found and self.name in error.unsure:
                raise
        return [instance for instance in instances if instance.name == self.name]


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    name: str | None = None,
    headers: Mapping[str, str] | None = None,
    sleeps: bool = False,
    inference_url: str | None = None,
) -> Connect:
    """Connect to a server that someone else runs, or to a recorded cluster by its `name`.

    Args:
        headers: What a proxy before the server at `url` asks for in every request.
        sleeps: It scales to zero: wait while it wakes, and don't keep it awake.
        inference_url: Where completions are answered, if not at `url`.

    Returns:
        An object for `async with` or `await`; both give a `Backend`. Nothing is started or ended.

    Raises:
        ConfigError: Neither `url` and `token` nor `name` are given, or `url` is not one of http.
        NotFoundError: No cluster of that name runs.
    """
    if (name is None) == (url is None or token is None):
        raise ConfigError("connect() takes the url and token of a server, or a cluster's name=.")
    if name is not None:
        return Connect(name)
    assert url is not None
    assert token is not None
    for address in (url, *([inference_url] if inference_url else [])):
        check_url(address)
    secrets = {key: SecretStr(value) for key, value in (headers or {}).items()}
    endpoint = Endpoint(url=url, headers=secrets, sleeps=sleeps, inference_url=inference_url)
    return Connect((endpoint, token))


class Connect(_Unopened):
    """A connection on its way: enter it with `async with`, or `await` it."""

    def __init__(self, to: str | tuple[Endpoint, str]) -> None:
        self._to = to
        """The name of a cluster, or the address and token of a server."""
        self._backend: Backend | None = None

    def __await__(self) -> Generator[Any, None, Backend]:
        return self._open().__await__()

    async def __aenter__(self) -> Backend:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        if self._backend is not None:
            await self._backend.close()

    async def _open(self) -> Backend:
        if isinstance(self._to, str):
            self._backend = await _connect_by_name(self._to)
        else:
            self._backend = await _handshake(*self._to)
        return self._backend


async def _connect_by_name(name: str) -> Backend:
    record = Registry().get(name)
    if record is None:
        raise unknown(name)
    provider = get_provider(record.spec.provider)
    if not any(map(record.has, await provider.list())):
        raise NotFoundError(
            f"Cluster {name} is recorded but does not run any more (art-cloud logs {name} says "
            "why). Start it again with art.up(), or forget it: art-cloud down " + name
        )
    endpoint = await provider.endpoint(name)
    return await _handshake(endpoint, record.spec.token.get_secret_value(), record)


async def _start(
    provider: Provider, record: ClusterRecord, *, fresh: bool, on_loss: OnLoss
) -> Backend:
    spec, token = record.spec, record.spec.token.get_secret_value()
    replace = Relauncher(provider, record, on_loss)
    if not fresh:
        with phases_of(record.name), phase("found"):
            await provider.launch(await with_secrets(spec), record.name)
            return await _handshake(await provider.endpoint(record.name), token, record, replace)
    with phases_of(record):
        with phase("provision"):
            await provider.launch(await with_secrets(spec), record.name)
        with phase("boot") as boot:
            endpoint = await provider.endpoint(record.name)
            backend = await _handshake(endpoint, token, record, replace)
            try:
                if loading := (await backend.info()).loading_seconds:
                    boot.had("model load", loading)
                if spec.base_model is not None:
                    with phase("first token"):
                        await backend.sample_a_token(spec.base_model)
            except BaseException:
                await backend.close()
                raise
    return backend


async def _handshake(
    endpoint: Endpoint,
    token: str,
    record: ClusterRecord | None = None,
    replace: Replace | None = None,
) -> AttachedBackend:
    backend = AttachedBackend(endpoint, token, record, replace)
    try:
        with phase("tunnel") if endpoint.ssh else nullcontext():
            return await backend.__aenter__()
    except BaseException:
        await backend.close()
        raise


async def _end_ours(record: ClusterRecord) -> None:
    """End the cluster that this process started, even while the process is being cancelled; print
    why if that fails."""
    try:
        with phases_of(record.name), phase("ending"):
            receipt = await _finish(fleet.end(record, ask=False))
        if enabled():
            say(receipt.summary)
    except BaseException:
        say(f"{record.name} may still run. To end it: art-cloud down {record.name}")
        raise


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if this task is cancelled meanwhile; it is cancelled then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _check_same(record: ClusterRecord, asked: ClusterSpec) -> None:
    """Raise ConfigError where the running cluster is not what was asked for."""
    for field in SAME:
        has, wants = getattr(record.spec, field), getattr(asked, field)
        undecided = None in (has, wants) if field == "base_model" else wants == {}
        if field in asked.model_fields_set and has != wants and not undecided:
            raise ConfigError(
                f"Cluster {record.name} is there already, with {field} {has}, not {wants}. End it "
                f"(art-cloud down {record.name}) or give the new one another name."
            )


def store_url(provider: str, store: str | None) -> str:
    """The URL of `store`: a folder becomes absolute, none is this user's own folder.

    Raises:
        ConfigError: It begins like a URL and is none, or there has to be one and is none.
    """
    if store is not None and "://" in store:
        return store
    if store is not None and (kind := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", store)):
        raise ConfigError(
            f"The store {store!r} is neither a URL nor a folder. A URL has two slashes, as in "
            f"{kind[1]}://my-bucket/art; a folder of such a name is ./{store}"
        )
    if store is not None:
        return Path(store).expanduser().resolve().as_uri()
    if provider != "local":
        raise ConfigError(
            f"A cluster on {provider} needs a store (store=, or --store on the command line): the "
            "URL where its steps are kept. What is on its own disk goes with the machine."
        )
    return (home() / "store").as_uri()


def _base_model(provider: str, base_model: str) -> str:
    """The base model's name, or the whole path of its folder. Raises ConfigError for a folder that
    is not on this machine."""
    found = whole_path(base_model)
    is_path = base_model.startswith((".", "/", "~"))
    if not base_model or (provider == "local" and is_path and not Path(found).is_dir()):
        raise ConfigError(
            f"There is no folder {base_model!r} on this machine. Give the folder of a model, or "
            "its name on the Hugging Face hub, such as Qwen/Qwen3-0.6B."
        )
    return found
