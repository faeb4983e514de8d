"""What a durable step costs the trainer: seconds a step, with an S3 store and with none.

The same steps of a rank-8 adapter three times, in turns: stored before the job is done ("sync"),
stored behind it ("async"), and not stored at all, which is the peer. The store is moto, over https
on this machine, on a core of its own: an S3 server is no part of a trainer's machine. All three
sides have another core, and one only, trainer and store's threads together. Steps follow each other
without a rollout in between, so "async" has only the next step's training to hide behind; with
rollouts there is more. `ours` is "async". `async_cpu` and `sync_cpu` are the processor's time that
a step takes more than without a store, as shares of a step. All costs are medians over the rounds,
each compared with its own round; `load` is the machine's, at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from harness import report

sys.path.append(str(Path(__file__).parents[1]))

from art_server.steps.runtime import Runtime, Settings
from art_server.tiny_model import make_tiny_model

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import Durability, JobInfo, JobKind, RegisterRequest
from art_cloud.shared.wire import encode_batch
from art_cloud.store.base import Blob
from art_cloud.store.checkpoints import Checkpoints, Manifest
from tests.rigs.s3_servers import S3Server, moto_server
from tests.rigs.synthetic import batch

NAME = ModelName("bench", "agent")


class Nowhere(Checkpoints):
    """Steps that are kept by nobody."""

    def upload(self, folder: Path, watch: Any = None) -> dict[str, Blob]:
        return {}

    def create(self, manifest: Manifest, folder: Path | None = None) -> Manifest:
        return manifest

    def newest(self) -> Manifest | None:
        return None

    def find(self, step: int) -> Manifest | None:
        return None

    def calls(self) -> dict[str, int]:
        return {}


class Side:
    """A trainer and an engine of their own, in this process."""

    def __init__(self, folder: Path, store: str, durability: Durability, *, keep: bool) -> None:
        folder.mkdir()
        self.runtime = Runtime(
            Settings(state=folder, store=store, durability=durability, max_bytes=1 << 30)
        )
        if not keep:
            self.runtime.models.checkpoints = (  # type: ignore[method-assign]
                lambda name: Nowhere(self.runtime.store, name)
            )
        self.seconds: list[float] = []
        self.processor: list[float] = []

    async def call(self, kind: JobKind, body: bytes) -> None:
        job = JobInfo(
            id=uuid4().hex, kind=kind, project=NAME.project, model=NAME.model, state="running"
        )
        await self.runtime.programs.run(job, body, lambda data: None)

    async def burst(self, bodies: list[bytes]) -> None:
        """Steps one after the other; what the last one leaves behind is not counted."""
        started, worked = time.perf_counter(), time.process_time()
        for body in bodies:
            await self.call("train", body)
        self.seconds.append((time.perf_counter() - started) / len(bodies))
        self.processor.append((time.process_time() - worked) / len(bodies))
        await self.runtime.models.until_durable(NAME)


def more(ours: list[float], none: list[float]) -> float:
    """How much more than none, as a share: the median of the rounds, without the first."""
    return median(a / b for a, b in zip(ours[1:], none[1:], strict=True)) - 1


@contextmanager
def apart(folder: Path) -> Iterator[S3Server]:
    """An S3 server on another core than this process."""
    mine, *others = sorted(os.sched_getaffinity(0))
    assert others, "two cores are needed"
    os.sched_setaffinity(0, others[:1])  # what is started now inherits it
    with moto_server(folder) as server:
        os.sched_setaffinity(0, [mine])
        yield server


async def main(rounds: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name, apart(Path(name) / "moto") as server:
        folder = Path(name)
        os.environ |= server.env
        server.client().create_bucket(Bucket="bench")
        model = make_tiny_model(folder / "model", hidden_size=512, layers=4)
        request = RegisterRequest(base_model=str(model), lora=LoRAConfig(rank=8))
        sides = {
            "sync": Side(folder / "sync", "s3://bench/sync", "sync", keep=True),
            "async": Side(folder / "async", "s3://bench/async", "async", keep=True),
            "none": Side(folder / "none", str(folder / "unused"), "sync", keep=False),
        }
        for side in sides.values():
            await side.call("register", request.model_dump_json().encode())
        bodies = [encode_batch(batch(NAME, n, groups=4, length=120)) for n in range(steps)]
        for _ in range(rounds + 1):
            for side in sides.values():
                await side.burst(bodies)
        size = sum(blob.size for blob in sides["sync"].runtime.models.newest(NAME).files.values())
        for side in sides.values():
            await side.runtime.close()
    seconds = {label: median(side.seconds[1:]) for label, side in sides.items()}  # one to warm up
    none = sides["none"]
    slower = {label: more(side.seconds, none.seconds) for label, side in sides.items()}
    busier = {label: more(side.processor, none.processor) for label, side in sides.items()}
    for label, side in sides.items():
        print(label, [round(value, 3) for value in side.seconds[1:]], file=sys.stderr)
        print(f"{label}, CPU", [round(value, 3) for value in side.processor[1:]], file=sys.stderr)
    report(
        "store_step",
        ours=round(seconds["async"], 3),
        peer=round(seconds["none"], 3),
        peer_name="no store",
        ratio=1 / (1 + slower["async"]),
        unit="s/step",
        sync=round(seconds["sync"], 3),
        async_cost=round(slower["async"], 3),
        sync_cost=round(slower["sync"], 3),
        async_cpu=round(busier["async"], 3),
        sync_cpu=round(busier["sync"], 3),
        step_megabytes=round(size / 1e6, 1),
        cores="one for trainer and store's threads, another for the S3 server",
        load=round(os.getloadavg()[0], 1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="in each turn of a side")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(main(options.rounds, options.steps))
