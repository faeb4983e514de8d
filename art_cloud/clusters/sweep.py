"""Machines of ours without a living server, found at every provider, recorded or not.

A server that answers has a lease, and ends by itself when that lapses: it is never swept. What is
left is what can't end by itself: machines whose server is gone or does not answer, launches whose
program died, endings that broke off. What can't be asked, for whatever reason, is not among them.

A question to a person may stand for long between `look` and `end`. So `end` judges each one again,
and ends only the very one that was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ..client.http import ServerClient, parse
from ..links.endpoint import Endpoint
from ..links.tunnel import reached
from ..shared.errors import ArtCloudError, AuthError, LaunchError, ServerError
from ..shared.limits import words
from ..shared.protocol import ServerInfo
from .fleet import end as end_recorded
from .fleet import list_instances, name_of, pairs
from .providers import get_provider, provider_names
from .registry import ClusterRecord, Registry, in_use
from .relaunch import LAUNCH_SECONDS
from .spec import Instance

ANSWER_SECONDS = 60.0
"""How many seconds finding the way to a server may take, and as much again its answer."""
PATIENCE_SECONDS = 15.0
"""How many seconds a server that can't be reached is tried again."""


@dataclass(frozen=True)
class Finding:
    """One cluster or instance of ours, and whether `sweep` would end it."""

    name: str
    provider: str
    what: str
    kept: str | None = None
    """Why it stays; None: it has no lease, and `end` ends it."""
    identity: str | None = None
    """The identity of the instance that runs; None: nothing runs."""
    record: ClusterRecord | None = None

    def is_the_same(self, other: Finding) -> bool:
        mine, theirs = (one.record and one.record.key for one in (self, other))
        return (self.identity, mine) == (other.identity, theirs)


async def look() -> tuple[list[Finding], list[ArtCloudError]]:
    """Find all that is ours; return it with the errors of providers that could not list everything.
    Ends nothing."""
    records = Registry().list()
    found, failures = await _look(records, provider_names())
    needed = {record.spec.provider for record in records}
    return found, [error for name, error in failures.items() if name in needed]


async def end(ghosts: Sequence[Finding]) -> tuple[list[Finding], list[ArtCloudError]]:
    """End those of `ghosts` that are still there unchanged and still without a lease.

    Returns:
        Them, where `kept` says why one was left after all; and what could not be ended.
    """
    done = await asyncio.gather(*map(_end, ghosts), return_exceptions=True)
    if bugs := [one for one in done if isinstance(one, BaseException) and not _told(one)]:
        raise bugs[0]
    return (
        [one for one in done if isinstance(one, Finding)],
        [one for one in done if isinstance(one, ArtCloudError)],
    )


def _told(error: BaseException) -> bool:
    return isinstance(error, ArtCloudError)


async def _end(ghost: Finding) -> Finding:
    records = [record for record in Registry().list() if record.name == ghost.name]
    there, _ = await _look(records, [ghost.provider], ghost.name)
    same = [one for one in there if one.is_the_same(ghost)]
    if not same:
        why = "it is another one by now" if there else "it has ended meanwhile"
        return replace(ghost, kept=why)
    [found] = same
    if found.kept is None and found.record is not None:
        await end_recorded(found.record, ask=False)
    elif found.kept is None:
        provider = get_provider(found.provider)
        await provider.terminate(found.name, only=lambda one: one.identity == found.identity)
    return found


async def _look(
    records: Sequence[ClusterRecord], providers: list[str], name: str | None = None
) -> tuple[list[Finding], dict[str, ArtCloudError]]:
    instances, failures = await list_instances(providers)
    there = [one for one in pairs(records, instances) if name in (None, name_of(*one))]
    found = (_judge(record, instance, failures) for record, instance in there)
    return list(await asyncio.gather(*found)), failures


async def _judge(
    record: ClusterRecord | None, instance: Instance | None, failures: dict[str, ArtCloudError]
) -> Finding:
    name = name_of(record, instance)
    provider = instance.provider if instance else record.spec.provider if record else ""
    what = f"{instance.state}, {instance.detail}" if instance else "recorded"
    if record is None:
        what += ", not recorded here"
    kept: str | None = None
    if in_use(name):
        kept = "a program of this machine uses it"
    elif instance is None:
        what = "nothing runs, only its record is left"
        kept = f"{provider} can't say whether it runs" if provider in failures else None
    elif instance.state == "asleep":
        kept = "it costs nothing until somebody wakes it"
    elif instance.state == "running":
        kept = await _answer(record, instance)
        what += "" if kept else ", does not answer"
    elif instance.state == "starting" and record is None:
        kept = _on_its_way(instance)
    return Finding(name, provider, what, kept, instance.identity if instance else None, record)


def _on_its_way(instance: Instance) -> str | None:
    """Why an instance without a record stays: it may still be starting, and a program elsewhere
    waits for it for up to `LAUNCH_SECONDS`. None: it is older."""
    age = (datetime.now(UTC) - instance.started_at).total_seconds()
    return f"it was started {words(max(age, 0.0))} ago" if age < LAUNCH_SECONDS else None


async def _answer(record: ClusterRecord | None, instance: Instance) -> str | None:
    """Why an instance that runs stays: what its server says of its lease, or why the server can't
    be asked."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            endpoint = await get_provider(instance.provider).endpoint(instance.name)
        if endpoint.sleeps:
            return "it falls asleep by itself when nobody asks for anything"
        return await _heard(endpoint, record)
    except TimeoutError:  # it does not listen
        return _on_its_way(instance) if record is None else None
    except LaunchError:  # it has ended
        return None
    except ArtCloudError as error:
        return f"it can't be asked: {error}"


async def _heard(endpoint: Endpoint, record: ClusterRecord | None) -> str | None:
    """What a server says of its lease, if it answers. Without a record there is no token: it only
    shows that it answers."""
    token = record.spec.token.get_secret_value() if record else "unknown"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return _lease(await _ask(endpoint, token))
    except AuthError:
        return "its server answers, and has a lease of its own"
    except (ServerError, TimeoutError):
        return None


async def _ask(endpoint: Endpoint, token: str) -> ServerInfo:
    async with reached(endpoint) as url:
        headers = endpoint.plain_headers
        server = ServerClient(url, token, patience=PATIENCE_SECONDS, headers=headers)
        try:
            return parse(ServerInfo, await server.call("GET", "server"))
        finally:
            await server.close()


def _lease(server: ServerInfo) -> str:
    for clock in server.clocks:
        if clock.name == "lease":
            return f"leased for {words(clock.remaining)} more"
    return "its server answers, and has no lease"
