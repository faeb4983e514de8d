"""`kill -9` of `art-cloud up modal`: what was started is found and ended, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_cloud.clusters import fleet
from art_cloud.clusters.registry import Registry

from ..rigs.modal_plane import ModalPlane, modal_plane
from .test_launch_killed import NAME, Walk, down, home, index, spread, sweep_all

__all__ = ["home"]

STARTING, ENDING = 7, 3
"""Kill points at most: until the sandbox is there, and while a launch that failed is cleared up."""

NO_STORE = "file:///proc/no-store-can-be-here"
"""The server ends at once."""


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    with modal_plane(tmp_path, monkeypatch) as plane:
        yield plane


@pytest.mark.slow
async def test_up_killed(
    home: Path,
    plane: ModalPlane,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    starts = ("up", "modal", "--name", NAME, "-o", "gpu=H100", "--store")
    walk = Walk(home, (*starts, NO_STORE), plane.environment)
    places = walk.places(code=1)
    waits, clears = (
        index(places, "sandbox.py:ModalProvider.endpoint"),
        index(places, "up.py:_end_ours"),
    )
    ends = Walk(home, walk.arguments, plane.environment)
    begins = Walk(home, (*starts, (tmp_path / "store").as_uri()), plane.environment)
    points = [(begins, point) for point in spread(places[: waits + 1], STARTING)]
    points += [(ends, point) for point in spread(places[clears:], ENDING)]
    left = 0
    for number, (one, point) in enumerate(points):
        one.run(point)
        shown = {found.name for found in await fleet.status() if found.state != "stopped"}
        assert shown >= {sandbox.definition.name for sandbox in plane.running}
        await (sweep_all() if number % 2 else down())
        assert Registry().list() == []
        assert await fleet.status() == []
        left += len(plane.running)
    assert begins.killed + ends.killed > len(points) // 2
    record_property("kill points tried (up, down)", begins.killed + ends.killed)
    record_property("orphans found afterwards", left)
    assert left == 0
