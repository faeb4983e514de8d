"""What is ours and nobody leases: found at every provider, recorded or not.

A server that answers has a lease, and ends by itself when that lapses: it is never swept. What is
left is what can't end by itself: machines whose server is gone or does not answer, launches whose
program died, endings that broke off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime

from .durations import words
from .errors import ArtCloudError, AuthError
from .fleet import down, list_instances, server_info
from .http import ServerClient
from .protocol import ServerInfo
from .providers import Instance, get_provider, provider_names
from .registry import ClusterRecord, Registry, in_use
from .relaunch import LAUNCH_SECONDS
from .tunnel import reached

ANSWER_SECONDS = 60.0
"""To find the way to a server that is not recorded here, and knock: if it can't be heard in that
time, it is ended."""


@dataclass(frozen=True)
class Finding:
    """Something of ours."""

    name: str
    provider: str
    what: str
    kept: str | None = None
    """Why it stays; None: nobody leases it."""


async def look() -> tuple[list[Finding], list[ArtCloudError]]:
    """All that is ours, and the errors of providers that could not tell of all. Ends nothing."""
    records = {record.name: record for record in Registry().list()}
    instances, failures = await list_instances(provider_names())
    needed = {record.spec.provider for record in records.values()}
    running = {instance.name: instance for instance in instances}
    found = (
        _judge(name, records.get(name), running.get(name), failures)
        for name in sorted(records.keys() | running.keys())
    )
    told = [error for name, error in failures.items() if name in needed]
    return list(await asyncio.gather(*found)), told


async def end(ghosts: list[Finding]) -> None:
    for ghost in ghosts:
        await down(ghost.name)


async def _judge(
    name: str,
    record: ClusterRecord | None,
    instance: Instance | None,
    failures: dict[str, ArtCloudError],
) -> Finding:
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
        age = (datetime.now(UTC) - instance.started_at).total_seconds()
        kept = f"it was started {words(age)} ago" if age < LAUNCH_SECONDS else None
    return Finding(name, provider, what, kept)


async def _answer(record: ClusterRecord | None, instance: Instance) -> str | None:
    """What a server says of its lease, if it answers; one without a record is only knocked at."""
    try:
        if record is not None:
            return _lease(await server_info(record))
        async with asyncio.timeout(ANSWER_SECONDS):
            endpoint = await get_provider(instance.provider).endpoint(instance.name)
            async with reached(endpoint) as url:
                headers = endpoint.plain_headers
                server = ServerClient(url, "unknown", patience=0, headers=headers)
                try:
                    await server.call("GET", "server")
                finally:
                    await server.close()
    except AuthError:
        return "its server answers, and has a lease of its own"
    except (ArtCloudError, TimeoutError):
        return None
    return None


def _lease(server: ServerInfo) -> str:
    for clock in server.clocks:
        if clock.name == "lease":
            return f"leased for {words(clock.remaining)} more"
    return "its server answers, and has no lease"
