"""Where steps are kept: keys that are written once, and blobs named by their content.

    {root}/{project}/{model}/steps/000017.json      a manifest: the step exists when it does
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
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from pydantic import Field, NonNegativeInt

from .config import Frozen
from .errors import (
    ConfigError,
    CorruptBlobError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)

CHUNK = 1 << 20
ABANDONED_SECONDS = 24 * 3600
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Blob(Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: NonNegativeInt
    """Bytes."""


class Store(Protocol):
    """Keys are relative POSIX paths. Every method raises `StoreError`s only, or `NotFoundError`."""

    url: str

    def read(self, key: str) -> bytes: ...

    def create(self, key: str, data: bytes) -> bool:
        """Write `key` durably if it is absent. False: somebody was first, nothing was written."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix` (which ends in "/"), sorted."""
        ...

    def delete(self, key: str) -> None: ...

    def put_blob(self, source: Path) -> Blob:
        """Store a file's content durably; content that is there already is not sent again."""
        ...

    def get_blob(self, blob: Blob, target: Path) -> None:
        """Write a blob to `target`, checked against its hash first (`CorruptBlobError`)."""
        ...


def open_store(url: str, *, create: bool = False) -> Store:
    """Open `file:///folder`; a plain path means a folder too. `create` makes it if it is absent."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)), create=create)
    if not parts.scheme:
        return FileStore(Path(url).expanduser(), create=create)
    raise ConfigError(
        f"store {url!r}: no store of kind {parts.scheme!r} in this version. "
        "Use file:///a/folder, or a path."
    )


def sha256_of(path: Path) -> Blob:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Blob(sha256=digest.hexdigest(), size=size)


class FileStore:
    """A folder. A file is written beside its place, synced, then put there in one go. A key is put
    by `os.link`, which fails where the name exists: `create` has one winner."""

    def __init__(self, root: Path, *, create: bool = False) -> None:
        self.root = root.resolve()
        self.blobs = self.root / "blobs"
        self.staging = self.root / ".staging"
        self.url = self.root.as_uri()
        with self._errors("open the store"):
            if create:
                self.blobs.mkdir(parents=True, exist_ok=True)
                self._remove_abandoned()
            self._check_present()

    def read(self, key: str) -> bytes:
        with self._errors(f"read {key}"):
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                self._check_present()
                raise NotFoundError(f"{self.url} holds no {key}.") from None

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._errors(f"write {key}"), self._staged() as staged:
            staged.write_bytes(data)
            _sync(staged)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(staged, path)
            except FileExistsError:
                return False
            _sync(path.parent)
            return True

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        with self._errors(f"list {prefix}"):
            self._check_present()
            return sorted(
                path.relative_to(self.root).as_posix()
                for path in folder.rglob("*")
                if path.is_file()
            )

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(f"delete {key}"):
            try:
                path.unlink()
            except FileNotFoundError:
                self._check_present()
                raise NotFoundError(f"{self.url} holds no {key}.") from None
            _sync(path.parent)

    def put_blob(self, source: Path) -> Blob:
        with self._errors(f"store {source.name}"):
            blob = sha256_of(source)
            target = self._blob(blob)
            if not (target.exists() and target.stat().st_size == blob.size):
                with self._staged() as staged:
                    shutil.copyfile(source, staged)
                    _sync(staged)
                    staged.replace(target)
                    _sync(self.blobs)
            return blob

    def get_blob(self, blob: Blob, target: Path) -> None:
        with self._errors(f"fetch blob {blob.sha256}"):
            try:
                shutil.copyfile(self._blob(blob), target)
            except FileNotFoundError:
                self._check_present()
                raise NotFoundError(
                    f"{self.url} holds no blob {blob.sha256}, though a manifest names it: it was "
                    "deleted by hand or by another tool. Restore it, or go on from another step."
                ) from None
            if sha256_of(target) != blob:
                target.unlink()
                raise CorruptBlobError(
                    f"Blob {blob.sha256} in {self.url} does not have the content it is named "
                    "after. Nothing was loaded. Restore it from a copy, or go on from another step."
                )

    def _check_present(self) -> None:
        """A store always has `blobs`: a folder without it (the empty mount point of a disk that is
        away, a name mistyped) is not an empty store."""
        if not self.blobs.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is away, or no store: there is no blobs/")

    def _remove_abandoned(self) -> None:
        """Remove what writers that were killed left half-written."""
        for path in self.staging.glob("*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key)
        if parts.is_absolute() or ".." in parts.parts:
            raise ConfigError(f"{key!r} is not a key of a store.")
        return self.root / parts

    def _blob(self, blob: Blob) -> Path:
        return self.blobs / blob.sha256

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """A name for a new file on the store's own file system, gone afterwards."""
        self._check_present()
        staged = self.staging / uuid4().hex
        self.staging.mkdir(exist_ok=True)
        try:
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_SPACE:
                raise StoreFullError(
                    f"Could not {what}: no space left in {self.url} ({error.strerror}). The steps "
                    "before it are whole. Free some space (`art-cloud checkpoints rm`) and repeat."
                ) from error
            if isinstance(error, PermissionError):
                raise StoreError(
                    f"Could not {what}: no permission in {self.url}. Make the folder writable for "
                    "the user that runs the server, or name another with --store."
                ) from error
            raise StoreUnavailableError(
                f"Could not {what}: {self.url} did not answer ({error.strerror}). "
                "Check its name and that its disk is mounted, then repeat."
            ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
