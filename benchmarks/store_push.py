"""Seconds until a step of 200 MB in 5 files is durable in S3: ours, and `aws s3 sync`.

Both push the same new files over https to the same server, in turn, each to a place of its own;
each side's figure is that of its median round. The server is OpenStack Swift on this machine's
disk, one process for https: it shares the cores with both sides. Ours names each file by its
SHA-256, signs every part, and ends with the manifest. `ratio` is of what a person waits for, so it
has the start of the `aws` command in it; `ratio_without_start` is without, where the start is a
sync of an empty folder.

The second push has one of the five files changed: `again` says how many bytes each side sent, as a
proxy before the server counted them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import report

sys.path.insert(0, str(Path(__file__).parents[1]))

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store
from tests.rigs.fault_proxy import FaultProxy
from tests.rigs.s3_servers import S3Server, swift_server

FILES, FILE_BYTES = 5, 40_000_000
ROUNDS = 7
AWS = Path(sys.executable).with_name("aws")


def write_files(folder: Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.safetensors").write_bytes(os.urandom(FILE_BYTES))


def draft(step: int) -> Manifest:
    return Manifest(
        project="benchmarks",
        model="push",
        step=step,
        kind="train",
        call_id=str(step),
        parent=None,
        base_model="none",
        lora=LoRAConfig(),
        versions={},
    )


def sync(folder: Path, target: str) -> None:
    subprocess.run([AWS, "s3", "sync", "--only-show-errors", folder, target], check=True)


def measure(server: S3Server, scratch: Path) -> None:
    bucket = server.make_bucket()
    taken: dict[str, list[float]] = {"ours": [], "peer": [], "start": []}
    again = {}
    with FaultProxy(server.endpoint_url) as proxy:
        steps = Checkpoints(
            open_store(f"s3://{bucket}/ours", create=True), ModelName("benchmarks", "push")
        )
        (scratch / "empty").mkdir()
        folder = scratch / "step"
        pushes: dict[str, Callable[[int], object]] = {
            "ours": lambda step: steps.commit(draft(step), folder),
            "peer": lambda step: sync(folder, f"s3://{bucket}/peer/{step}"),
            "start": lambda step: sync(scratch / "empty", f"s3://{bucket}/peer/{step}"),
        }
        for step in range(ROUNDS):
            write_files(folder)
            sides = list(pushes)
            for side in sides[step % 2 :] + sides[: step % 2]:
                start = time.perf_counter()
                pushes[side](step)
                taken[side].append(time.perf_counter() - start)
            shutil.rmtree(folder)
            print({side: round(values[-1], 2) for side, values in taken.items()}, flush=True)
        write_files(folder)
        for side in ("ours", "peer"):
            pushes[side](ROUNDS)
        (folder / "0.safetensors").write_bytes(os.urandom(FILE_BYTES))
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        there = Checkpoints(open_store(f"s3://{bucket}/ours"), steps.name)
        there.commit(draft(ROUNDS + 1), folder)
        again["ours"] = proxy.bytes_up
        pushes["peer"](ROUNDS)
        again["peer"] = proxy.bytes_up - again["ours"]
    ours, peer, bare = (statistics.median(taken[side]) for side in ("ours", "peer", "start"))
    report(
        "store_push",
        ours=round(ours, 3),
        peer=round(peer, 3),
        peer_name="aws s3 sync",
        ratio=peer / ours,
        unit="seconds to durable, 200 MB in 5 files",
        ratio_without_start=round((peer - bare) / ours, 2),
        megabytes_per_second=round(FILES * FILE_BYTES / 1e6 / ours),
        rounds=ROUNDS,
        server="OpenStack Swift, https, one node on this machine",
        again=again,
    )


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        swift_server(Path(scratch) / "swift") as server,
    ):
        os.environ.update(server.env)
        measure(server, Path(scratch))


if __name__ == "__main__":
    main()
