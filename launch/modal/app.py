"""art-server on Modal, from zero: a request starts it, and after a while without any it ends.

One container trains. Where there are `replicas`, they answer completions, at an address of their
own: they read the steps from the store.

`art.up("modal", serverless=True, ...)` deploys this file. By hand: launch/modal/README.md.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field

import modal

VARIABLE = "ART_CLOUD_DEPLOY"
CACHE = "/cache"


@dataclass(frozen=True)
class Deployment:
    """What the variable `ART_CLOUD_DEPLOY` says, as JSON, here and in the container."""

    name: str = "mine"
    tags: dict[str, str] = field(default_factory=dict)
    """Of the app: by whose token it was deployed (half its SHA-256), and from where."""
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
    until: float | None = None
    """Unix time at which a server is ended that should have ended by then; None: never."""
    window: int = 300
    """Seconds without a request after which the container ends; Modal takes 1200 at most."""
    startup: int = 1200
    """Seconds until the server listens: weights may have to be downloaded."""
    port: int = 8321
    replicas: int = 0
    """Containers that answer completions beside the one that trains, at most."""
    concurrency: int = 32
    """Requests at once for one of them; with more, another starts."""
    snapshot: bool = False
    """Start from a memory snapshot of an art-server that has imported all it needs."""


here = Deployment(**json.loads(os.environ.get(VARIABLE, "{}")))
full_name = f"art-serverless-{here.name}"
app = modal.App(full_name, tags=here.tags)


def image() -> modal.Image:
    if here.image is not None:
        return modal.Image.from_registry(here.image)
    base = modal.Image.debian_slim(python_version=here.python)
    if here.wheel is not None and modal.is_local():
        base = base.add_local_file(here.wheel, f"/wheels/{os.path.basename(here.wheel)}", copy=True)
    return base.uv_pip_install(here.requirement)


server = functools.partial(
    app.server,
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
    enable_memory_snapshot=here.snapshot,
)


class Container:
    flags = here.flags

    @modal.enter(snap=here.snapshot)
    def prepare(self) -> None:
        command = ["art-server", "--wait", "--host", "0.0.0.0", "--port", str(here.port)]  # noqa: S104
        command += ["--state", "art-server", *self.flags]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.server.stdout is not None
        self.server.stdout.readline()

    @modal.enter()
    def start(self) -> None:
        """With the variables of now: what is secret may have changed since a snapshot."""
        self.ending = False
        assert self.server.stdin is not None
        with self.server.stdin as told:
            print(json.dumps(dict(os.environ)), file=told)
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        """The container goes when its server does, and at the time that is set for it."""
        left = None if here.until is None else max(0.0, here.until - time.time())
        try:
            self.server.wait(left)
        except subprocess.TimeoutExpired:
            self.server.kill()
        if not self.ending:
            os.kill(os.getpid(), signal.SIGTERM)

    @modal.exit()
    def stop(self) -> None:
        """Let the server finish or leave its step: what is in the store is whole."""
        self.ending = True
        self.server.terminate()
        self.server.wait()


@server(max_containers=1)  # a second trainer would be a rival of the first
class ArtServer(Container):
    pass


if here.replicas:

    @server(max_containers=here.replicas, target_concurrency=here.concurrency)
    class ArtReplica(Container):
        flags = [*here.flags, "--read-only"]
