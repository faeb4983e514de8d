"""What `art-cloud up skypilot` adds to `sky launch` of the same task by hand, until a first token.

The real SkyPilot on a real Slurm on this machine; the node has art-cloud already. By hand: `sky
launch` with the task of launch/skypilot, the port read from what it prints, `ssh -N -L`, a request.

    make bench NAME=launch_overhead     (root, and Slurm: see tests/rigs/slurm_rig.py)
"""

from __future__ import annotations

import os
import re
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.rigs.namespaces import free_ports  # noqa: E402
from tests.rigs.slurm_rig import SlurmRig  # noqa: E402

ROUNDS = 3
POLL_SECONDS = 0.05
LISTENS = re.compile(r"listens on http://127\.0\.0\.1:(\d+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def ours(model: Path, store: Path) -> float:
    """Seconds until `up` has sampled its token."""
    art_cloud = [sys.executable, "-c", "from art_cloud.cli.main import main; main()"]
    options = ["gpu=H100", "cloud=slurm", f"python={sys.executable}"]
    started = time.perf_counter()
    subprocess.run(
        [
            *(*art_cloud, "up", "skypilot", "--name", "ours"),
            *("--model", str(model), "--store", store.as_uri()),
            *(part for option in options for part in ("-o", option)),
        ],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.perf_counter() - started
    subprocess.run([*art_cloud, "down", "ours"], stdout=subprocess.DEVNULL, check=True)
    return seconds


def by_hand(rig: SlurmRig, model: Path, store: Path) -> float:
    """Seconds until the server of a task that was launched by hand has sampled a token."""
    sky, token, [port] = str(Path(rig.python).parent / "sky"), secrets.token_hex(16), free_ports(1)
    arguments = f"--idle 3600 --store {store.as_uri()} --model {model}"
    started = time.perf_counter()
    launch = subprocess.Popen(
        [
            *(sky, "launch", "--yes", "--cluster", "hand", "--infra", "slurm", "--gpus", "H100"),
            *("--secret", "ART_CLOUD_TOKEN", "--env", f"ART_CLOUD_PYTHON={sys.executable}"),
            *("--env", f"ART_CLOUD_ARGUMENTS={arguments}", "launch/skypilot/server.yaml"),
        ],
        cwd=ROOT,
        env=os.environ | {"ART_CLOUD_TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launch.stdout is not None
    found = next(filter(None, (LISTENS.search(ANSI.sub("", line)) for line in launch.stdout)))
    config = rig.home / ".sky" / "generated" / "ssh" / "hand"
    keys = config.with_name("hand.config")
    keys.write_text(config.read_text().replace("~/", f"{rig.home}/"))  # ssh's ~ is not $HOME
    tunnel = subprocess.Popen(
        ["ssh", "-F", str(keys), "-N", "-L", f"{port}:127.0.0.1:{found[1]}", "hand"],
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(trust_env=False, timeout=60) as client:
            while True:
                try:
                    answer = client.post(
                        f"http://127.0.0.1:{port}/v1/completions",
                        headers={"Authorization": f"Bearer {token}"},
                        json={"model": str(model), "prompt": "1", "max_tokens": 1},
                    )
                    break
                except httpx.ConnectError:  # ssh does not listen yet
                    assert tunnel.poll() is None
                    time.sleep(POLL_SECONDS)
        answer.raise_for_status()
        return time.perf_counter() - started
    finally:
        for process in (tunnel, launch):
            process.terminate()
            process.wait()
        subprocess.run([sky, "down", "--yes", "hand"], stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1"}
    up, hand = [], []
    with tempfile.TemporaryDirectory() as name, SlurmRig(Path(name) / "rig") as rig:
        folder = Path(name)
        os.environ |= rig.environment | {"ART_CLOUD_HOME": str(folder / "art-cloud")}
        make_tiny_model(folder / "model")
        by_hand(rig, folder / "model", folder / "store")  # SkyPilot's own first time
        for _ in range(ROUNDS):
            up.append(ours(folder / "model", folder / "store"))
            hand.append(by_hand(rig, folder / "model", folder / "store"))
            print(f"art-cloud up {up[-1]:.1f} s, sky launch by hand {hand[-1]:.1f} s")
    report(
        "launch_overhead",
        ours=round(median(up), 1),
        peer=round(median(hand), 1),
        peer_name="sky launch, ssh -L and a request by hand",
        ratio=median(hand) / median(up),
        unit="s from the command to the first token, on Slurm",
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
