"""Killed and paused at random moments, over everything that is done with a store: nothing is lost.

Two servers and the tools of the command line work on one S3 store, and scripts register, train,
log, fork, remove, prune and move between the servers, while all of them are killed (`kill -9`),
paused (SIGSTOP) and told to end. On moto both servers run at once. Swift lets two writers that race
both win, so there the servers take turns at one address.

`make campaign` runs it: `ART_KILLS` says how many kills there are in all, `ART_SEED` which ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import art_cloud as art
from art_cloud.shared.errors import (
    ArtCloudError,
    ConflictError,
    NotFoundError,
    RivalError,
    ServerUnavailableError,
)
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.garbage import collect_garbage, find_garbage, models, verify
from art_cloud.store.opening import open_store
from art_cloud.store.retention import prune

from ..rigs.s3_servers import S3Server
from ..rigs.server_process import ServerProcess, _context
from ..rigs.synthetic import as_groups, batch
from ..rigs.waiting import until
from .faults import never_fail_a_killer

KILLS = int(os.environ.get("ART_KILLS", "200"))
SEED = int(os.environ.get("ART_SEED", time.time_ns() % (1 << 32)))
MODELS = 3
PATIENCE = 240.0
PROGRESS_SECONDS = 60.0
"""How long a kill waits for the scripts to get something done since the one before."""
GRACE = timedelta(seconds=120)
"""Of the garbage collections: longer than any step from its first blob to its manifest."""
TIMINGS = {"seconds", "tokens_per_second"}
Property = Callable[[str, object], None]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from art_server.tiny_model import make_tiny_model

    return str(make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=1))


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "kind", [pytest.param("swift", marks=pytest.mark.xdist_group("swift")), "moto"]
)
async def test_nothing_is_lost_and_nothing_is_doubled(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    base_model: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Property,
) -> None:
    s3: S3Server = request.getfixturevalue(kind)
    s3.use(monkeypatch)
    url = f"s3://{s3.make_bucket()}/art"
    rng = random.Random(f"{SEED} {kind}")
    print(f"\nART_SEED={SEED} ART_KILLS={KILLS} {kind}, {tmp_path}")
    campaign = Campaign(tmp_path, url, s3.env, rng, together=kind == "moto")
    try:
        await campaign.run(base_model, KILLS // 2)
    finally:
        campaign.end()
        print(f"{kind}: {dict(campaign.counts)}")
        for odd in campaign.odd:
            print(f"odd: {odd}")
    for what, number in campaign.counts.items():
        record_property(what, number)
    assert campaign.odd == []
    assert campaign.counts["steps acknowledged"]


def prepare() -> None:
    """In a server: a blob is renewed whenever it is used, since garbage is collected early here."""
    from art_server.steps import models, publishing

    from art_cloud.store import s3

    never_fail_a_killer()
    s3.RENEWED = timedelta(0)
    publishing.FIRST_PAUSE = 0.05
    models.FENCED_SECONDS = 1e6


def run_tool(tool: str, url: str, environment: dict[str, str], name: str, log: Path) -> None:
    """What a command of `art-cloud checkpoints` does, in a process of its own. Exit code 1: it
    failed, or found damage."""
    from art_cloud.store import s3

    os.environ |= environment
    never_fail_a_killer()
    s3.RENEWED = timedelta(0)
    try:
        store = open_store(url)
        if tool == "gc":
            collect_garbage(store, find_garbage(store, GRACE))
        elif tool == "verify":
            damage = verify(store, models(store))[1]
            assert damage == [], damage
        elif tool == "prune":
            prune(Checkpoints(store, ModelName.parse(name)), art.Retention(keep_last=3))
        else:
            assert tool == "fork", tool
            to = ModelName("forks", uuid4().hex)
            Checkpoints(store, ModelName.parse(name)).fork(to)
    except NotFoundError as error:  # nothing is there yet
        log.write_text(str(error))
    except BaseException:
        log.write_text(f"{tool} of {name}: {traceback.format_exc()}")
        sys.exit(1)


TOOLS = ("gc", "verify", "prune", "fork")


class Campaign:
    def __init__(
        self,
        folder: Path,
        url: str,
        environment: dict[str, str],
        rng: random.Random,
        *,
        together: bool,
    ) -> None:
        self.folder = folder
        self.url = url
        self.environment = environment
        self.rng = rng
        self.together = together
        self.counts: Counter[str] = Counter()
        self.odd: list[str] = []
        """What nobody expected."""
        self.actions = 0
        """What the scripts have done."""
        self.stopping = False
        self.servers = [ServerProcess(folder / name, "--name", name) for name in ("one", "two")]
        for server in self.servers:
            server.store_url, server.environment = url, environment
            server.prepare = prepare
        self.turn = 0

    async def run(self, base_model: str, kills: int) -> None:
        first, second = self.servers
        await asyncio.to_thread(first.start)
        second.port = first.port
        if self.together:
            second.port = 0
            await asyncio.to_thread(second.start)
        async with AsyncExitStack() as stack:
            scripts = []
            for number in range(MODELS):
                backends = [
                    await stack.enter_async_context(server.backend(patience=PATIENCE))
                    for server in (self.servers if self.together else [first])
                ]
                name = ModelName("kills", f"agent-{number}")
                scripts.append(Script(self, backends, name, base_model, self.rng.random()))
            working = [asyncio.create_task(script.run()) for script in scripts]
            tools = asyncio.create_task(self.use_tools())
            try:
                while self.counts["kills"] < kills and not self.odd:
                    await self.disturb()
                    for task in (*working, tools):
                        if task.done():
                            task.result()
                self.stopping = True
                await asyncio.gather(*working, tools)
            finally:
                self.stopping = True
                for task in (*working, tools):
                    task.cancel()
                await asyncio.gather(*working, tools, return_exceptions=True)
        for script in scripts:
            script.acknowledged |= script.provisional  # closing waited for them
        await self.check(scripts)

    async def disturb(self) -> None:
        """A kill, a pause or an end of a server, a while after the one before."""
        rng, wanted = self.rng, self.actions + self.rng.choice((0, 0, 1, 2, 4, 8))
        with suppress(AssertionError):
            await until(lambda: self.actions >= wanted or bool(self.odd), PROGRESS_SECONDS)
        await asyncio.sleep(rng.choice((0.1, 0.5, 2.0)) * rng.random())
        which = rng.randrange(2) if self.together else self.turn
        server = self.servers[which]
        if not server.process.is_alive():
            self.odd.append(f"server {which} ended by itself: {server.output[-2000:]}")
            return
        how = rng.random()
        if how < 0.25:
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.sleep(rng.choice((0.2, 1.0, 5.0)) * rng.random())
            os.kill(server.pid, signal.SIGCONT)
            self.counts["pauses"] += 1
            return
        if how < 0.4:
            server.process.terminate()
            self.counts["ends asked for"] += 1
            await asyncio.sleep(rng.random())
        await self.kill(server)
        if rng.random() < 0.3:
            shutil.rmtree(server.state, ignore_errors=True)
            self.counts["disks lost"] += 1
        if not self.together and rng.random() < 0.5:
            self.turn = 1 - self.turn
            server = self.servers[self.turn]
            self.counts["turns"] += 1
        if rng.random() < 0.15:  # while it starts
            server.launch()
            await asyncio.sleep(2 * rng.random())
            await self.kill(server)
        await asyncio.to_thread(server.start)

    async def kill(self, server: ServerProcess) -> None:
        await asyncio.to_thread(server.kill)
        self.counts["kills"] += 1

    async def use_tools(self) -> None:
        """The commands that look after a store, killed now and then."""
        rng, log = random.Random(self.rng.random()), self.folder / "tool.log"
        while not self.stopping:
            tool, name = rng.choice(TOOLS), f"kills/agent-{rng.randrange(MODELS)}"
            process = _context.Process(
                target=run_tool, args=(tool, self.url, self.environment, name, log)
            )
            process.start()
            try:
                if rng.random() < 0.4:
                    await asyncio.to_thread(process.join, 2 * rng.random())
                    if process.is_alive():
                        process.kill()
                        self.counts["kills"] += 1
                        self.counts[f"{tool} killed"] += 1
                await asyncio.to_thread(process.join)
            finally:
                process.kill()
            if process.exitcode == 1:
                self.odd.append(log.read_text())
            self.counts[tool] += process.exitcode == 0
            await asyncio.sleep(rng.random())

    async def check(self, scripts: list[Script]) -> None:
        """All servers start, and all that was acknowledged is there, once."""
        for server in self.servers if self.together else [self.servers[self.turn]]:
            server.kill()
            await asyncio.to_thread(server.start)
            assert "is not served" not in server.output, server.output
        store = open_store(self.url)
        for script in scripts:
            script.check(Checkpoints(store, script.name))
            model = script.models[0]
            async with self.servers[0 if self.together else self.turn].backend() as backend:
                await model.register(backend)
                newest = Checkpoints(store, script.name).steps()[-1]
                result = await backend.train(model, script.batch(0))
                assert result.step == newest + 1
                await backend.checkpoints(model).list()
        count, damage = verify(store, models(store))
        if damage:
            self.odd.append(f"damage: {damage}")
        for name in models(store):
            Checkpoints(store, name).infos()
            Checkpoints(store, name).history()
        self.counts["blobs verified"] = count
        self.counts["models"] = len(models(store))

    def end(self) -> None:
        for server in self.servers:
            if server._process is not None and server.process.is_alive():
                server.kill()


@dataclass
class Script:
    """Works on one model, and keeps what it was told."""

    campaign: Campaign
    backends: list[art.Backend]
    name: ModelName
    base_model: str
    seed: float
    acknowledged: dict[int, art.TrainResult] = field(default_factory=dict)
    """By the batch."""
    logged: dict[tuple[int, str], float] = field(default_factory=dict)
    forks: list[ModelName] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.at = 0
        self.batches = 0
        self.provisional: dict[int, art.TrainResult] = {}
        self.models = [
            art.TrainableModel(
                name=self.name.model,
                project=self.name.project,
                base_model=self.base_model,
                lora=art.LoRAConfig(rank=4),
            )
            for _ in self.backends
        ]

    @property
    def backend(self) -> art.Backend:
        return self.backends[self.at]

    @property
    def model(self) -> art.TrainableModel:
        return self.models[self.at]

    async def run(self) -> None:
        await self.model.register(self.backend)
        actions = {
            self.train: 12,
            self.log: 3,
            self.fork: 1,
            self.remove: 1,
            self.prune: 1,
            self.register: 1,
            **({self.move: 2, self.train_at_both: 1} if len(self.backends) > 1 else {}),
        }
        while not self.campaign.stopping:
            [action] = self.rng.choices(list(actions), list(actions.values()))
            try:
                await action()
                self.campaign.counts[action.__name__] += 1
                self.campaign.actions += 1
            except ServerUnavailableError as error:
                if "look before you repeat it" not in str(error):
                    self.odd(action.__name__, error)
            except RivalError as error:
                self.campaign.counts["rivals"] += 1
                if len(self.backends) == 1:
                    self.odd(action.__name__, error)
                self.provisional.clear()
                await self.register()
            except ArtCloudError as error:
                self.odd(action.__name__, error)

    def odd(self, what: str, error: Exception) -> None:
        self.campaign.odd.append(f"{what} of {self.name}: {type(error).__name__}: {error}")

    def batch(self, number: int) -> list[art.TrajectoryGroup]:
        groups = as_groups(batch(self.name, number, groups=1, rewards=(0.0, 1.0), length=2))
        for group in groups:
            for trajectory in group:
                trajectory.metrics["batch"] = number
        return groups

    async def train(self) -> None:
        await self.train_at(self.at)

    async def train_at(self, place: int) -> None:
        self.batches += 1
        number = self.batches
        result = await self.backends[place].train(self.models[place], self.batch(number))
        if result.durable:  # so are those before it
            self.acknowledged |= self.provisional | {number: result}
            self.provisional.clear()
        else:
            self.provisional[number] = result

    async def train_at_both(self) -> None:
        """Two trainers of one model: at most one of them wins each step."""
        await self.models[1 - self.at].register(self.backends[1 - self.at])
        for error in await asyncio.gather(
            self.train_at(0), self.train_at(1), return_exceptions=True
        ):
            if isinstance(error, RivalError):
                self.campaign.counts["rivals"] += 1
            elif isinstance(error, BaseException):
                raise error
        await self.register()

    async def move(self) -> None:
        """Go on at the other server."""
        self.at = 1 - self.at
        await self.register()

    async def register(self) -> None:
        await self.model.register(self.backend)

    async def log(self) -> None:
        step, value = await self.model.get_step(), self.rng.random()
        with suppress(NotFoundError):  # another's step was pruned meanwhile
            name = f"m{len(self.logged)}"
            await self.model.log(metrics={name: value}, step=step)
            self.logged[step, f"val/{name}"] = value

    async def fork(self) -> None:
        to = ModelName("forks", uuid4().hex)
        with suppress(NotFoundError):
            await self.backend.checkpoints(self.model).fork(str(to))
            self.forks.append(to)

    async def remove(self) -> None:
        steps = [info.step for info in await self.backend.checkpoints(self.model).list()]
        if len(steps) > 1:
            with suppress(NotFoundError, ConflictError):
                await self.backend.checkpoints(self.model).delete(self.rng.choice(steps[:-1]))

    async def prune(self) -> None:
        await self.backend.checkpoints(self.model).prune(art.Retention(keep_last=4))

    def check(self, steps: Checkpoints) -> None:
        counts = self.campaign.counts
        records = {manifest.step: manifest for manifest in steps.records()}
        made = [manifest for manifest in records.values() if manifest.kind == "train"]
        trained = Counter(int(manifest.metrics["trajectory/batch"]) for manifest in made)
        lost = [
            (number, result.step)
            for number, result in self.acknowledged.items()
            if not (there := records.get(result.step))
            or there.metrics["trajectory/batch"] != number
        ]
        doubled = [number for number, times in trained.items() if times > 1]
        assert sorted(records) == list(range(len(records)))
        assert len({manifest.call_id for manifest in made}) == len(made)
        if lost or doubled:
            self.campaign.odd.append(f"{self.name}: lost {lost}, doubled {doubled}")
        for number, result in self.acknowledged.items():
            if (number, result.step) not in lost:
                there = records[result.step].metrics
                assert comparable(there) == comparable(result.metrics)
        counts["steps acknowledged"] += len(self.acknowledged)
        counts["steps lost"] += len(lost)
        counts["steps doubled"] += len(doubled)
        shown: dict[int, dict[str, Any]] = {row["step"]: row for row in steps.history()}
        for (step, metric), value in self.logged.items():
            assert shown[step][metric] == value
        for fork in self.forks:
            assert Checkpoints(steps.store, fork).newest() is not None


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMINGS}
