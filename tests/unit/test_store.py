"""The store on a real disk: one winner, whole or not at all, and never a silent "empty"."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_cloud.shared.errors import (
    ConfigError,
    CorruptBlobError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
)
from art_cloud.store import base as store_module
from art_cloud.store.base import Store
from art_cloud.store.files import FileStore
from art_cloud.store.opening import open_store


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store", create=True)


def put(store: Store, folder: Path, content: bytes) -> store_module.Blob:
    source = folder / "source"
    source.write_bytes(content)
    return store.put_blob(source)


def staged(store: FileStore) -> list[Path]:
    return list(store.staging.glob("*"))


def test_a_key_is_written_once(store: FileStore) -> None:
    assert store.create("p/m/steps/000000.json", b"first")
    assert not store.create("p/m/steps/000000.json", b"second")
    assert store.read("p/m/steps/000000.json") == b"first"
    assert staged(store) == []


RACER = """
import sys, time
from pathlib import Path
from art_cloud.store.files import FileStore
root, me, gate = sys.argv[1:]
store = FileStore(Path(root))
print("ready", flush=True)
while not Path(gate).exists():
    pass
print(sum(store.create(f"race/{n:03d}", f"{me}:{n}".encode() * 1000) for n in range(100)))
"""


def test_of_racing_processes_one_wins(store: FileStore, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(store.root), str(me), str(gate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    gate.touch()
    won = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(won) == 100
    for number, key in enumerate(store.list("race/")):
        winner = store.read(key).decode().split(":")[0]
        assert store.read(key) == f"{winner}:{number}".encode() * 1000
    assert staged(store) == []


WRITER = """
import sys
from pathlib import Path
from art_cloud.store.files import FileStore
root, source = map(Path, sys.argv[1:])
store = FileStore(root)
print("ready", flush=True)
for n in range(100_000):
    source.write_bytes(n.to_bytes(8) * 50_000)
    blob = store.put_blob(source)
    store.create(f"keys/{n:06d}", blob.model_dump_json().encode())
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_things(
    store: FileStore, tmp_path: Path
) -> None:
    for number in range(6):
        shutil.rmtree(store.root / "keys", ignore_errors=True)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store.root), str(tmp_path / "source")],
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.01 + 0.017 * number)
            writer.kill()
        for key in store.list("keys/"):  # each names a blob that is there, whole
            blob = store_module.Blob.model_validate_json(store.read(key))
            store.get_blob(blob, tmp_path / "fetched")
        for path in store.blob_folder.iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_what_a_killed_writer_left_is_removed_a_day_later(store: FileStore) -> None:
    store.staging.mkdir()
    old, new = store.staging / "old", store.staging / "new"
    old.write_bytes(b"half")
    new.write_bytes(b"under way")
    day_ago = time.time() - store_module.ABANDONED_SECONDS - 1
    os.utime(old, (day_ago, day_ago))
    FileStore(store.root, create=True)
    assert staged(store) == [new]


def test_the_same_content_is_stored_once(store: FileStore, tmp_path: Path) -> None:
    first = put(store, tmp_path, b"weights")
    assert put(store, tmp_path, b"weights") == first
    assert [path.name for path in store.blob_folder.iterdir()] == [first.sha256]
    assert (first.sha256, first.size) == (hashlib.sha256(b"weights").hexdigest(), 7)


def test_content_cut_short_is_written_again(store: FileStore, tmp_path: Path) -> None:
    blob = put(store, tmp_path, b"weights")
    (store.blob_folder / blob.sha256).write_bytes(b"wei")
    assert put(store, tmp_path, b"weights") == blob
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"


