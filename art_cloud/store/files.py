"""A store in a folder."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import SecretStr

from ..shared.errors import (
    ConfigError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from .base import (
    ABANDONED_SECONDS,
    NO_SPACE,
    SHA256,
    Blob,
    Moved,
    check_key,
    corrupt_blob,
    missing_blob,
    sha256_of,
    unwatched,
)

ASIDE = ".aside"
"""How the name of a blob ends that is being deleted, after its hash and a number."""


class FileStore:
    """A folder. A file is written beside its place, synced, then put there in one go. A key is put
    by `os.link`, which fails where the name exists: `create` has one winner."""

    single_writer = False
    credentials_until: datetime | None = None

    def __init__(self, root: Path, *, create: bool = False) -> None:
        self.root = root.resolve()
        self.blob_folder = self.root / "blobs"
        self.staging = self.root / ".staging"
        self.url = self.root.as_uri()
        with self._errors("open the store"):
            if create:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.blob_folder.mkdir(parents=True, exist_ok=True)
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
                created = True
            except FileExistsError:
                created = False
            try:
                _sync(path.parent)  # of one that is there too: whoever put it may have failed here
            except OSError as error:  # it is there, so that this is no refusal
                raise OSError(errno.EIO, error.strerror) from error
            return created

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

    def put_blob(self, source: Path, moved: Moved = unwatched) -> Blob:
        with self._errors(f"store {source.name}"):
            blob = sha256_of(source)
            target = self._blob(blob)
            if not self.touch_blob(blob):
                with self._staged() as staged:
                    shutil.copyfile(source, staged)
                    _sync(staged)
                    staged.replace(target)
                    _sync(self.blob_folder)
            moved(blob.size)
            return blob

    def touch_blob(self, blob: Blob) -> bool:
        with self._errors(f"look at blob {blob.sha256}"):
            target = self._blob(blob)
            while True:
                try:
                    os.utime(target)
                    return target.stat().st_size == blob.size
                except FileNotFoundError:
                    if not self._restore(blob.sha256) and not target.exists():
                        self._check_present()
                        return False

    def get_blob(self, blob: Blob, target: Path, moved: Moved = unwatched) -> None:
        with self._errors(f"fetch blob {blob.sha256}"):
            try:
                shutil.copyfile(self._blob(blob), target)
            except FileNotFoundError:
                if not self._restore(blob.sha256):
                    self._check_present()
                    raise missing_blob(self.url, blob.sha256) from None
                shutil.copyfile(self._blob(blob), target)
            if sha256_of(target) != blob:
                target.unlink()
                raise corrupt_blob(self.url, blob.sha256)
            moved(blob.size)

    def blobs(self) -> Iterator[tuple[Blob, datetime]]:
        with self._errors("list the blobs"):
            self._check_present()
            for path in sorted(self.blob_folder.iterdir()):
                if SHA256.fullmatch(path.name):
                    status = path.stat()
                    modified = datetime.fromtimestamp(status.st_mtime, UTC)
                    yield Blob(sha256=path.name, size=status.st_size), modified

    def delete_blob(self, sha256: str, before: datetime) -> bool:
        """Taken aside first, looked at then: whoever renews it finds it, or stores it anew. Killed
        in between, it lies aside under its name, and is given back to whoever asks for it."""
        with self._errors(f"delete blob {sha256}"):
            self._check_present()
            target = self.blob_folder / sha256
            aside = self.staging / f"{sha256}.{uuid4().hex}{ASIDE}"
            self.staging.mkdir(exist_ok=True)
            try:
                if _is_younger(target, before):
                    return False
                target.rename(aside)
            except FileNotFoundError:
                raise NotFoundError(f"{self.url} holds no blob {sha256}.") from None
            _sync(self.staging)
            with suppress(FileNotFoundError):  # somebody else gave it back
                if _is_younger(aside, before):
                    _give_back(aside, target)
                else:
                    aside.unlink()
            _sync(self.blob_folder)
            return not target.exists()

    def presign(self, what: str | Blob, seconds: int) -> str:
        raise ConfigError(
            f"{self.url} is a folder, which has no URLs. Copy the file itself (`art-cloud "
            "checkpoints pull`), or keep the steps in an S3 store."
        )

    def renew(self, credentials: Mapping[str, SecretStr]) -> None:
        raise ConfigError(f"{self.url} is a folder, which has no credentials to renew.")

    def _check_present(self) -> None:
        """A store always has `blobs`: a folder without it (the empty mount point of a disk that is
        away, a name mistyped) is not an empty store."""
        if not self.blob_folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is away, or no store: there is no blobs/")

    def _remove_abandoned(self) -> None:
        """Remove what writers that were killed left half-written, and give back what lies aside."""
        for aside in self._aside():
            with suppress(FileNotFoundError):  # somebody else gave it back, or deleted it
                _give_back(aside, self.blob_folder / aside.name.partition(".")[0])
        for path in self.staging.glob("*"):
            with suppress(FileNotFoundError):
                old = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
                if old and path.suffix != ASIDE:
                    path.unlink()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _blob(self, blob: Blob) -> Path:
        return self.blob_folder / blob.sha256

    def _restore(self, sha256: str) -> bool:
        """Give back, as young as a new one, a blob that lies aside."""
        for aside in self._aside(sha256):
            with suppress(FileNotFoundError):
                os.utime(aside)
                _give_back(aside, self.blob_folder / sha256)
                return True
        return False

    def _aside(self, sha256: str = "*") -> Sequence[Path]:
        """Blobs that somebody deletes right now, or was killed over."""
        return list(self.staging.glob(f"{sha256}.*{ASIDE}"))

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


def _is_younger(path: Path, than: datetime) -> bool:
    return path.stat().st_mtime >= than.timestamp()


def _give_back(aside: Path, target: Path) -> None:
    """Put a blob back in its place, unless it was stored there anew."""
    with suppress(FileExistsError):
        os.link(aside, target)
    aside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Windows syncs what was opened to be written only, and has no call for a folder.
    """
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
