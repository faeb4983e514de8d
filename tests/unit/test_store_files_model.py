"""A folder's blobs, in every order in which writers, readers, `gc` and a start can come to them.

The code is the real `FileStore`, on a real disk. Each call to the file system is a moment at which
its process may be stopped for any time, or killed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from art_cloud.shared.errors import NotFoundError
from art_cloud.store import files as store_module
from art_cloud.store.base import sha256_of
from art_cloud.store.files import FileStore

from ..rigs.schedules import Actor, Run, Violation, explore

DAY = 86400.0
NOW = float(int(time.time()))
CONTENT = b"weights"


@dataclass(frozen=True)
class Name:
    """In the place of a UUID: the same in each run."""

    hex: str


class Disk:
    """A store with one blob that nobody has used for two days; `now` stands still."""

    folder: Path
    now: Disk | None

    def __init__(self, run: Run, cast: Callable[[Disk], Sequence[Actor]]) -> None:
        Disk.now = None
        self.run = run
        self.time = NOW
        self.names = 0
        shutil.rmtree(self.folder, ignore_errors=True)
        self.store = FileStore(self.folder / "store", create=True)
        self.source = self.folder / "source"
        self.source.write_bytes(CONTENT)
        self.blob = self.store.put_blob(self.source)
        self.path = self.store.blob_folder / self.blob.sha256
        os.utime(self.path, (NOW - 2 * DAY, NOW - 2 * DAY))
        self.used = False
        """Whether a manifest names it by now."""
        Disk.now = self
        self.cast = cast(self)

    def name(self) -> Name:
        self.names += 1
        return Name(f"{self.run.actor}{self.names}")

    def is_of_blobs(self, path: object) -> bool:
        return self.blob.sha256 in str(path) or f"{self.folder}/store/.staging/" in f"{path}/"

    def actors(self) -> Sequence[Actor]:
        return self.cast

    def state(self) -> Hashable:
        """Which files there are, which of them are one, and how old they are."""
        files = sorted(path for path in self.store.root.rglob("*") if path.is_file())
        inodes: dict[int, int] = {}
        found: list[Hashable] = [self.used]
        for path in files:
            status = path.stat()
            name = path.name.partition(".")[0] if "blobs" in path.parts else path.suffix
            inode = inodes.setdefault(status.st_ino, len(inodes))
            found.append((name, inode, status.st_mtime, status.st_size))
        return tuple(found)

    def check(self) -> None:
        pass

    def check_end(self) -> None:
        """What is used can be had, also if it lies aside."""
        with suppress(FileNotFoundError):
            assert sha256_of(self.path) == self.blob, "half a blob"
        if self.used:
            self.store.get_blob(self.blob, self.folder / "fetched")
        FileStore(self.store.root, create=True)
        assert self.path.exists() or not self.used, "it is lost"
        assert not list(self.store.staging.glob(f"*{store_module.ASIDE}")), "it lies aside for ever"

    def of(self) -> FileStore:
        """As another process sees it."""
        return FileStore(self.store.root)


def collect(disk: Disk, name: str = "gc") -> Actor:
    before = datetime.fromtimestamp(NOW - DAY, UTC)

    def work() -> None:
        with suppress(NotFoundError):
            disk.of().delete_blob(disk.blob.sha256, before)

    return Actor(name, work)


def write(disk: Disk, name: str = "writer") -> Actor:
    """Stores what may be there, and looks again, as `Checkpoints.create` does."""

    def work() -> None:
        store = disk.of()
        store.put_blob(disk.source)
        disk.used = True
        if not store.touch_blob(disk.blob):
            store.put_blob(disk.source)

    return Actor(name, work, may_crash=False)


def fork(disk: Disk) -> Actor:
    """Looks whether it is there, twice."""

    def work() -> None:
        store = disk.of()
        if store.touch_blob(disk.blob):
            assert store.touch_blob(disk.blob), "what was there and used is not there"
            disk.used = True

    return Actor("fork", work, may_crash=False)


def start(disk: Disk) -> Actor:
    return Actor("start", lambda: FileStore(disk.store.root, create=True) and None)


CASTS: dict[str, Callable[[Disk], Sequence[Actor]]] = {
    "a writer": lambda disk: [write(disk), collect(disk)],
    "a fork": lambda disk: [fork(disk), collect(disk)],
    "a fork and a start": lambda disk: [fork(disk), collect(disk), start(disk)],
    "two that collect": lambda disk: [fork(disk), collect(disk), collect(disk, "gc too")],
    "a writer and a start": lambda disk: [write(disk), collect(disk), start(disk)],
}


@pytest.fixture(autouse=True)
def each_call_is_a_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_time = os.utime

    def moment(owner: Any, name: str, *, looks: bool = False) -> None:
        really = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            disk = Disk.now
            if disk is None or not disk.run.actor or not any(map(disk.is_of_blobs, args)):
                return really(*args, **kwargs)
            answers: list[Any] = []

            def work() -> object:
                answer = really(*args, **kwargs)
                if name in ("utime", "copyfile"):
                    set_time(args[name == "copyfile"], (disk.time, disk.time))
                if name == "glob":
                    answer = list(answer)
                answers.append(answer)
                return (answer.st_mtime, answer.st_size) if name == "stat" else answer

            what = f"{name} {' '.join(str(one).removeprefix(str(disk.folder)) for one in args)}"
            if what.split() != ["stat", "/store/.staging"]:
                disk.run.call(what, work, looks=looks)
            else:
                work()
            return answers[0]

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(Disk, "folder", tmp_path / "disk", raising=False)
    monkeypatch.setattr(Disk, "now", None, raising=False)
    monkeypatch.setattr(store_module, "_sync", lambda path: None)
    monkeypatch.setattr(store_module, "uuid4", lambda: Disk.now.name() if Disk.now else uuid4())
    for owner, name in ((os, "utime"), (os, "link"), (shutil, "copyfile")):
        moment(owner, name)
    for name in ("rename", "replace", "unlink"):
        moment(Path, name)
    for name in ("stat", "glob"):
        moment(Path, name, looks=True)


@pytest.mark.parametrize("cast", CASTS)
def test_a_blob_that_is_used_is_not_lost(cast: str) -> None:
    assert explore(partial(Disk, cast=CASTS[cast]), preemptions=1, crashes=1).runs > 20


@pytest.mark.slow
@pytest.mark.parametrize("cast", CASTS)
def test_a_blob_that_is_used_is_not_lost_either(cast: str) -> None:
    assert explore(partial(Disk, cast=CASTS[cast]), preemptions=3, crashes=1).runs > 50


def judged_by_its_place(self: FileStore, sha256: str, before: datetime) -> bool:
    """Looked at, then deleted."""
    target = self.blob_folder / sha256
    if target.stat().st_mtime < before.timestamp():
        target.unlink()
    return True


def aside_without_a_name(self: FileStore, sha256: str, before: datetime) -> bool:
    target, aside = self.blob_folder / sha256, self.staging / "aside"
    self.staging.mkdir(exist_ok=True)
    target.rename(aside)
    if aside.stat().st_mtime >= before.timestamp():
        aside.replace(target)
    else:
        aside.unlink()
    return True


@pytest.mark.parametrize("delete", [judged_by_its_place, aside_without_a_name])
def test_a_fault_is_found(delete: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "delete_blob", delete)
    with pytest.raises(Violation, match=r"is not there|is lost|no blob"):
        explore(partial(Disk, cast=CASTS["a fork"]), preemptions=2, crashes=1)
