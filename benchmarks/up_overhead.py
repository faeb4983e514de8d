"""What `art-cloud up` adds to starting a server, against `art-server` by hand and polled.

Both load the same model and sample a first token. What the server itself takes (its start, the
model) is in both; the difference is what provider, registry, handshake and phases take. The warm
start finds the cluster that runs already.

    make bench NAME=up_overhead
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
from art_server.tiny_model import make_tiny_model
from harness import report

import art_cloud as art

ROUNDS = 5
POLL_SECONDS = 0.05


async def ours(model: Path) -> tuple[float, float]:
    """Seconds of a cold start, and of one that finds the cluster."""
    started = time.perf_counter()
    async with art.up("local", base_model=str(model)):
        cold = time.perf_counter() - started
        started = time.perf_counter()
        async with art.up("local"):
            warm = time.perf_counter() - started
    return cold, warm


def by_hand(model: Path, folder: Path) -> float:
    """Seconds until a server that was started by hand has sampled a token."""
    token = secrets.token_hex(16)
    started = time.perf_counter()
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "art_server", "--model", str(model)),
            *("--state", str(folder / "state"), "--store", str(folder / "store")),
        ],
        env=os.environ | {"ART_CLOUD_TOKEN": token},
        stderr=subprocess.DEVNULL,
    )
    try:
        endpoint = folder / "state" / "endpoint.json"
        while not endpoint.exists():
            assert server.poll() is None
            time.sleep(POLL_SECONDS)
        url = json.loads(endpoint.read_text())["url"]
        answer = httpx.post(
            f"{url}/v1/completions",
            headers={"Authorization": f"Bearer {token}"},
            json={"model": str(model), "prompt": "1", "max_tokens": 1},
            trust_env=False,
            timeout=60,
        )
        answer.raise_for_status()
        return time.perf_counter() - started
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "ART_PROGRESS": "0"}
    cold, warm, hand = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ART_CLOUD_HOME"] = str(folder / "home")
        make_tiny_model(folder / "model")
        for number in range(ROUNDS):
            found = asyncio.run(ours(folder / "model"))
            cold.append(found[0])
            warm.append(found[1])
            hand.append(by_hand(folder / "model", folder / str(number)))
            print(f"up {cold[-1]:.2f} s, again {warm[-1]:.2f} s, by hand {hand[-1]:.2f} s")
    ratio = median(hand) / median(cold)
    report(
        "up_overhead",
        ours=round(median(cold), 3),
        peer=round(median(hand), 3),
        peer_name="art-server started by hand and polled",
        ratio=ratio,
        unit="s from start to first token",
        overhead_seconds=round(
            median(ours - peer for ours, peer in zip(cold, hand, strict=True)), 3
        ),
        warm_seconds=round(median(warm), 3),
    )


if __name__ == "__main__":
    main()
