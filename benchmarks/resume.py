"""From a bare machine to the first token of the newest version, its steps being in an S3 store.

`ours`: `art-server` with an empty disk, a client that registers the model, one token by its newest
step. The peer: the whole prefix of the model is brought by `aws s3 sync`, then transformers and
PEFT load base model and adapter in a fresh process and generate one token, as one does by hand.
Both have the base model on their disk. The store is moto, over https on this machine. In turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import report

sys.path.append(str(Path(__file__).parents[1]))

from art_server.tiny_model import make_tiny_model

import art_cloud as art
from tests.rigs.s3_servers import moto_server
from tests.rigs.synthetic import as_groups, batch

TOKEN = "bench"
BY_HAND = """
import json, sys
from pathlib import Path
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, folder, steps = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
newest = json.loads(max(steps.glob("*.json")).read_text())["files"]
adapter = folder / "adapter"
adapter.mkdir()
for path, blob in newest.items():
    if path.startswith("adapter/"):
        (folder / path).symlink_to(folder / "blobs" / blob["sha256"])
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
print(model.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=1))
"""


def start(folder: Path, store: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "art_server", "--state", folder / "state", "--store", store],
            env=os.environ | {"ART_CLOUD_TOKEN": TOKEN},
            stderr=log,
        )


async def connected(folder: Path, process: subprocess.Popen[bytes]) -> art.Backend:
    endpoint = folder / "state" / "endpoint.json"
    while not endpoint.exists():
        assert process.poll() is None, (folder / "log").read_text()
        await asyncio.sleep(0.005)
    return art.Backend(json.loads(endpoint.read_text())["url"], TOKEN)


def agent(base_model: Path) -> art.TrainableModel[None]:
    return art.TrainableModel(name="agent", project="bench", base_model=str(base_model))


async def make_steps(folder: Path, store: str, base_model: Path, steps: int) -> None:
    process = start(folder, store)
    async with await connected(folder, process) as backend:
        model = agent(base_model)
        await model.register(backend)
        for number in range(steps):
            whole = batch(model.full_name, number, groups=1)
            await backend.train(model, as_groups(whole), whole.config)
    process.terminate()
    process.wait()


async def ours(folder: Path, store: str, base_model: Path) -> float:
    started = time.perf_counter()
    process = start(folder, store)
    async with await connected(folder, process) as backend:
        model = agent(base_model)
        await model.register(backend)
        answer = await model.openai_client().completions.create(
            model=model.get_inference_name(), prompt=[1, 2, 3], max_tokens=1
        )
        seconds = time.perf_counter() - started
        assert answer.model.rpartition("@")[2] != "0"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return seconds


def by_hand(folder: Path, store: str, base_model: Path, aws: str) -> float:
    started = time.perf_counter()
    subprocess.run([aws, "s3", "sync", "--quiet", store, folder], check=True)
    command = [sys.executable, "-c", BY_HAND, base_model, folder, folder / "bench/agent/steps"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


async def main(rounds: int, steps: int, aws: str) -> None:
    found: dict[str, list[float]] = {"ours": [], "by hand": []}
    with tempfile.TemporaryDirectory() as name, moto_server(Path(name) / "moto") as server:
        folder, store = Path(name), "s3://bench/art"
        os.environ |= server.env
        server.client().create_bucket(Bucket="bench")
        base_model = make_tiny_model(folder / "model")
        await make_steps(folder / "first", store, base_model, steps)
        for number in range(rounds):
            found["ours"].append(await ours(folder / f"ours-{number}", store, base_model))
            hand = folder / f"hand-{number}"
            found["by hand"].append(by_hand(hand, store, base_model, aws))
    for label, seconds in found.items():
        print(label, [round(value, 2) for value in seconds], file=sys.stderr)
    report(
        "resume",
        ours=round(median(found["ours"]), 2),
        peer=round(median(found["by hand"]), 2),
        peer_name="aws s3 sync, then transformers and PEFT by hand",
        ratio=median(found["by hand"]) / median(found["ours"]),
        unit="s",
        steps=steps,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="in the store")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "ART_PROGRESS": "0"}
    found_aws = shutil.which("aws") or str(Path(sys.executable).with_name("aws"))
    asyncio.run(main(options.rounds, options.steps, found_aws))
