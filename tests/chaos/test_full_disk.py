"""A disk that is full at random moments, under the store and the journal: what is said is so."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

import art_cloud as art
from art_cloud.client.http import failure_of
from art_cloud.shared.errors import NotFoundError, StoreFullError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import CALL_ID, JobInfo
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.garbage import verify
from art_cloud.store.opening import open_store

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import batch

NAME = ModelName("full", "agent")
DISK_MIB = 96
ENDED_SECONDS = 240.0
Property = Callable[[str, object], None]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from art_server.tiny_model import make_tiny_model

    return str(make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here; test_bad_input.py limits files instead")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def filled(disk: Path, left: int) -> Iterator[None]:
    """Let the disk have about so many bytes left within the block."""
    with (disk / "ballast").open("wb") as file:
        try:
            size = 0
            while (free := _free(disk)) > left:
                try:
                    os.posix_fallocate(file.fileno(), size, free - left)
                    size += free - left
                except OSError:  # others write meanwhile
                    left += 4096
            yield
        finally:
            Path(file.name).unlink()


def _free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def try_again_soon() -> None:
    from art_server.steps import jobs, publishing

    jobs.RETRY_SECONDS = publishing.RETRY_SECONDS = 0.05


@pytest.mark.parametrize("durability", ["sync", "async"])
@pytest.mark.parametrize(
    "rounds", [10, pytest.param(250, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_an_answer_is_true_whenever_the_disk_is_full(
    disk: Path, base_model: str, durability: str, rounds: int, record_property: Property
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    server = ServerProcess(disk, "--durability", durability)
    server.prepare = try_again_soon
    rng, said = random.Random(seed), Counter[str]()
    with server:
        async with server.backend() as backend:
            model = art.TrainableModel(
                name=NAME.model,
                project=NAME.project,
                base_model=base_model,
                lora=art.LoRAConfig(rank=4),
            )
            await model.register(backend)
        async with server.http() as http:
            script = Script(server, http, disk)
            for _ in range(rounds):
                said[await script.round(rng)] += 1
        calls = Checkpoints(open_store(str(server.store)), NAME).calls()
        server.kill()
        server.start()
        assert Checkpoints(open_store(str(server.store)), NAME).calls() == calls
        async with server.http() as http:
            await Script(server, http, disk).make()
        assert server.terminate() == 0
    store = open_store(str(server.store))
    steps = Checkpoints(store, NAME)
    assert steps.steps() == list(range(len(script.made) + 2))
    assert len(steps.calls()) == len(script.made) + 2
    assert verify(store, [NAME])[1] == []
    assert "Traceback" not in server.output
    print(dict(said))
    for what, number in said.items():
        record_property(f"full disk: {what}", number)


class Script:
    """Trains `NAME`, a call in each round, and compares each answer with the store."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient, disk: Path) -> None:
        self.server = server
        self.http = http
        self.disk = disk
        self.made: dict[str, int] = {}
        self.seconds = 1.0
        """What the last undisturbed call took."""
        self._seed = 0

    async def round(self, rng: random.Random) -> str:
        """A call while the disk fills up, and its repeat if it came to nothing."""
        waits = rng.uniform(0, 1.2 * self.seconds), rng.uniform(0, 1.5 * self.seconds)
        left = rng.choice((0, 0, rng.randrange(1 << 18)))
        moment = rng.choice(("before the call", "once stored", "any", "any", "any"))
        call = uuid4().hex
        with ExitStack() as full:
            if moment == "before the call":
                full.enter_context(filled(self.disk, left))
            going = asyncio.create_task(self.train(call))
            if moment == "once stored":
                await self.until_stored(going)
            elif moment == "any":
                await asyncio.sleep(waits[0])
            if moment != "before the call":
                full.enter_context(filled(self.disk, left))
            await asyncio.wait([going], timeout=waits[1])
        await asyncio.wait([going])
        if (error := going.exception()) is not None:
            assert isinstance(error, StoreFullError), error
            assert "nothing was done" in str(error)
            with pytest.raises(NotFoundError):
                await self.job(call)
            outcome = "refused"
        else:
            info = going.result()
            outcome = info.state
        there = self.there()
        if outcome == "done":
            assert info.result is not None
            if info.result.durable:
                assert there[call] == info.result.step
            self.made[call] = info.result.step
            outcome = "done" if info.result.durable else "done, stored later"
        else:
            assert call not in there, outcome
            if outcome == "failed":
                assert info.error is not None
                assert info.error.code == "store_full", info.error
                outcome = "failed, no step"
        await self.make()
        return outcome

    async def until_stored(self, going: asyncio.Task[JobInfo]) -> None:
        """Until the manifest of the next step is there: the moment in which an answer may err."""
        manifest = self.server.store / str(NAME) / f"steps/{len(self.made) + 1:06d}.json"
        while not (manifest.exists() or going.done()):
            await asyncio.sleep(0.001)

    async def make(self) -> None:
        """A call while the disk has space: a step, and those before it are in the store."""
        began, call = time.monotonic(), uuid4().hex
        info = await self.train(call)
        assert info.state == "done", info.error
        assert info.result is not None
        self.seconds = time.monotonic() - began
        self.made[call] = info.result.step
        async with asyncio.timeout(ENDED_SECONDS):
            while not (await self.job(call)).durable:
                await asyncio.sleep(0.01)
        there = self.there()
        assert {made: there.get(made) for made in self.made} == self.made

    async def train(self, call: str) -> JobInfo:
        """The end of a call. Raises what it is refused with."""
        self._seed += 1
        body = encode_batch(batch(NAME, self._seed, groups=1, rewards=(0.0, 1.0), length=2))
        path, headers = f"/art/v1/models/{NAME}/train", {CALL_ID: call}
        sent = await self.http.post(path, content=body, headers=headers)
        if (failure := failure_of(sent)) is not None:
            raise failure
        async with asyncio.timeout(ENDED_SECONDS):
            while (info := await self.job(call)).state in ("queued", "running"):
                await self.http.get(f"/art/v1/jobs/{call}/events", timeout=ENDED_SECONDS)
        return info

    async def job(self, call: str) -> JobInfo:
        found = await self.http.get(f"/art/v1/jobs/{call}")
        if (failure := failure_of(found)) is not None:
            raise failure
        return JobInfo.model_validate_json(found.content)

    def there(self) -> dict[str, int]:
        return Checkpoints(open_store(str(self.server.store)), NAME).calls()
