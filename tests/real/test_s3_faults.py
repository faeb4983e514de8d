"""What can go wrong on the way to a bucket: told apart, outlasted where that helps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import botocore.auth
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from urllib3 import HTTPResponse

from art_cloud.shared.errors import (
    ConfigError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from art_cloud.store.base import Blob
from art_cloud.store.s3 import S3Store

from ..rigs.fault_proxy import NONE, Certificate, Fault, FaultProxy
from ..rigs.s3_servers import S3Server, moto_server
from ..rigs.waiting import wait_until

pytestmark = pytest.mark.xdist_group("swift")

MIB = 1 << 20
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
NOT_IMPLEMENTED = b"<Error><Code>NotImplemented</Code></Error>"
FULL = b"<Error><Code>QuotaExceeded</Code></Error>"
HTML = b"<html>Please log in to this hotel's network</html>"


def http(status: str, body: bytes) -> Fault:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return Fault(answer=f"{head}\r\nConnection: close\r\n\r\n".encode() + body)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cloud.store.s3.ATTEMPTS", 2)
    monkeypatch.setattr("art_cloud.store.s3.READ_SECONDS", 3)
    monkeypatch.setattr("art_cloud.store.s3_transfer.BREAKS", 2)
    monkeypatch.setattr("art_cloud.store.s3_transfer.PART", 5 * MIB)
    monkeypatch.setattr("art_cloud.store.s3_transfer.RANGE", 5 * MIB)


@pytest.fixture
def proxy(swift: S3Server) -> Iterator[FaultProxy]:
    """Swift, behind a network that sees through TLS."""
    with FaultProxy(
        swift.endpoint_url, Certificate(swift.ca, swift.certificate, swift.key)
    ) as proxy:
        yield proxy


@pytest.fixture
def store(swift: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    swift.use(monkeypatch, AWS_ENDPOINT_URL=proxy.url)
    return S3Store(f"s3://{swift.make_bucket()}/art")


def put(store: S3Store, folder: Path, content: bytes) -> Blob:
    source = folder / "source"
    source.write_bytes(content)
    return store.put_blob(source)


def once(proxy: FaultProxy, fault: Fault) -> None:
    """Of the connections from now on, the first one has it."""
    proxy.cut()
    first = proxy.connections
    proxy.fault = lambda number: fault if number == first else NONE


def always(proxy: FaultProxy, fault: Fault) -> None:
    proxy.cut()
    proxy.fault = lambda number: fault


def raised(kind: type[StoreError], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (http("503 Slow Down", SLOW_DOWN), StoreUnavailableError, "overloaded or failing"),
        (http("500 Internal Server Error", b""), StoreUnavailableError, "overloaded or failing"),
        (http("404 Not Found", HTML), StoreUnavailableError, "no S3 server"),
        (http("200 OK", HTML), StoreUnavailableError, "AWS_ENDPOINT_URL_S3"),
        (http("400 Bad Request", EXPIRED), StoreAccessError, "have expired"),
        (http("507 Insufficient Storage", FULL), StoreFullError, "no space left"),
        (Fault(refuse=True), StoreUnavailableError, "the connection broke"),
        (Fault(cut_down=0), StoreUnavailableError, "the connection broke"),
        (Fault(cut_down=20), StoreUnavailableError, "is no S3 server"),
        (Fault(stall_down=0), StoreUnavailableError, "too slow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_none_is_told_apart(
    store: S3Store, proxy: FaultProxy, fault: Fault, kind: type[StoreError], words: str
) -> None:
    store.create("p/m/steps/000000.json", b"{}")
    always(proxy, fault)
    raised(kind, lambda: store.list("p/m/steps/"), "Could not list p/m/steps/", words)
    always(proxy, NONE)
    assert store.list("p/m/steps/") == ["p/m/steps/000000.json"]


@pytest.mark.parametrize(
    "fault",
    [
        http("503 Slow Down", SLOW_DOWN),
        http("500 Internal Server Error", b""),
        Fault(refuse=True),
        Fault(cut_up=100),
        Fault(cut_down=0),
        Fault(stall_down=0),
        Fault(delay=0.1),
    ],
    ids=["503", "500", "refused", "cut up", "cut down", "stalled", "delayed"],
)
def test_what_passes_by_is_outlasted(
    store: S3Store, proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    once(proxy, fault)
    assert store.create("p/m/steps/000000.json", b"{}")
    once(proxy, fault)
    assert store.read("p/m/steps/000000.json") == b"{}"
    once(proxy, fault)
    blob = put(store, tmp_path, b"weights")
    once(proxy, fault)
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"


def test_an_answer_cut_within_its_headers_is_none(store: S3Store, proxy: FaultProxy) -> None:
    store.create("key", b"content")
    once(proxy, Fault(cut_down=20))
    assert store.read("key") == b"content"


def test_a_win_whose_answer_was_lost_is_a_win(store: S3Store, proxy: FaultProxy) -> None:
    once(proxy, Fault(cut_down=0))
    assert store.create("p/m/steps/000000.json", b"mine")
    once(proxy, Fault(cut_down=0))
    assert not store.create("p/m/steps/000000.json", b"mine")


def test_a_conflict_under_way_is_waited_for(store: S3Store, proxy: FaultProxy) -> None:
    once(proxy, http("409 Conflict", CONFLICT))
    assert store.create("key", b"mine")


def test_conditions_that_are_refused_once_are_made_again(store: S3Store, proxy: FaultProxy) -> None:
    """Somebody on the way refuses one; the server does not."""
    once(proxy, http("501 Not Implemented", NOT_IMPLEMENTED))
    assert store.create("key", b"first")
    assert not store.single_writer
    assert not store.create("key", b"second")
    assert store.read("key") == b"first"
    assert store.list("") == ["key"]
    always(proxy, http("501 Not Implemented", NOT_IMPLEMENTED))
    raised(StoreUnavailableError, lambda: store.create("other", b""), "NotImplemented")
    assert not store.single_writer


def refuse_conditions(request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
    """What a server answers that knows none; all else goes on to the real one."""
    if "If-None-Match" not in request.headers:
        return None
    body = HTTPResponse(BytesIO(NOT_IMPLEMENTED), preload_content=False)
    return AWSResponse(str(request.url), 501, {}, body)  # type: ignore[arg-type]


def test_conditions_that_are_refused_mean_a_single_writer(
    store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    store._client.meta.events.register("before-send.s3.PutObject", refuse_conditions)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda key: store.create(f"race/{key}", b""), range(4)))
    assert store.create("key", b"first")
    assert store.single_writer
    assert "takes no conditional writes" in caplog.text
    assert not store.create("key", b"second")
    assert store.read("key") == b"first"


def test_content_damaged_on_the_way_up_is_sent_again(
    store: S3Store, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(100_000)
    once(proxy, Fault(damage_up=50_000))
    blob = put(store, tmp_path, content)
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    monkeypatch.setattr("art_cloud.store.s3_transfer.BREAKS", 1)
    once(proxy, Fault(damage_up=50_000))
    raised(StoreUnavailableError, lambda: put(store, tmp_path, content[1:]), "damaged on its way")
    assert [blob.size for blob, _ in store.blobs()] == [100_000]


def test_a_download_goes_on_where_it_broke(
    store: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    content = os.urandom(4 * MIB)
    blob = put(store, tmp_path, content)
    proxy.bytes_down = 0
    always(proxy, Fault(cut_down=3 * MIB // 2))
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    assert proxy.bytes_down < len(content) + MIB


@pytest.mark.parametrize("fault", [Fault(refuse=True), Fault(stall_down=100)])
def test_a_download_that_never_ends_leaves_nothing(
    store: S3Store, proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    content = os.urandom(11 * MIB)
    blob = put(store, tmp_path, content)
    folder = tmp_path / "fetched"
    folder.mkdir()
    moved: list[int] = []

    def worse(count: int) -> None:
        if not moved:
            always(proxy, fault)
        moved.append(count)

    raised(StoreUnavailableError, lambda: store.get_blob(blob, folder / "t", worse), blob.sha256)
    assert 0 < sum(moved) < blob.size
    assert list(folder.iterdir()) == []


def test_a_full_disk_here_is_not_blamed_on_the_store(store: S3Store, tmp_path: Path) -> None:
    blob = put(store, tmp_path, bytes(2 * MIB))
    folder = tmp_path / "fetched"
    folder.mkdir()
    with largest_file(MIB):
        raised(
            StoreFullError,
            lambda: store.get_blob(blob, folder / "target"),
            "no space left on this machine",
        )
    assert list(folder.iterdir()) == []
    store.get_blob(blob, folder / "target")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


UPLOADER = """
import sys
from pathlib import Path
from art_cloud.store import s3_transfer
from art_cloud.store.s3 import S3Store
url, source = sys.argv[1:]
s3_transfer.PART = 5 << 20
s3_transfer.THREADS = 2
print("ready", flush=True)
S3Store(url).put_blob(Path(source))
"""


def test_an_upload_whose_process_was_killed_is_begun_anew(
    store: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 * MIB))
    always(proxy, Fault(stall_up=6 * MIB))
    uploader = subprocess.Popen(
        [sys.executable, "-c", UPLOADER, store.url, str(source)], stdout=subprocess.PIPE
    )
    try:
        assert uploader.stdout is not None
        assert uploader.stdout.readline() == b"ready\n"
        wait_until(lambda: stored_parts(store) > 0)
    finally:
        uploader.send_signal(signal.SIGKILL)
        uploader.communicate()
    assert stored_parts(store) > 0
    always(proxy, NONE)
    moved: list[int] = []
    blob = store.put_blob(source, moved.append)
    assert sum(moved) == 20 * MIB
    store.get_blob(blob, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def stored_parts(store: S3Store) -> int:
    """Of the upload that is open."""
    client = store._client
    found = client.list_multipart_uploads(Bucket=store.bucket).get("Uploads", [])
    if not found:
        return 0
    parts = client.list_parts(
        Bucket=store.bucket, Key=found[0]["Key"], UploadId=found[0]["UploadId"]
    )
    return len(parts.get("Parts", []))


def test_an_upload_that_was_aborted_meanwhile_is_begun_anew(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(11 * MIB))
    client, finish = store._client, store._client.complete_multipart_upload
    aborted = []

    def complete(**call: Any) -> Any:
        if not aborted:
            aborted.append(call["UploadId"])
            client.abort_multipart_upload(**{k: call[k] for k in ("Bucket", "Key", "UploadId")})
        return finish(**call)

    monkeypatch.setattr(client, "complete_multipart_upload", complete)
    assert store.put_blob(source) in [blob for blob, _ in store.blobs()]
    assert aborted


def test_no_bucket_no_name_no_credentials_no_trust(
    swift: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[StoreError], *words: str, url: str = store.url, **env: str) -> None:
        swift.use(monkeypatch, **env)
        for name in [name for name, value in env.items() if not value]:
            monkeypatch.delenv(name)
        raised(kind, lambda: S3Store(url, create=True), *words)

    refused(StoreUnavailableError, "aws s3 mb s3://no-bucket", url="s3://no-bucket/art")
    refused(
        StoreUnavailableError, "its name is not known", AWS_ENDPOINT_URL="https://nowhere.invalid"
    )
    refused(StoreUnavailableError, "no connection", AWS_ENDPOINT_URL="https://127.0.0.1:9")
    refused(StoreError, "AWS_CA_BUNDLE", AWS_CA_BUNDLE="")
    refused(StoreAccessError, "no credentials", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    refused(StoreAccessError, "no credentials", AWS_SECRET_ACCESS_KEY="")
    refused(StoreAccessError, "AWS_PROFILE", AWS_PROFILE="nobody")
    refused(StoreAccessError, "does not accept", AWS_SECRET_ACCESS_KEY="not-the-secret")


@pytest.mark.parametrize("url", ["s3://", "s3:///art", "s3://k:secret@bucket/art", "s3://b/../c"])
def test_a_url_that_names_no_bucket(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix") as caught:
        S3Store(url)
    assert "secret" not in str(caught.value)


def test_a_clock_that_is_wrong(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime

    def hour_ago(**options: Any) -> datetime:
        return cast(datetime, now(**options)) - timedelta(hours=1)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", hour_ago)
    raised(StoreError, lambda: store.list(""), "this machine's clock")


READER = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject"], "Resource": "*"}


def test_wrong_keys_and_missing_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with moto_server(tmp_path / "moto") as moto:
        url = f"s3://{moto.make_bucket()}/art"
        moto.use(monkeypatch)
        S3Store(url).create("p/m/steps/000000.json", b"{}")
        access_key, secret_key = moto.make_user("reader", READER)
        moto.check_access()
        messages = []

        def refused(call: Callable[[S3Store], object], *words: str, **env: str) -> None:
            moto.use(monkeypatch, **{"AWS_ACCESS_KEY_ID": access_key} | env)
            with pytest.raises(StoreAccessError) as caught:
                call(S3Store(url))
            messages.append(str(caught.value))
            assert all(word in messages[-1] for word in words), messages[-1]

        def read(store: S3Store) -> bytes:
            return store.read("p/m/steps/000000.json")

        good = {"AWS_SECRET_ACCESS_KEY": secret_key}
        moto.use(monkeypatch, AWS_ACCESS_KEY_ID=access_key, **good)
        assert read(S3Store(url)) == b"{}"
        refused(read, "does not accept", AWS_SECRET_ACCESS_KEY="wrong-secret")
        refused(read, "does not accept", AWS_ACCESS_KEY_ID="AKIAWRONG")
        refused(read, "expired", AWS_SESSION_TOKEN="old", **good)
        refused(lambda store: store.create("key", b""), "write key", "s3:PutObject", url, **good)
        refused(lambda store: store.delete("p/m/steps/000000.json"), "s3:DeleteObject", **good)
        refused(lambda store: put(store, tmp_path, b"x"), "s3:PutObject", **good)
        refused(lambda store: put(store, tmp_path, bytes(6 * MIB)), "s3:PutObject", **good)
        refused(lambda store: S3Store(url, create=True), "s3:ListBucketMultipartUploads", **good)
    said = "\n".join([*messages, caplog.text])
    for secret in (secret_key, access_key, "wrong-secret", "AKIAWRONG"):
        assert secret not in said
