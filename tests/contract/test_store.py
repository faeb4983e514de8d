"""What every store promises: a folder, and S3 as two real servers speak it."""

from __future__ import annotations

import hashlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest

from art_cloud.shared.errors import (
    ConfigError,
    CorruptBlobError,
    NotFoundError,
    StoreUnavailableError,
)
from art_cloud.store.base import Blob, Store
from art_cloud.store.files import FileStore
from art_cloud.store.opening import open_store

from ..rigs.fault_proxy import FaultProxy
from ..rigs.s3_servers import S3Server


@dataclass(frozen=True)
class Subject:
    """A store, and ways to get at it behind its back."""

    store: Store
    overwrite: Callable[[str, bytes], None]
    keys: Callable[[], list[str]]
    """Of everything in it, leftovers included."""
    take_away: Callable[[], None]
    ca: Path | None = None


def of_folder(tmp_path: Path) -> Subject:
    store = FileStore(tmp_path / "store", create=True)
    return Subject(
        store,
        overwrite=lambda key, data: (store.root / key).write_bytes(data) and None,
        keys=lambda: [
            path.relative_to(store.root).as_posix()
            for path in store.root.rglob("*")
            if path.is_file()
        ],
        take_away=lambda: store.root.rename(tmp_path / "elsewhere") and None,
    )


def of_server(server: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr("art_cloud.store.s3.ATTEMPTS", 1)
    monkeypatch.setattr("art_cloud.store.s3_transfer.PART", 16 << 20)
    server.use(monkeypatch, AWS_ENDPOINT_URL=proxy.url)
    bucket, client = server.make_bucket(), server.client()
    return Subject(
        open_store(f"s3://{bucket}/some/art"),
        overwrite=lambda key, data: (
            client.put_object(Bucket=bucket, Key=f"some/art/{key}", Body=data) and None
        ),
        keys=lambda: [
            item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])
        ],
        take_away=proxy.stop,
        ca=server.ca,
    )


@pytest.fixture(
    params=["folder", "moto", pytest.param("swift", marks=pytest.mark.xdist_group("swift"))]
)
def subject(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Subject]:
    if request.param == "folder":
        yield of_folder(tmp_path)
        return
    server: S3Server = request.getfixturevalue(request.param)
    with FaultProxy(server.endpoint_url) as proxy:
        yield of_server(server, proxy, monkeypatch)


@pytest.fixture
def store(subject: Subject) -> Store:
    return subject.store


@pytest.fixture
def blob(store: Store, tmp_path: Path) -> Blob:
    return put(store, tmp_path, b"weights")


def put(store: Store, folder: Path, content: bytes) -> Blob:
    source = folder / "source"
    source.write_bytes(content)
    return store.put_blob(source)


def test_a_key_is_written_once(store: Store) -> None:
    assert store.create("p/m/steps/000000.json", b"first")
    assert not store.create("p/m/steps/000000.json", b"second")
    assert store.read("p/m/steps/000000.json") == b"first"


def test_of_racing_writers_one_wins_or_it_is_said_that_not(subject: Subject) -> None:
    store = open_store(subject.store.url, create=True)
    assert subject.keys() == []

    def race(key: str, writer: int, start: threading.Barrier) -> bool:
        start.wait()
        return store.create(key, f"{writer}".encode())

    with ThreadPoolExecutor(8) as threads:
        for number in range(10):
            key, start = f"race/{number}", threading.Barrier(8)
            running = [threads.submit(race, key, writer, start) for writer in range(8)]
            won = [writer for writer, future in enumerate(running) if future.result()]
            assert len(won) >= 1
            assert len(won) == 1 or store.single_writer
            assert int(store.read(key)) in won


def test_lists_what_begins_with_a_prefix_in_order(store: Store) -> None:
    for key in ("p/m/steps/000010.json", "p/m/steps/000002.json", "p/mm/steps/000001.json"):
        assert store.create(key, b"")
    assert store.list("p/m/steps/") == ["p/m/steps/000002.json", "p/m/steps/000010.json"]
    assert store.list("q/") == []
    assert len(store.list("")) == 3


def test_what_is_deleted_is_gone_and_can_be_written_again(store: Store) -> None:
    store.create("p/m/metrics/1", b"first")
    store.delete("p/m/metrics/1")
    assert store.list("p/") == []
    for gone in (store.delete, store.read):
        with pytest.raises(NotFoundError, match="p/m/metrics/1"):
            gone("p/m/metrics/1")
    assert store.create("p/m/metrics/1", b"second")


@pytest.mark.parametrize("key", ["../x", "/etc/x", "p/../../x"])
def test_a_key_does_not_lead_out(store: Store, key: str) -> None:
    for call in (lambda: store.create(key, b""), lambda: store.read(key), lambda: store.list(key)):
        with pytest.raises(ConfigError, match="not a key"):
            call()


