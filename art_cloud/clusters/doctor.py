"""Checks of all that may keep a cluster from starting, each with its cure."""

from __future__ import annotations

import asyncio
import platform
import re
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from ..shared.errors import ArtCloudError, ConfigError, IncompleteListError
from ..shared.version import __version__
from ..store.opening import open_store
from .providers import get_provider, provider_names
from .registry import Registry, home
from .spec import Check, State

LOW_DISK_BYTES = 2e9


async def examine(store: str | None = None) -> list[Check]:
    """Look at everything that is set up here; `store` is looked at beside those of the clusters.

    Nothing is started or ended. Stores are written to, and what was written is removed.
    """
    checks = [_installation(), _guarded("home", _home)]
    for name in provider_names():
        checks += await _provider(name)
    checks += await _clusters()
    for url in _stores(store):
        checks.append(await asyncio.to_thread(_guarded, f"store {url}", partial(_store, url)))
    return checks


def _guarded(subject: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except ArtCloudError as error:
        return Check(subject=subject, state="broken", message=str(error))


def _installation() -> Check:
    here = f"art-cloud {__version__}, Python {platform.python_version()}, {platform.system()}"
    extras: dict[str, bool] = {}
    for requirement in distribution("art-cloud").requires or []:
        if found := re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)", requirement):
            extras[found[2]] = extras.get(found[2], True) and _is_installed(found[1])
    have = [extra for extra, is_complete in extras.items() if is_complete]
    lack = [extra for extra, is_complete in extras.items() if not is_complete]
    return Check(
        subject="installation",
        state="ok",
        message=f"{here}. Extras: {', '.join(have) or 'none'}",
        cure=f"Not installed, for those who need it: {', '.join(lack)}" if lack else "",
    )


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _home() -> Check:
    records, folder = Registry().list(), home()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    subject, free = f"home {folder}", shutil.disk_usage(there).free
    message = f"{len(records)} clusters recorded, {free / 1e9:.0f} GB of disk free"
    if free < LOW_DISK_BYTES:
        cure = "Free some disk: local clusters keep journals and steps there."
        return Check(subject=subject, state="broken", message=message, cure=cure)
    if folder == there and folder.stat().st_mode & 0o077:
        message, cure = "Others can read it, and tokens are in it", f"chmod 700 {folder}"
        return Check(subject=subject, state="warning", message=message, cure=cure)
    return Check(subject=subject, state="ok", message=message)


async def _provider(name: str) -> list[Check]:
    """Check that a provider can list what runs, and run the checks of its own."""
    subject = f"provider {name}"
    try:
        provider = get_provider(name)
        checks: list[Check] = await provider.check() if hasattr(provider, "check") else []
        count = len(await provider.list())
    except ConfigError as error:
        return [Check(subject=subject, state="warning", message=f"Not set up: {error}")]
    except IncompleteListError as error:
        count = len(error.instances)
    except ArtCloudError as error:
        return [Check(subject=subject, state="broken", message=str(error))]
    return [Check(subject=subject, state="ok", message=f"{count} clusters run there"), *checks]


async def _clusters() -> list[Check]:
    from . import fleet

    states: dict[str, State] = {"stopped": "warning", "unreachable": "broken", "unknown": "broken"}
    checks = []
    for one in await fleet.status():
        subject, state = f"cluster {one.name}", states.get(one.state, "ok")
        message = f"{one.state}: {one.detail}"
        if one.server is not None:
            message = f"art-cloud {one.server.version} answers on {one.server.device}"
        cure = "" if state == "ok" else f"Its log: art-cloud logs {one.name}"
        if state == "warning":
            cure = f"Start it again, or forget it: art-cloud down {one.name}"
        checks.append(Check(subject=subject, state=state, message=message, cure=cure))
    return checks


def _stores(store: str | None) -> list[str]:
    from .up import store_url

    specs = [record.spec for record in Registry().list()]
    here = [spec.store for spec in specs if spec.provider == "local" or "file:" not in spec.store]
    return list(dict.fromkeys([store_url("local", store), *here]))


def _store(url: str) -> Check:
    """Check a store: open it, write, read and remove a key, as a server would."""
    subject, parts = f"store {url}", urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).exists():
        message = "Not there yet: the first cluster makes it"
        return Check(subject=subject, state="ok", message=message)
    store = open_store(url, create=True)
    key, content = f"doctor-{uuid4().hex}", b"written by art-cloud doctor"
    won, lost = store.create(key, content), store.create(key, b"something else")
    read = store.read(key)
    store.delete(key)
    if read != content or not won:
        message = "What was read is not what was written"
        cure = "Train with another store."
        return Check(subject=subject, state="broken", message=message, cure=cure)
    if store.single_writer or lost:
        message = "It takes a second writer of the same key (no If-None-Match)"
        cure = "Let only one server at a time train a model, or take another store."
        return Check(subject=subject, state="warning", message=message, cure=cure)
    until = store.credentials_until
    ending = f"; credentials until {until:%Y-%m-%d %H:%M} UTC" if until else ""
    return Check(subject=subject, state="ok", message=f"Written, read and removed{ending}")
