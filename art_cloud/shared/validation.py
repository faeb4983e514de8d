"""Checks of values that a user gave, and of addresses."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import ConfigError


def check_url(url: str) -> None:
    """Raises `ConfigError` if no server can be asked at `url`."""
    import httpx

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
    import httpx

    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


def refused(what: str, error: ValidationError, kind: type[BaseModel]) -> ConfigError:
    """The error for options of `what` that are no `kind`; it names the options that there are, if
    one was not known or is missing."""
    sentence = f"{what}: {complaint(error, kind)}."
    if _first(error)["type"] in ("extra_forbidden", "missing"):
        sentence += f" Its options are: {', '.join(kind.model_fields)}."
    return ConfigError(sentence)


def complaint(error: ValidationError, kind: type[BaseModel] | None = None) -> str:
    """The first thing that is wrong, and where; without the value, which may be huge or secret.

    Args:
        kind: What it was to be: then the field is named that an unknown one may have meant.
    """
    first = _first(error)
    where = ".".join(map(str, first["loc"]))
    if kind is not None and first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        near = nearest(where, kind.model_fields)
        return f"{where}: not among its options" + (f" (did you mean {near}?)" if near else "")
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def nearest(name: str, known: Collection[str]) -> str | None:
    """That of the `known` which may have been meant: by its initials, or by most of its letters."""
    initials = [one for one in known if "".join(word[:1] for word in one.split("_")) == name]
    found = initials or get_close_matches(name, known, n=1, cutoff=0.4)
    return found[0] if found else None


def _first(error: ValidationError) -> Any:
    return error.errors(include_url=False, include_context=False, include_input=False)[0]
