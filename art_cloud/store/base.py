"""Where steps are kept: keys that are written once, and blobs named by their content.

    {root}/{project}/{model}/first.json             the manifest that the model begins with
    {root}/{project}/{model}/steps/000017.json      a manifest: the step exists when it does
    {root}/{project}/{model}/removed/000003.json    the step was removed
    {root}/{project}/{model}/metrics/000017-*.json  what was logged for the step later
    {root}/{project}/{model}/trajectories/...       evaluations, as Parquet
    {root}/blobs/{sha256}                           content, stored once whoever names it

A `Store` has two promises: `create` has at most one winner for a key, and a key or blob is there
whole or not at all, whatever moment the machine dies at. "Did not answer" is an error of its own,
never an empty answer.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Protocol

from pydantic import Field, NonNegativeInt, SecretStr

from ..shared.config import Frozen
from ..shared.errors import ConfigError, CorruptBlobError, NotFoundError

CHUNK = 1 << 20
ABANDONED_SECONDS = 24 * 3600
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHA256 = re.compile(r"[0-9a-f]{64}")


class Blob(Frozen):
    sha256: str = Field(pattern=rf"^{SHA256.pattern}$")
    size: NonNegativeInt
    """Bytes."""


Moved = Callable[[int], None]
"""Told how many more bytes went over; a negative number when some have to go again."""


def unwatched(moved: int) -> None:
    """For whoever does not want to know."""


class Store(Protocol):
    """Keys are relative POSIX paths. Every method raises `StoreError`s only, or `NotFoundError`.

    Methods may be called from several threads at once.
    """

    url: str
    single_writer: bool
    """Whether `create` may have two winners if two writers race: then only one may write."""
    credentials_until: datetime | None
    """When the store's credentials end, if that is known."""

    def read(self, key: str) -> bytes: ...

    def create(self, key: str, data: bytes) -> bool:
        """Write `key` durably if it is absent. False: somebody was first, nothing was written."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix` (which ends in "/"), sorted."""
        ...

    def delete(self, key: str) -> None: ...

    def put_blob(self, source: Path, moved: Moved = unwatched) -> Blob:
        """Store a file's content durably.

        Content that is there already is not sent again, and counts as stored now: no garbage
        collection takes it away before its manifest is there.
        """
        ...

    def touch_blob(self, blob: Blob) -> bool:
        """Let a blob count as stored now. False: it is not there, or not whole."""
        ...

    def get_blob(self, blob: Blob, target: Path, moved: Moved = unwatched) -> None:
        """Write a blob to `target`, checked against its hash first (`CorruptBlobError`)."""
        ...

    def blobs(self) -> Iterator[tuple[Blob, datetime]]:
        """Every blob, by its name and size, and when it was stored last. Nothing of it is read."""
        ...

    def delete_blob(self, sha256: str, before: datetime) -> bool:
        """Remove a blob, unless it was stored (again) since `before`. False: it stays.

        Whoever calls sees to it that no manifest names it.
        """
        ...

    def presign(self, what: str | Blob, seconds: int) -> str:
        """A URL at which anyone can read a key or blob for so long.

        Raises `ConfigError` for a store that has no URLs.
        """
        ...

    def renew(self, credentials: Mapping[str, SecretStr]) -> None:
        """Go on with these: variables of the environment, as boto3 names them."""
        ...


def check_key(key: str) -> PurePosixPath:
    """Raises `ConfigError` for a key that leads out of the store."""
    parts = PurePosixPath(key)
    if parts.is_absolute() or ".." in parts.parts:
        raise ConfigError(f"{key!r} is not a key of a store.")
    return parts


def missing_blob(url: str, sha256: str) -> NotFoundError:
    return NotFoundError(
        f"{url} holds no blob {sha256}, though a manifest names it: it was deleted by hand or by "
        "another tool. Restore it, or go on from another step."
    )


def corrupt_blob(url: str, sha256: str) -> CorruptBlobError:
    return CorruptBlobError(
        f"Blob {sha256} in {url} does not have the content it is named after. Nothing was loaded. "
        "Restore it from a copy, or go on from another step."
    )


def sha256_of(path: Path) -> Blob:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Blob(sha256=digest.hexdigest(), size=size)
