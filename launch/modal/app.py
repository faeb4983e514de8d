"""art-server on Modal, from zero: a request starts it, and after a while without any it ends.

`art.up("modal", serverless=True, ...)` deploys this file. By hand: launch/modal/README.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from dataclasses import asdict, dataclass, field

import modal

VARIABLE = "ART_CLOUD_DEPLOY"
CACHE = "/cache"


@dataclass(frozen=True)
class Deployment:
    """What the variable `ART_CLOUD_DEPLOY` says, as JSON, here and in the container."""

    name: str = "mine"
    gpu: str = "H100"
    flags: list[str] = field(default_factory=list)
    """Of `art-server`."""
    image: str | None = None
    """A registry's image that has art-server; None: one is built that has `requirement`."""
    requirement: str = "art-cloud[server,vllm]"
    wheel: str | None = None
    """A file of this machine that `requirement` names, in /wheels."""
    python: str = "3.12"
    region: str | None = None
    cpu: float | None = None
    memory: int | None = None
    """MiB."""
    window: int = 300
    """Seconds without a request after which the container ends; Modal takes 1200 at most."""
    startup: int = 1200
    """Seconds until the server listens: weights may have to be downloaded."""
    port: int = 8321


here = Deployment(**json.loads(os.environ.get(VARIABLE, "{}")))
full_name = f"art-serverless-{here.name}"
app = modal.App(full_name)


def image() -> modal.Image:
    if here.image is not None:
        return modal.Image.from_registry(here.image)
    base = modal.Image.debian_slim(python_version=here.python)
    if here.wheel is not None and modal.is_local():
        base = base.add_local_file(here.wheel, f"/wheels/{os.path.basename(here.wheel)}", copy=True)
    return base.uv_pip_install(here.requirement)


@app.server(
    image=image(),
    gpu=here.gpu,
    compute_region=here.region,
    cpu=here.cpu,
    memory=here.memory,
    env={VARIABLE: json.dumps(asdict(here)), "HF_HOME": f"{CACHE}/huggingface"},
    secrets=[modal.Secret.from_name(full_name)],  # ART_CLOUD_TOKEN, and what the store needs
    volumes={CACHE: modal.Volume.from_name("art-cloud-cache", create_if_missing=True)},
    port=here.port,
    startup_timeout=here.startup,
    scaledown_window=here.window,
    max_containers=1,  # one trainer: a second server would be a rival of the first
)
class ArtServer:
    @modal.enter()
    def start(self) -> None:
        command = ["art-server", "--host", "0.0.0.0", "--port", str(here.port)]  # noqa: S104
        command += ["--state", "art-server", *here.flags]
        self.ending = False
        self.server = subprocess.Popen(command)
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        """The container goes when its server does."""
        self.server.wait()
        if not self.ending:
            os.kill(os.getpid(), signal.SIGTERM)

    @modal.exit()
    def stop(self) -> None:
        """Let the server finish or leave its step: what is in the store is whole."""
        self.ending = True
        self.server.terminate()
        self.server.wait()
