"""Checks of values that a user gave, and of addresses."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from .errors import ConfigError


def check_url(url: str) -> None:
    """Raises `ConfigError` if no server can be asked at `url`."""
    try:
        parsed = httpx.URL(url)
        is_web = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        is_web = False
    if not is_web:
        raise ConfigError(
            f"{url!r} is not the address of a server. Write it whole, as in http://127.0.0.1:8321."
        )


def is_loopback(url: str) -> bool:
    """Whether `url` is an address of this machine, which a proxy must not be asked for."""
    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


def complaint(error: ValidationError) -> str:
    """The first thing that a pydantic error says is wrong, and where."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
