"""Where a cluster can run: what every provider answers, and how one is found by name.

A provider is a class without constructor arguments, registered under the entry point group
`art_cloud.providers`. It keeps no record of its own: the client's registry holds the intent, and
`list` tells what really exists.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from ...shared.errors import ConfigError
from ..spec import Provider

ENTRY_POINTS = "art_cloud.providers"


def provider_names() -> list[str]:
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def get_provider(name: str) -> Provider:
    points = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    if not points:
        known = ", ".join(provider_names()) or "none: is art-cloud installed?"
        raise ConfigError(f"There is no provider {name!r}. Known are: {known}.")
    return _load(points[0])


def _load(point: EntryPoint) -> Provider:
    try:
        provider: Provider = point.load()()
    except ImportError as error:
        raise ConfigError(
            f"Provider {point.name!r} can't be loaded: {error}. If it is one of art-cloud's own, "
            f"install what it needs: pip install 'art-cloud[{point.name}]'."
        ) from error
    return provider
