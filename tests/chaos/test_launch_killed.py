"""`kill -9` of `art-cloud up` and `art-cloud down` at every step of them: no ghost is left.

The program is walked through first, and every place from which it calls a function of its own is
noted. Then it is killed at each of these places in turn, by its own profiler; the product has no
hook for that. Each time `status` has to tell the truth, and `sweep` or `down` has to end it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.clusters.up import store_url
from art_cloud.shared.errors import NotFoundError

NAME = "walked"
UP = ("up", "local", "--name", NAME)
DOWN = ("down", NAME)
BEFORE, STARTING, LISTENING = 30, 4, 3
"""Kill points of `up` at most: before there is a process, before it listens, afterwards."""
ENDING = 20
"""Of `down`."""
WALKED = [
    *(
        f"art_cloud/clusters/{module}.py"
        for module in ("attached", "costs", "fleet", "registry", "spec", "timeline", "up")
    ),
    *(
        f"art_cloud/clusters/providers/{module}.py"
        for module in ("__init__", "kit", "local", "modal/sandbox")
    ),
    "launch/ssh/servers.py",
]

_context = multiprocessing.get_context("forkserver")


def call_of(frame: FrameType) -> str | None:
    """The place of a call of the walked modules: who is called, and from which line."""
    code, caller = frame.f_code, frame.f_back
    if not code.co_filename.endswith(tuple(WALKED)):
        return None
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}" if caller else ""
    return f"{where} > {Path(code.co_filename).name}:{code.co_qualname}"


def _main(
    home: Path, arguments: tuple[str, ...], point: str | None, environment: dict[str, str]
) -> None:
    """Run the command; with `point`, die there, else write down which there are."""
    from art_cloud.cli.main import main

    os.environ |= {"ART_CLOUD_HOME": str(home), "OMP_NUM_THREADS": "1"} | environment
    with (home / "out").open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    places: dict[str, None] = {}

    def walk(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (place := call_of(frame)):
            if place == point:
                os.kill(os.getpid(), signal.SIGKILL)
            places.setdefault(place)

    sys.argv = ["art-cloud", *arguments]
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        main()
    finally:
        sys.setprofile(None)
        (home / "places.json").write_text(json.dumps(list(places)))


class Walk:
    """One command, run again and again in a home of its own."""

    def __init__(
        self, home: Path, arguments: tuple[str, ...], environment: dict[str, str] | None = None
    ) -> None:
        self.home = home
        self.arguments = arguments
        self.environment = environment or {}
        self.killed = 0

    def run(self, point: str | None = None) -> int:
        process = _context.Process(
            target=_main, args=(self.home, self.arguments, point, self.environment)
        )
        process.start()
        process.join(120)
        assert process.exitcode is not None, "the command hangs"
        self.killed += process.exitcode == -signal.SIGKILL
        return process.exitcode

    def places(self, code: int = 0) -> list[str]:
        assert self.run() == code, (self.home / "out").read_text()
        found: list[str] = json.loads((self.home / "places.json").read_text())
        return found

    def processes(self) -> list[psutil.Process]:
        """What runs of the home's servers."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            ours = any(
                str(self.home / "clusters") in part for part in process.info["cmdline"] or []
            )
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    monkeypatch.setenv("ART_PROGRESS", "0")
    _context.set_forkserver_preload(["art_cloud.cli.main", "art_cloud.clusters.up", "psutil"])
    yield home
    left = Walk(home, ()).processes()
    for process in left:
        process.kill()
    assert left == []


def spread(places: list[str], count: int) -> list[str]:
    """`count` of them at most, evenly."""
    step = max(1.0, len(places) / count)
    return [places[int(number * step)] for number in range(min(count, len(places)))]


async def check_truth(walk: Walk) -> None:
    """`status` shows what runs, and shows it as running only then."""
    shown = await fleet.status()
    assert [one.name for one in shown] in ([], [NAME])
    exists = bool(walk.processes())
    says_so = any(one.state in ("starting", "running", "ending") for one in shown)
    assert says_so == exists, (shown, walk.processes())
    if exists:
        assert shown[0].recorded


async def sweep_all() -> None:
    """Ends what nobody leases; what has a lease stays, and `down` ends it."""
    found, failures = await sweep.look()
    assert failures == []
    for one in found:
        if one.kept is not None:
            assert "leased for" in one.kept
    await sweep.end([one for one in found if one.kept is None])
    for one in found:
        if one.kept is not None:
            await fleet.down(one.name)


async def down() -> None:
    try:
        await fleet.down(NAME)
    except NotFoundError:
        assert Registry().list() == []


async def orphans(walk: Walk) -> int:
    assert Registry().list() == []
    assert await fleet.status() == []
    return len(walk.processes())


def index(places: list[str], callee: str) -> int:
    return next(number for number, place in enumerate(places) if place.endswith(callee))


@pytest.mark.slow
async def test_up_killed_at_every_step(
    home: Path, record_property: Callable[[str, object], None]
) -> None:
    walk = Walk(home, UP)
    places = walk.places()
    await fleet.down(NAME)
    spawn = index(places, ":_spawn") + 1
    listens = index(places, "_handshake")
    points = [
        *spread(places[:spawn], BEFORE),
        *spread(places[spawn:listens], STARTING),
        *spread(places[listens:], LISTENING),
    ]
    left = 0
    for number, point in enumerate(points):
        walk.run(point)
        await check_truth(walk)
        await (sweep_all() if number % 2 else down())
        left += await orphans(walk)
    assert walk.killed > len(points) // 2
    record_property("kill points tried (up, down)", walk.killed)
    record_property("orphans found afterwards", left)
    assert left == 0


@pytest.mark.slow
async def test_down_killed_at_every_step(
    home: Path, record_property: Callable[[str, object], None]
) -> None:
    walk = Walk(home, DOWN)
    await start()
    places = walk.places()
    left = 0
    for number, point in enumerate(spread(places, ENDING)):
        if not walk.processes():
            await start()
        walk.run(point)
        await check_truth(walk)
        if number % 2:
            await sweep_all()
            left += await orphans(walk)
    await down()
    left += await orphans(walk)
    assert walk.killed > min(ENDING, len(places)) // 2
    record_property("kill points tried (up, down)", walk.killed)
    record_property("orphans found afterwards", left)
    assert left == 0


async def start() -> None:
    """A cluster whose server has just been started."""
    spec = ClusterSpec(provider="local", store=store_url("local", None))
    record, _ = Registry().claim(NAME, spec)
    await get_provider("local").launch(record.spec, NAME)