@pytest.mark.parametrize("damage", [b"weighTs", b"weight", b""])
def test_damaged_content_is_named_and_not_handed_out(
    store: FileStore, tmp_path: Path, damage: bytes
) -> None:
    blob = put(store, tmp_path, b"weights")
    (store.blob_folder / blob.sha256).write_bytes(damage)
    with pytest.raises(CorruptBlobError, match=blob.sha256):
        store.get_blob(blob, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_missing_content_is_said_to_be_missing(store: FileStore, tmp_path: Path) -> None:
    blob = put(store, tmp_path, b"weights")
    (store.blob_folder / blob.sha256).unlink()
    with pytest.raises(NotFoundError, match=f"no blob {blob.sha256}"):
        store.get_blob(blob, tmp_path / "target")


@pytest.mark.parametrize("how", ["gone", "an empty mount point"])
def test_a_store_that_is_away_is_never_empty(store: FileStore, tmp_path: Path, how: str) -> None:
    blob = put(store, tmp_path, b"weights")
    store.create("p/m/steps/000000.json", b"{}")
    store.root.rename(tmp_path / "elsewhere")
    if how == "an empty mount point":
        store.root.mkdir()
    for call in (
        lambda: store.list("p/m/steps/"),
        lambda: store.read("p/m/steps/000000.json"),
        lambda: store.create("p/m/steps/000001.json", b"{}"),
        lambda: store.delete("p/m/steps/000000.json"),
        lambda: put(store, tmp_path, b"other weights"),
        lambda: store.get_blob(blob, tmp_path / "target"),
        lambda: FileStore(store.root),
    ):
        with pytest.raises(StoreUnavailableError, match="mounted"):
            call()
    assert not store.blob_folder.exists()


def test_lists_what_begins_with_a_prefix_in_order(store: FileStore) -> None:
    for key in ("p/m/steps/000010.json", "p/m/steps/000002.json", "p/mm/steps/000001.json"):
        store.create(key, b"")
    assert store.list("p/m/steps/") == ["p/m/steps/000002.json", "p/m/steps/000010.json"]
    assert store.list("q/") == []
    store.delete("p/m/steps/000002.json")
    assert store.list("p/m/steps/") == ["p/m/steps/000010.json"]
    with pytest.raises(NotFoundError):
        store.delete("p/m/steps/000002.json")


@pytest.mark.parametrize("key", ["../x", "/etc/x", "p/../../x"])
def test_a_key_does_not_lead_out(store: FileStore, key: str) -> None:
    with pytest.raises(ConfigError, match="not a key"):
        store.create(key, b"")
    with pytest.raises(ConfigError, match="not a key"):
        store.read(key)


def test_urls_and_paths(tmp_path: Path) -> None:
    spaced = tmp_path / "a store"
    by_url = open_store(spaced.as_uri(), create=True)
    assert by_url.url == open_store(str(spaced)).url == spaced.as_uri()
    with pytest.raises(ConfigError, match="'gs'"):
        open_store("gs://bucket/art")
    with pytest.raises(ConfigError, match="'file'"):
        open_store("file://elsewhere/art")


def test_a_file_in_the_way_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        open_store(str(tmp_path / "file" / "store"), create=True)


FULL = """
import resource, sys
from pathlib import Path
from art_cloud.shared.errors import StoreFullError
from art_cloud.store.files import FileStore
root, source = map(Path, sys.argv[1:])
store = FileStore(root)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for call in (lambda: store.put_blob(source), lambda: store.create("key", bytes(2000))):
    try:
        call()
    except StoreFullError as error:
        print(error)
    else:
        sys.exit("no error")
print(list(store.staging.glob("*")), store.list(""))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(store.put_blob(source).size, store.create("key", bytes(2000)))
"""


def test_no_space_left(store: FileStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(5000))
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(store.root), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    blob_error, key_error, left, after = run.stdout.splitlines()
    for error in (blob_error, key_error):
        assert "no space left" in error
        assert "art-cloud checkpoints rm" in error
    assert left == "[] []"
    assert after == "5000 True"


def test_errors_of_the_store_are_the_only_ones(store: FileStore) -> None:
    (store.root / "p").write_bytes(b"a file where a folder should be")
    with pytest.raises(StoreError):
        store.create("p/m/steps/000000.json", b"{}")
    with pytest.raises(StoreError):
        store.read("p/m")


def test_a_new_folder_is_nobody_elses(tmp_path: Path) -> None:
    """Whatever the umask; a folder that is there already stays as open as its owner has it."""
    before = os.umask(0)
    try:
        FileStore(tmp_path / "new" / "store", create=True)
        (tmp_path / "shared").mkdir()
        FileStore(tmp_path / "shared", create=True)
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o777
