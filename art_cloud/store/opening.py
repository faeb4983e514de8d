"""The store that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..shared.errors import ConfigError
from .base import Store
from .files import FileStore


def open_store(url: str, *, create: bool = False) -> Store:
    """Open `s3://bucket/prefix` or `file:///folder`; a plain path means a folder too.

    `create` is for whoever writes: it makes a folder that is absent (never a bucket), removes what
    killed writers left, and finds out whether `create` has one winner (`single_writer`).
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from .s3 import S3Store

        return S3Store(url, create=create)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)), create=create)
    if not parts.scheme:
        return FileStore(Path(url).expanduser(), create=create)
    raise ConfigError(
        f"store {url!r}: no store of kind {parts.scheme!r} in this version. Use "
        "s3://bucket/prefix, file:///a/folder or a path. Google's buckets speak S3 too, with "
        "AWS_ENDPOINT_URL_S3=https://storage.googleapis.com and an HMAC key."
    )
