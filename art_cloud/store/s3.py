"""Steps in an S3 bucket, of AWS or of whatever speaks its protocol.

Endpoint, region and credentials are boto3's own settings: AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION,
AWS_PROFILE, AWS_CA_BUNDLE, ~/.aws. Every body is signed, so that the server checks its SHA-256 on
arrival, whichever newer checksums it knows or refuses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING
from uuid import uuid4

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from pydantic import SecretStr

from ..shared.errors import ConfigError, NotFoundError
from ..shared.version import __version__
from .base import (
    ABANDONED_SECONDS,
    SHA256,
    Blob,
    Moved,
    check_key,
    corrupt_blob,
    missing_blob,
    sha256_of,
    unwatched,
)
from .s3_errors import (
    BROKEN_BODY,
    LOST,
    MEANWHILE,
    NOT_THERE,
    REFUSED_CONDITION,
    Translator,
    check_whole,
    code_of,
)
from .s3_transfer import THREADS, S3Object, download, upload, uploads_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import (
        HeadObjectOutputTypeDef,
        ListObjectsV2OutputTypeDef,
        ObjectTypeDef,
    )

log = logging.getLogger(__name__)

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
WRITER = "art-cloud-writer"
"""Metadata of a key: which call wrote it."""
ATTEMPTS = 5
"""Tries of one request, with growing pauses: a store counts as away after about 15 s."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
RACERS, RACES = 16, 3
"""Writers that race for a key when a store is opened, and how often."""
RENEWED = timedelta(hours=1)
"""A blob that is younger is not made young again. Far below the grace of garbage collection."""
PRESIGN_SECONDS = 7 * 86400
"""The longest that S3 allows."""
UNTIL = "AWS_CREDENTIAL_EXPIRATION"


