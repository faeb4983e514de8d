"""Modal's servers that scale to zero: each cluster is a deployed app of `launch/modal/app.py`.

The app keeps its address while nothing runs. What is secret lies in a named Secret of Modal's,
beside the app and under its name, and is replaced on each start: a container gets the newest.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator

import modal
from modal.exception import NotFoundError as ModalNotFoundError
from modal.experimental import AppInfo, get_app_lifecycle, list_deployed_apps
from pydantic import SecretStr

from ....links.endpoint import Endpoint
from ....shared.errors import ConfigError
from ...install import LAUNCH, source
from ...spec import ClusterSpec, Instance, Which
from .. import kit
from .options import BY, EXTRAS, OWNER, PYTHON, Options, errors, owner_tags, taken

PREFIX = "art-serverless-"
LONGEST_NAME = 63 - len(PREFIX)
SERVER, REPLICA = "ArtServer", "ArtReplica"
LONGEST_WINDOW = 1200.0
"""Seconds without a request, at most, that Modal lets a container wait."""
PROXY_TOKEN = ("MODAL_PROXY_TOKEN_ID", "MODAL_PROXY_TOKEN_SECRET")
DEPLOY = """import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
from modal.__main__ import main
sys.argv = ["modal", "deploy", sys.argv[1]]
main()
"""
"""`modal deploy FILE`, which ends with the program that holds its standard input."""
POLL_SECONDS = 0.2


def proxy_headers() -> dict[str, SecretStr]:
    """What Modal's proxy asks for before a request reaches, or wakes, a server.

    Raises:
        ConfigError: there is no proxy token.
    """
    sent = [os.environ.get(variable) for variable in PROXY_TOKEN]
    if not all(sent):
        raise ConfigError(
            f"A serverless cluster is reached with a proxy token of your workspace: set "
            f"{' and '.join(PROXY_TOKEN)}. Make one: modal workspace proxy-tokens create"
        )
    return {
        header: SecretStr(value or "")
        for header, value in zip(("Modal-Key", "Modal-Secret"), sent, strict=True)
    }


async def launch(spec: ClusterSpec, options: Options, name: str) -> None:
    """Deploy the app, unless it is there: then only its secrets are renewed.

    Raises:
        ConflictError: there is one of that name that was deployed with another token.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name}: a serverless cluster's name has at most {LONGEST_NAME} letters."
        )
    there = await _find(name)
    await _check_owner(there, spec, name)
    with errors(f"deploy {name}"):
        secrets = dict(spec.server_environment())
        await modal.Secret.objects.create.aio(PREFIX + name, secrets, allow_existing=True)
        await modal.Secret.from_name(PREFIX + name).update.aio(secrets)
    if there is None:
        await _deploy(await _deployment(spec, options, name), name)
        await _check_owner(await _find(name), spec, name)  # another may have deployed it meanwhile


async def exists(name: str) -> bool:
    return await _find(name) is not None


async def _find(name: str) -> AppInfo | None:
    with errors("list the deployed apps"):
        found = [app for app in await list_deployed_apps.aio() if app.name == PREFIX + name]
    return found[0] if found else None


async def _tags(app: AppInfo) -> dict[str, str]:
    return await (await modal.App.lookup.aio(app.name)).get_tags.aio()


async def _check_owner(app: AppInfo | None, spec: ClusterSpec, name: str) -> None:
    if app is None:
        return
    with errors(f"look at {name}"):
        tags = await _tags(app)
    if tags.get(OWNER) != spec.owner:
        raise taken(name, tags.get(BY))


async def endpoint(name: str) -> Endpoint | None:
    """Where the server answers, awake or not; None if there is no such app."""
    with errors(f"reach {name}"):
        url, inference_url = [await _url(name, server) for server in (SERVER, REPLICA)]
    if url is None:
        return None
    headers = proxy_headers()
    return Endpoint(url=url, headers=headers, sleeps=True, inference_url=inference_url)


async def _url(name: str, server: str) -> str | None:
    try:
        return await modal.Server.from_name(PREFIX + name, server).get_url.aio()
    except ModalNotFoundError:
        return None


async def instances() -> list[Instance]:
    with errors("list the deployed apps"):
        return [
            await _instance(app)
            for app in await list_deployed_apps.aio()
            if app.name.startswith(PREFIX)
        ]


async def _instance(app: AppInfo) -> Instance:
    return Instance(
        name=app.name.removeprefix(PREFIX),
        provider="modal",
        state="running" if app.containers and await _trains(app.name) else "asleep",
        started_at=(await get_app_lifecycle.aio(app.app_id)).created_at,
        detail=f"{app.app_id}, containers: {app.containers}",
        identity=app.app_id,
        owner=(await _tags(app)).get(OWNER),
    )


async def _trains(app: str) -> bool:
    """Whether what runs of an app is the server that trains, or only replicas: to ask it how it
    does would wake it."""
    if await _url(app.removeprefix(PREFIX), REPLICA) is None:
        return True
    server = modal.Server.from_name(app, SERVER)
    return bool(await server._experimental_list_containers.aio())


async def terminate(name: str, only: Which | None = None) -> None:
    with errors(f"end {name}"):
        there = await _find(name)
        if there is not None:
            if only is not None and not only(await _instance(there)):
                return
            await (await modal.App.lookup.aio(PREFIX + name)).stop.aio()
        await modal.Secret.objects.delete.aio(PREFIX + name, allow_missing=True)
        while there and (left := await _find(name)) and left.app_id == there.app_id:
            await asyncio.sleep(POLL_SECONDS)


async def logs(name: str, *, follow: bool) -> AsyncIterator[str]:
    """Of all containers that the app has had."""
    with errors(f"read the log of {name}"):
        app = await modal.App.lookup.aio(PREFIX + name)
        entries = app.logs.stream.aio() if follow else app.logs.tail.aio(10_000)
        async for entry in entries:
            for line in entry.message.splitlines():
                yield line


async def _deployment(spec: ClusterSpec, options: Options, name: str) -> dict[str, object]:
    """The `Deployment` of app.py."""
    this = await asyncio.to_thread(source)
    awake = max(spec.lease_seconds, spec.idle_seconds)  # nobody renews a lease of what may sleep
    spec = spec.model_copy(update={"lease_seconds": awake})
    there = f"/wheels/{this.wheel.name}" if this.wheel else None
    return {
        "name": name,
        "tags": owner_tags(spec),
        "gpu": options.gpu,
        "flags": spec.server_arguments(name),
        "image": options.image,
        "requirement": this.requirement(EXTRAS, there),
        "wheel": str(this.wheel) if this.wheel else None,
        "python": PYTHON,
        "region": options.region,
        "cpu": options.cpu,
        "memory": options.memory,
        "until": time.time() + spec.cap_seconds if math.isfinite(spec.cap_seconds) else None,
        "window": int(min(spec.idle_seconds, LONGEST_WINDOW)),
        "replicas": options.replicas,
        "snapshot": options.snapshot,
    }


async def _deploy(deployment: dict[str, object], name: str) -> None:
    """What `modal deploy launch/modal/app.py` does, by the same program."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DEPLOY, str(LAUNCH / "modal" / "app.py")),
        env=os.environ | {"ART_CLOUD_DEPLOY": json.dumps(deployment)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.read()).decode(errors="replace")
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise kit.ended(f"Modal did not deploy {name}", said.splitlines(), "what it said")
