"""Large objects in parts, several at once, each gone on with where it broke."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError
from s3transfer.utils import ReadFileChunk

from .s3_errors import BROKEN_BODY, DAMAGED, check_whole, code_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

    from .base import Moved

T = TypeVar("T")

THREADS = 8
PART = 64 << 20
"""Bytes of a part that is sent; S3 takes 5 MiB to 5 GiB, and 10,000 parts. Each costs the server
more than its bytes."""
RANGE = 16 << 20
"""Bytes that are asked for at once."""
MOST_PARTS = 10_000
CHUNK = 1 << 20
BREAKS = 5
"""How often in a row a range may break without a byte of progress."""


@dataclass(frozen=True)
class S3Object:
    client: S3Client
    bucket: str
    key: str


def upload(where: S3Object, source: Path, size: int, pool: Executor, moved: Moved) -> None:
    """Put a file's content. What an earlier call of the same key and size left unfinished, in this
    process or another, is gone on with: whoever names keys by content may do so."""
    if size <= PART:
        _undamaged(
            lambda: where.client.put_object(
                Bucket=where.bucket, Key=where.key, Body=_slice(source, 0, size, moved)
            ),
            *(size, moved),
        )
        return
    part_bytes = max(PART, -(-size // MOST_PARTS))
    sizes = {
        number: min(part_bytes, size - start)
        for number, start in enumerate(range(0, size, part_bytes), 1)
    }
    try:
        _multipart(where, source, sizes, _unfinished(where, sizes), pool, moved)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":
            raise
        moved(-size)  # another process finished or aborted it
        _multipart(where, source, sizes, _begin(where), pool, moved)


def _multipart(
    where: S3Object,
    source: Path,
    sizes: dict[int, int],
    begun: tuple[str, dict[int, str]],
    pool: Executor,
    moved: Moved,
) -> None:
    upload_id, tags = begun
    moved(sum(sizes[number] for number in tags))

    def send(number: int) -> None:
        start = (number - 1) * sizes[1]
        sent = _undamaged(
            lambda: where.client.upload_part(
                Bucket=where.bucket,
                Key=where.key,
                UploadId=upload_id,
                PartNumber=number,
                Body=_slice(source, start, sizes[number], moved),
            ),
            *(sizes[number], moved),
        )
        tags[number] = sent["ETag"]

    _each(pool, send, sizes.keys() - tags.keys())
    parts: list[CompletedPartTypeDef] = [
        {"PartNumber": number, "ETag": tags[number]} for number in sizes
    ]
    where.client.complete_multipart_upload(
        Bucket=where.bucket,
        Key=where.key,
        UploadId=upload_id,
        MultipartUpload={"Parts": parts},
    )


def _undamaged(send: Callable[[], T], size: int, moved: Moved) -> T:
    """Send so many bytes again if the server says that they did not arrive as they were signed."""
    for _ in range(BREAKS - 1):
        try:
            return send()
        except ClientError as error:
            if code_of(error) not in DAMAGED:
                raise
            moved(-size)
    return send()


def _slice(source: Path, start: int, size: int, moved: Moved) -> Any:
    """A body that is read when it is sent."""
    if not size:
        return b""

    def told(bytes_transferred: int) -> None:
        moved(bytes_transferred)

    return ReadFileChunk.from_filename(str(source), start, size, callbacks=[told])


def _begin(where: S3Object) -> tuple[str, dict[int, str]]:
    begun = where.client.create_multipart_upload(Bucket=where.bucket, Key=where.key)
    return begun["UploadId"], {}


def _unfinished(where: S3Object, sizes: dict[int, int]) -> tuple[str, dict[int, str]]:
    """An open upload of this key and the tags of its parts of these sizes; a new one if none is."""
    uploads = where.client.list_multipart_uploads(Bucket=where.bucket, Prefix=where.key)
    open_ids = [
        (found["Initiated"], found["UploadId"])
        for found in uploads.get("Uploads", [])
        if found["Key"] == where.key
    ]
    if not open_ids:
        return _begin(where)
    upload_id = max(open_ids)[1]
    pages = where.client.get_paginator("list_parts").paginate(
        Bucket=where.bucket, Key=where.key, UploadId=upload_id
    )
    return upload_id, {
        part["PartNumber"]: part["ETag"]
        for page in pages
        for part in page.get("Parts", [])
        if sizes.get(part["PartNumber"]) == part["Size"]
    }


def download(where: S3Object, target: Path, size: int, pool: Executor, moved: Moved) -> None:
    """Write an object of this size to a new file. Its content is not checked here."""
    with target.open("wb") as file:
        file.truncate(size)
        descriptor = file.fileno()

        def fetch(start: int) -> None:
            end, breaks = min(start + RANGE, size), 0
            while start < end:
                before = start
                try:
                    ranged = f"bytes={start}-{end - 1}"
                    got = where.client.get_object(Bucket=where.bucket, Key=where.key, Range=ranged)
                    for chunk in got["Body"].iter_chunks(CHUNK):
                        os.pwrite(descriptor, chunk, start)
                        start += len(chunk)
                        moved(len(chunk))
                    check_whole(end - before, start - before)
                except BROKEN_BODY:
                    breaks = breaks + 1 if start == before else 1
                    if breaks == BREAKS:
                        raise
                    time.sleep(0.1 * 2**breaks)

        _each(pool, fetch, range(0, size, RANGE))


def _each(pool: Executor, work: Callable[[int], None], items: Iterable[int]) -> None:
    """Do all in the pool; returns or raises when none of it runs any more."""
    futures: list[Future[None]] = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
