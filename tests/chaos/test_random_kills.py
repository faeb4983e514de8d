"""Killed and paused at random moments, over everything that is done with a store: nothing is lost.

Two servers, one with durability sync and one with async, and the tools of the command line work on
one S3 store, and scripts register, train, log, fork, remove, prune and move between the servers,
while all of them are killed (`kill -9`), paused (SIGSTOP) and told to end. On moto both servers run
at once. Swift lets two writers that race both win, so there the servers take turns at one address.

`art-cloud sweep` sees them all, as clusters of this machine that others started. Beside them
it sees one of its own that has a lease, and launches that broke off. Only those it may end.

`make campaign` runs it: `ART_KILLS` says how many kills there are in all, `ART_SEED` which ones.
"""

from __future__ import annotations

import asyncio
import json
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
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import art_cloud as art
from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.providers import local
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec
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
from ..rigs.server_process import ServerProcess, _context, show_as
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
LEASED = "leased"
"""The cluster that is in use."""
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
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    url = f"s3://{s3.make_bucket()}/art"
    rng = random.Random(f"{SEED} {kind}")
    print(f"\nART_SEED={SEED} ART_KILLS={KILLS} {kind}, {tmp_path}")
    environment = s3.env | {"ART_CLOUD_HOME": str(tmp_path / "home")}
    campaign = Campaign(tmp_path, url, environment, rng, together=kind == "moto")
    try:
        await campaign.run(base_model, KILLS // 2)
    finally:
        campaign.end()
        await campaign.end_clusters()
        print(f"{kind}: {dict(campaign.counts)}")
        for odd in campaign.odd:
            print(f"odd: {odd}")
    for what, number in campaign.counts.items():
        record_property(what, number)
    assert campaign.odd == []
    assert campaign.counts["steps acknowledged"]


def prepare(state: Path) -> None:
    """In a server: it looks as if it had been started by its own command. A blob is renewed
    whenever it is used, since garbage is collected early here."""
    from art_server.steps import models, publishing

    from art_cloud.store import s3

    show_as("art-server", "--state", str(state))
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


def run_sweep(environment: dict[str, str], log: Path) -> None:
    """`art-cloud sweep --yes --json`, in a process of its own."""
    from typer.testing import CliRunner

    from art_cloud.cli.main import app

    os.environ |= environment
    local.ENDING_SECONDS = 1.0
    sweep.ANSWER_SECONDS = 120.0
    done = CliRunner().invoke(app, ["sweep", "--yes", "--json"])
    if done.exit_code != 0:
        log.write_text(f"sweep: {done.output} {done.exception!r}")
        sys.exit(1)
    log.write_text(done.stdout)


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
        self.servers = [
            ServerProcess(folder / name, "--name", name, "--durability", durability)
            for name, durability in (("one", "sync"), ("two", "async"))
        ]
        for name, server in zip(("one", "two"), self.servers, strict=True):
            server.state = folder / "home/clusters" / name
            server.store_url, server.environment = url, environment
            server.prepare = partial(prepare, server.state)
        self.turn = 0
        self.ghosts: set[str] = set()
        """The names of launches that broke off."""

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
            working.append(asyncio.create_task(self.use_tools()))
            working.append(asyncio.create_task(self.use_sweep(base_model)))
            try:
                while self.counts["kills"] < kills and not self.odd:
                    await self.disturb()
                    for task in working:
                        if task.done():
                            task.result()
                self.stopping = True
                await asyncio.gather(*working)
                for script in scripts:
                    await script.settle_all()
            finally:
                self.stopping = True
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
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
            await self.see_through(tool, process, log, 2 * rng.random())
            await asyncio.sleep(rng.random())

    async def see_through(self, tool: str, process: BaseProcess, log: Path, seconds: float) -> bool:
        """Wait for a tool, or kill it after so long. Whether it came to its end."""
        try:
            if self.rng.random() < 0.4:
                await asyncio.to_thread(process.join, seconds)
                if process.is_alive():
                    process.kill()
                    self.counts["kills"] += 1
                    self.counts[f"{tool} killed"] += 1
            await asyncio.to_thread(process.join)
        finally:
            process.kill()
        if process.exitcode == 1:
            self.odd.append(await asyncio.to_thread(log.read_text))
        self.counts[tool] += process.exitcode == 0
        return process.exitcode == 0

    async def use_sweep(self, base_model: str) -> None:
        """Have launches break off, and swept, beside a cluster that is trained on all the time."""
        rng, log = random.Random(self.rng.random()), self.folder / "sweep.log"
        store = (self.folder / "leased-store").as_uri()
        async with art.up("local", name=LEASED, store=store, lease="4h", idle="4h", keep=True):
            pass
        address, [(_, pid)] = await fleet.address(LEASED), await running(LEASED)
        model = art.TrainableModel(
            name="agent", project=LEASED, base_model=base_model, lora=art.LoRAConfig(rank=4)
        )
        async with art.Backend(address["url"], address["token"], patience=PATIENCE) as backend:
            await model.register(backend)
            while not self.stopping:
                for _ in range(rng.randrange(3)):
                    await self.break_off_a_launch(rng)
                ghosts = set(self.ghosts)
                process = _context.Process(target=run_sweep, args=(self.environment, log))
                process.start()
                seeing = asyncio.create_task(
                    self.see_through("sweep", process, log, 8 * rng.random())
                )
                while not seeing.done():
                    made = await backend.train(model, as_groups(batch(model.full_name, 1)))
                    self.counts["steps of the leased one"] = made.step
                    await asyncio.sleep(2 * rng.random())
                    if rng.random() < 0.2:
                        os.kill(pid, signal.SIGSTOP)
                        await asyncio.sleep(4 * rng.random())
                        os.kill(pid, signal.SIGCONT)
                if await seeing:
                    await self.check_sweep(ghosts, json.loads(log.read_text())["ended"])
            assert await running(LEASED) == [("running", pid)]
            assert made.step == await model.get_step()

    async def break_off_a_launch(self, rng: random.Random) -> None:
        """As `up` does that is killed once its server's process is there: that never listens, or is
        gone too."""
        name = f"ghost-{uuid4().hex[:8]}"
        spec = ClusterSpec(provider="local", store=(self.folder / "none").as_uri())
        record, _ = Registry().claim(name, spec)
        self.ghosts.add(name)
        if rng.random() < 0.2:
            return
        await local.LocalProvider().launch(record.spec, name)
        for _, pid in await running(name):
            os.kill(pid, rng.choice((signal.SIGSTOP, signal.SIGKILL)))

    async def check_sweep(self, ghosts: set[str], ended: list[str]) -> None:
        """All that were there when it began are ended, and nothing else."""
        left = {name for name in ghosts if await running(name) or Registry().get(name)}
        others = set(ended) - self.ghosts - {server.state.name for server in self.servers}
        if left or others:
            self.odd.append(f"sweep left {left}, and ended {others}")
        self.counts["ghosts swept"] += len(ghosts & set(ended))

    async def end_clusters(self) -> None:
        for record in Registry().list():
            await fleet.end(record, ask=False)
        for instance in await local.LocalProvider().list():
            self.odd.append(f"left: {instance}")
            await local.LocalProvider().terminate(instance.name)
        receipts = Counter(receipt.name for receipt in Registry().receipts())
        if receipts != Counter({LEASED: 1} | dict.fromkeys(self.ghosts, 1)):
            self.odd.append(f"receipts: {receipts}")

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
        self.provisional: list[dict[int, art.TrainResult]] = [{} for _ in self.backends]
        """What was made at each server, and is not known to be durable."""
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
                await self.start_again()
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
        self.provisional[place][number] = result
        if result.durable:
            self.acknowledge(place)

    def acknowledge(self, place: int) -> None:
        """The last step that was made there is durable, and so are those before it."""
        self.acknowledged |= self.provisional[place]
        self.campaign.counts["steps served first"] += sum(
            not result.durable for result in self.provisional[place].values()
        )
        self.provisional[place].clear()

    async def settle(self, place: int) -> None:
        """As the end of a backend does: wait until all that was made there is durable."""
        calls, name = self.backends[place]._calls, self.models[place].full_name
        while calls._kept[name]:
            await calls._see_durable(name)
        self.acknowledge(place)

    async def settle_all(self) -> None:
        for place in range(len(self.backends)):
            try:
                await self.settle(place)
            except RivalError:
                self.campaign.counts["rivals"] += 1
                self.provisional[place].clear()

    async def start_again(self) -> None:
        """Go on from what is there, after a rival."""
        for made in self.provisional:
            made.clear()
        with suppress(RivalError):  # of what was on its way
            return await self.register()
        await self.register()

    async def train_at_both(self) -> None:
        """Two trainers of one model: at most one of them wins each step."""
        await self.models[1 - self.at].register(self.backends[1 - self.at])
        results = await asyncio.gather(self.train_at(0), self.train_at(1), return_exceptions=True)
        await self.settle_all()
        for error in results:
            if isinstance(error, RivalError):
                self.campaign.counts["rivals"] += 1
            elif isinstance(error, BaseException):
                raise error
        await self.start_again()

    async def move(self) -> None:
        """Go on at the other server."""
        await self.settle(self.at)
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


async def running(name: str) -> list[tuple[str, int]]:
    """The states and the process ids of what runs here under that name."""
    there = [one for one in await local.LocalProvider().list() if one.name == name]
    return [(one.state, int(one.detail.removeprefix("pid "))) for one in there]


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMINGS}