class S3Store:
    """`s3://bucket/prefix`. Raises `StoreError`s that name the endpoint and what was tried."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.bucket, prefix = parse_url(url)
        self.url = f"s3://{self.bucket}/{prefix}".rstrip("/")
        self.single_writer = False
        self._root = f"{prefix}/" if prefix else ""
        self._pool = ThreadPoolExecutor(THREADS, "s3")
        self._conditional = True
        # those that end, boto3 would give up minutes before, looking for newer ones in vain
        self._connect(os.environ if UNTIL in os.environ else {})
        self._check_present()
        if create:
            self._abort_abandoned()
            self._race()

    def _connect(self, credentials: Mapping[str, str]) -> None:
        """Without any credentials boto3 looks for its own."""
        self._errors = Translator(self.url, "the S3 endpoint")
        with self._errors("open the store"):
            session = boto3.Session(
                credentials.get("AWS_ACCESS_KEY_ID"),
                credentials.get("AWS_SECRET_ACCESS_KEY"),
                credentials.get("AWS_SESSION_TOKEN"),
            )
            client, once = (
                session.client(
                    "s3",
                    config=Config(
                        signature_version="s3v4",
                        retries={"mode": "standard", "total_max_attempts": attempts},
                        connect_timeout=CONNECT_SECONDS,
                        read_timeout=READ_SECONDS,
                        max_pool_connections=THREADS + RACERS,
                        request_checksum_calculation="when_required",
                        response_checksum_validation="when_required",
                        s3={"payload_signing_enabled": True},
                        user_agent_extra=f"art-cloud/{__version__}",
                    ),
                )
                for attempts in (ATTEMPTS, 1)
            )
        until = credentials.get(UNTIL)
        self.credentials_until = datetime.fromisoformat(until) if until else None
        self._errors = Translator(self.url, client.meta.endpoint_url)
        self._client: S3Client = client
        self._uploads = uploads_of(client)
        self._once: S3Client = once
        """For a request that must not be made again later than it was meant."""

    def renew(self, credentials: Mapping[str, SecretStr]) -> None:
        """Go on with these. What is under way ends with those before."""
        self._connect({name: value.get_secret_value() for name, value in credentials.items()})

    def read(self, key: str) -> bytes:
        name = self._key(key)
        with self._errors(f"read {key}"):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    got = self._client.get_object(Bucket=self.bucket, Key=name)
                    data = got["Body"].read()
                    check_whole(got.get("ContentLength"), len(data))
                    return data
                except BROKEN_BODY:
                    if attempt == ATTEMPTS:
                        raise
                except ClientError as error:
                    if code_of(error) != "NoSuchKey":
                        raise
                    raise self._no(key) from None
            raise AssertionError("unreachable")

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`. With `single_writer` it looks first, and of two that race both may
        be told that they won."""
        name, refusals = self._key(key), 0
        with self._errors(f"write {key}"):
            while True:
                conditional = self._conditional
                if self.single_writer and self._head(name) is not None:
                    return False
                try:
                    return self._put_if_absent(name, data, conditional)
                except ClientError as error:
                    if not conditional or code_of(error) not in REFUSED_CONDITION:
                        raise
                    refusals += 1
                    if self._refuses_conditions():
                        self._conditional = False
                        self._say_single_writer()
                    elif refusals == ATTEMPTS:
                        raise

    def _refuses_conditions(self) -> bool:
        """Whether the server takes a write, and not the same one with a condition: what says so
        once may be a proxy on the way."""
        name = self._key(f".probes/{uuid4().hex}")
        put = partial(self._client.put_object, Bucket=self.bucket, Key=name, Body=b"")
        put()
        try:
            put(IfNoneMatch="*")
        except ClientError as error:
            return code_of(error) in REFUSED_CONDITION
        finally:
            self._client.delete_object(Bucket=self.bucket, Key=name)
        return False

    def _put_if_absent(self, name: str, data: bytes, conditional: bool) -> bool:
        writer = uuid4().hex
        for attempt in range(1, ATTEMPTS + 1):
            put = partial(
                self._client.put_object,
                Bucket=self.bucket,
                Key=name,
                Body=data,
                Metadata={WRITER: writer},
            )
            try:
                put(IfNoneMatch="*") if conditional else put()
                return True
            except ClientError as error:
                if code_of(error) in LOST:  # perhaps to this very call, whose answer was lost
                    there = self._head(name)
                    return there is not None and there["Metadata"].get(WRITER) == writer
                if code_of(error) not in MEANWHILE or attempt == ATTEMPTS:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")

    def list(self, prefix: str) -> list[str]:
        with self._errors(f"list {prefix}"):
            check_key(prefix)
            start = len(self._root)
            return sorted(item["Key"][start:] for item in self._items(f"{self._root}{prefix}"))

    def delete(self, key: str) -> None:
        name = self._key(key)
        with self._errors(f"delete {key}"):
            if self._head(name) is None:
                self._check_present()
                raise self._no(key)
            self._client.delete_object(Bucket=self.bucket, Key=name)

    def put_blob(self, source: Path, moved: Moved = unwatched) -> Blob:
        with self._errors(f"store {source.name}"):
            blob = sha256_of(source)
            where = S3Object(self._client, self.bucket, self._blob(blob.sha256))
            if self.touch_blob(blob):
                moved(blob.size)
            else:
                upload(self._uploads, where, source, moved)
            return blob

    def touch_blob(self, blob: Blob) -> bool:
        with self._errors(f"look at blob {blob.sha256}"):
            return self._renew(self._blob(blob.sha256), blob.size)

    def get_blob(self, blob: Blob, target: Path, moved: Moved = unwatched) -> None:
        where = S3Object(self._client, self.bucket, self._blob(blob.sha256))
        staged = target.with_name(f"{target.name}.partial")
        try:
            with self._errors(f"fetch blob {blob.sha256}"):
                there = self._head(where.key)
                if there is None:
                    self._check_present()
                    raise missing_blob(self.url, blob.sha256)
                if there.get("ContentLength", blob.size) == blob.size:
                    download(where, staged, blob.size, self._pool, moved)
                if not staged.exists() or sha256_of(staged) != blob:
                    raise corrupt_blob(self.url, blob.sha256)
                staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)

    def blobs(self) -> Iterator[tuple[Blob, datetime]]:
        with self._errors("list the blobs"):
            for item in self._items(self._blob("")):
                name = item["Key"].rpartition("/")[2]
                if SHA256.fullmatch(name):
                    yield Blob(sha256=name, size=item["Size"]), item["LastModified"]

    def delete_blob(self, sha256: str, before: datetime) -> bool:
        """S3 has no "delete if it is as old as this": between the look and the deletion, which is
        tried once, a blob that is used again is lost. Who uses it looks again a few requests later,
        and stores it anew."""
        name = self._blob(sha256)
        with self._errors(f"delete blob {sha256}"):
            there = self._head(name)
            if there is None:
                self._check_present()
                raise self._no(f"blobs/{sha256}")
            if there["LastModified"] >= before:
                return False
            self._once.delete_object(Bucket=self.bucket, Key=name)
            return True

    def _renew(self, name: str, size: int) -> bool:
        """Make a blob that is over an hour old as young as a new one, by a copy onto itself within
        the store. False: it is not there, or not whole."""
        there = self._head(name)
        if there is None or there.get("ContentLength") != size:
            return False
        if datetime.now(UTC) - there["LastModified"] > RENEWED:
            try:
                self._client.copy_object(
                    Bucket=self.bucket,
                    Key=name,
                    CopySource={"Bucket": self.bucket, "Key": name},
                    MetadataDirective="REPLACE",
                )
            except ClientError as error:
                if code_of(error) in NOT_THERE:
                    return False
                raise
        return True

    def presign(self, what: str | Blob, seconds: int) -> str:
        if not 1 <= seconds <= PRESIGN_SECONDS:
            raise ConfigError(f"A URL can hold for 1 s to {PRESIGN_SECONDS} s, not {seconds} s.")
        key = f"blobs/{what.sha256}" if isinstance(what, Blob) else what
        name = self._key(key)
        with self._errors(f"presign {key}"):
            if self._head(name) is None:
                self._check_present()
                raise self._no(key)
            return self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self.bucket, "Key": name}, ExpiresIn=seconds
            )

    def _race(self) -> None:
        """Find out whether of writers that race for a key exactly one is told that it won."""
        for _ in range(RACES):
            key, start = f".probes/{uuid4().hex}", Barrier(RACERS)

            def race(number: int, key: str = key, start: Barrier = start) -> bool:
                start.wait()
                return self.create(key, str(number).encode())

            with ThreadPoolExecutor(RACERS) as racers:
                won = list(racers.map(race, range(RACERS)))
            self.delete(key)
            if won.count(True) > 1:
                self._say_single_writer()
            if self.single_writer:
                return

    def _say_single_writer(self) -> None:
        if not self.single_writer:
            log.warning(
                "%s: %s takes no conditional writes, or lets several writers win. Single-writer "
                "mode: two servers that train one model here are not told apart.",
                *(self.url, self._errors.endpoint),
            )
        self.single_writer = True

    def _abort_abandoned(self) -> None:
        """End uploads that nobody went on with for a day: their parts cost money."""
        day_ago = datetime.now(UTC) - timedelta(seconds=ABANDONED_SECONDS)
        with self._errors("look for abandoned uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._blob("")
            )
            for page in pages:
                for found in page.get("Uploads", []):
                    if found["Initiated"] < day_ago:
                        self._client.abort_multipart_upload(
                            Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )

    def _check_present(self) -> None:
        """That the bucket answers, and says so when asked for what lies under the prefix."""
        with self._errors("open the store"):
            self._of_bucket(
                self._client.list_objects_v2(Bucket=self.bucket, Prefix=self._root, MaxKeys=1)
            )

    def _head(self, name: str) -> HeadObjectOutputTypeDef | None:
        try:
            return self._client.head_object(Bucket=self.bucket, Key=name)
        except ClientError as error:
            if code_of(error) not in NOT_THERE:
                raise
            return None

    def _items(self, prefix: str) -> Iterator[ObjectTypeDef]:
        paginator = self._client.get_paginator("list_objects_v2")
        for page in paginator.paginate(Bucket=self.bucket, Prefix=prefix):
            yield from self._of_bucket(page).get("Contents", [])

    def _of_bucket(self, page: ListObjectsV2OutputTypeDef) -> ListObjectsV2OutputTypeDef:
        """The page, if it is one: what a proxy answers instead must not read as "empty"."""
        if page.get("Name") != self.bucket:
            raise ResponseParserError("no list of this bucket")
        return page

    def _no(self, key: str) -> NotFoundError:
        return NotFoundError(f"{self.url} holds no {key}.")

    def _key(self, key: str) -> str:
        return f"{self._root}{check_key(key)}"

    def _blob(self, sha256: str) -> str:
        return f"{self._root}blobs/{sha256}"


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://bucket/prefix`; the prefix without slashes at its ends."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if not BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            "A store in S3 is s3://bucket/prefix, with the name of a bucket and no . or .. in the "
            "prefix. Keys and endpoint belong into boto3's settings (AWS_PROFILE, "
            "AWS_ENDPOINT_URL_S3), not into the URL."
        )
    return bucket, prefix
