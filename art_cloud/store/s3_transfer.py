"""Large objects in parts, several at once.

Uploads are boto3's: each part is tried several times, and an upload that fails, or whose process is
killed, is begun anew. Downloads are ours: boto3 begins a broken range from its start, so over a
network that cuts connections after some megabytes it would never end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from boto3.s3.transfer import ProgressCallbackInvoker, TransferConfig, create_transfer_manager
from botocore.exceptions import ClientError

from .s3_errors import BROKEN_BODY, DAMAGED, check_whole, code_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from s3transfer.manager import TransferManager

    from .base import Moved

THREADS = 8
PART = 64 << 20
"""Bytes of a part that is sent. Each costs the server more than its bytes."""
RANGE = 16 << 20
"""Bytes that are asked for at once."""
CHUNK = 1 << 20
BREAKS = 5
"""How often in a row a range may break without a byte of progress, or an upload be begun anew."""
AGAIN = (*DAMAGED, "NoSuchUpload")
"""What an upload is begun anew after: it was damaged on its way, or somebody aborted it."""


@dataclass(frozen=True)
class S3Object:
    client: S3Client
    bucket: str
    key: str


def uploads_of(client: S3Client) -> TransferManager:
    """What uploads, several parts of several files at once."""
    config = TransferConfig(
        multipart_threshold=PART + 1,
        multipart_chunksize=PART,
        max_concurrency=THREADS,
        preferred_transfer_client="classic",
    )
    return create_transfer_manager(client, config)


def upload(uploads: TransferManager, where: S3Object, source: Path, moved: Moved) -> None:
    """Put a file's content."""
    for attempt in range(1, BREAKS + 1):
        sent: list[int] = []

        def told(count: int, sent: list[int] = sent) -> None:
            sent.append(count)
            moved(count)

        progress = ProgressCallbackInvoker(told)
        try:
            uploads.upload(str(source), where.bucket, where.key, subscribers=[progress]).result()
            return
        except ClientError as error:
            if code_of(error) not in AGAIN or attempt == BREAKS:
                raise
            moved(-sum(sent))


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