@pytest.mark.parametrize(
    "content",
    [b"", b"weights", bytes(range(256)) * 130_000],
    ids=["nothing", "few bytes", "33 MB"],  # else they are their own names, in each report
)
def test_content_comes_back_under_its_hash(store: Store, tmp_path: Path, content: bytes) -> None:
    moved: list[int] = []
    source = tmp_path / "source"
    source.write_bytes(content)
    blob = store.put_blob(source, moved.append)
    assert blob == Blob(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    store.get_blob(blob, tmp_path / "target", moved.append)
    assert (tmp_path / "target").read_bytes() == content
    assert sum(moved) == 2 * len(content)


def test_the_same_content_is_stored_once(subject: Subject, blob: Blob, tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(minutes=1)
    assert put(subject.store, tmp_path, b"weights") == blob
    [(listed, modified)] = subject.store.blobs()
    assert listed == blob
    assert before < modified < before + timedelta(minutes=10)


def test_nothing_is_left_beside_what_was_stored(subject: Subject, blob: Blob) -> None:
    subject.store.create("key", b"")
    assert len(subject.keys()) == 2


def test_a_blob_is_removed(store: Store, blob: Blob, tmp_path: Path) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    assert not store.delete_blob(blob.sha256, before=later - timedelta(hours=2))
    assert [listed for listed, _ in store.blobs()] == [blob]
    assert store.delete_blob(blob.sha256, before=later)
    assert list(store.blobs()) == []
    with pytest.raises(NotFoundError, match=f"no blob {blob.sha256}, though a manifest names it"):
        store.get_blob(blob, tmp_path / "target")
    with pytest.raises(NotFoundError, match=blob.sha256):
        store.delete_blob(blob.sha256, before=later)


def test_content_that_is_used_again_is_young_again(
    store: Store, blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_cloud.store.s3.RENEWED", timedelta(0))
    [(_, stored)] = store.blobs()
    give_up = time.monotonic() + 30
    while True:  # S3 tells whole seconds
        assert put(store, tmp_path, b"weights") == blob
        [(_, renewed)] = store.blobs()
        if renewed > stored:
            break
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert not store.delete_blob(blob.sha256, before=stored + timedelta(microseconds=1))
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"


def test_content_cut_short_is_written_again(subject: Subject, blob: Blob, tmp_path: Path) -> None:
    subject.overwrite(f"blobs/{blob.sha256}", b"wei")
    assert put(subject.store, tmp_path, b"weights") == blob
    subject.store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"


@pytest.mark.parametrize("damage", [b"weighTs", b"weight", b""])
def test_damaged_content_is_named_and_not_handed_out(
    subject: Subject, blob: Blob, tmp_path: Path, damage: bytes
) -> None:
    subject.overwrite(f"blobs/{blob.sha256}", damage)
    target = tmp_path / "fetched" / "target"
    target.parent.mkdir()
    with pytest.raises(CorruptBlobError, match=blob.sha256):
        subject.store.get_blob(blob, target)
    assert list(target.parent.iterdir()) == []


def test_a_store_that_is_away_is_never_empty(subject: Subject, blob: Blob, tmp_path: Path) -> None:
    store = subject.store
    store.create("p/m/steps/000000.json", b"{}")
    subject.take_away()
    for call in (
        lambda: store.list("p/m/steps/"),
        lambda: store.read("p/m/steps/000000.json"),
        lambda: store.create("p/m/steps/000001.json", b"{}"),
        lambda: store.delete("p/m/steps/000000.json"),
        lambda: put(store, tmp_path, b"other weights"),
        lambda: store.get_blob(blob, tmp_path / "target"),
        lambda: list(store.blobs()),
        lambda: open_store(store.url),
    ):
        with pytest.raises(StoreUnavailableError, match="did not answer"):
            call()


def test_urls_for_whoever_has_no_credentials(subject: Subject, blob: Blob) -> None:
    subject.store.create("p/m/steps/000000.json", b"{}")
    if subject.ca is None:
        with pytest.raises(ConfigError, match="no URLs"):
            subject.store.presign(blob, 60)
        return
    context = ssl.create_default_context(cafile=subject.ca)
    for what, content in ((blob, b"weights"), ("p/m/steps/000000.json", b"{}")):
        with urlopen(subject.store.presign(what, 60), context=context) as answer:
            assert answer.read() == content
    with pytest.raises(NotFoundError):
        subject.store.presign("p/m/steps/000001.json", 60)
    with pytest.raises(ConfigError, match="604800"):
        subject.store.presign(blob, 8 * 86400)
