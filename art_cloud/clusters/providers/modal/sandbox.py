"""Modal: the server as a named sandbox, which ends when the server does.

A sandbox lives in the Modal app "art-cloud" under the cluster's name and with its tags, so it is
found from any machine of the same workspace. A name is one for the whole workspace, so the tags
also say by whose token it was started, and from where. It is reached over Modal's TLS tunnel; the
server asks for the cluster's token on every route. (Modal's connect tokens would take the
Authorization header, where OpenAI clients send their key.)

Source of what Modal does: https://modal.com/docs/guide/sandboxes and .../sandbox-networking.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import requires
from typing import Any, Literal

import modal
from modal.exception import AlreadyExistsError, ExecutionError
from modal.exception import Error as ModalError
from modal.exception import NotFoundError as ModalNotFoundError
from modal.exception import TimeoutError as ModalTimeoutError

from ....links.endpoint import Endpoint
from ....shared.errors import ConfigError, LaunchError, NotFoundError
from ...install import source
from ...spec import Check, ClusterSpec, Instance, Offer, Which
from .. import kit
from . import serverless
from .options import BY, EXTRAS, OWNER, PYTHON, Options, errors, options_of, owner_tags, taken

APP = "art-cloud"
TAG = "art-cloud-cluster"
CREATED = "art-cloud-created"
PORT = 8321
STATE = "art-server"
"""Folder of the server's state, in the sandbox."""
CACHE = "/cache"
"""Where the volume for weights from the Hugging Face hub is mounted."""
LONGEST_SECONDS = 24 * 3600
"""A sandbox ends then at the latest; the next one goes on from the store."""
READY_SECONDS = 1200
LOOK_SECONDS = 10
"""How long Modal may take to say whether a server listens: it says so of one that does at once."""
ENDING_SECONDS = 70.0
"""How long a server may take to finish or abandon its step before its sandbox is ended."""
STOP = f"import json,os; os.kill(json.load(open('{STATE}/endpoint.json'))['pid'], 15)"
"""Asks the server to end, from within its sandbox."""
POLL_SECONDS = 0.2


class ModalProvider:
    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        options = options_of(spec)
        if options.serverless:
            serverless.proxy_headers()
        region = options.region or "any"
        return [Offer(provider="modal", region=region, price_per_hour=options.price)]

    async def check(self) -> list[Check]:
        """For `art-cloud doctor`, which also lists what runs: then the account is reached."""
        return [_check_client(), _check_proxy_token()]

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        options = options_of(spec)
        if options.serverless:
            return await serverless.launch(spec, options, name)
        if (there := await _find(name)) is not None:
            return await _check_owner(there, spec, name)
        with errors(f"start {name}"):
            app = await modal.App.lookup.aio(APP, create_if_missing=True)
            cache = modal.Volume.from_name(f"{APP}-cache", create_if_missing=True)
            environment = spec.server_environment() | {"HF_HOME": f"{CACHE}/huggingface"}
            try:
                await modal.Sandbox.create.aio(
                    *("art-server", "--host", "0.0.0.0", "--port", str(PORT)),  # noqa: S104
                    *("--state", STATE, *spec.server_arguments(name)),
                    app=app,
                    name=name,
                    tags={TAG: name, CREATED: datetime.now(UTC).isoformat(), **owner_tags(spec)},
                    image=await _image(options),
                    secrets=[modal.Secret.from_dict(dict(environment))],
                    volumes={CACHE: cache},
                    gpu=options.gpu,
                    region=options.region,
                    cpu=options.cpu,
                    memory=options.memory,
                    timeout=int(min(LONGEST_SECONDS, spec.cap_seconds)),
                    encrypted_ports=[PORT],
                    readiness_probe=modal.Probe.with_exec("test", "-f", f"{STATE}/endpoint.json"),
                )
            except AlreadyExistsError:
                if (there := await _find(name)) is not None:
                    await _check_owner(there, spec, name)

    async def endpoint(self, name: str) -> Endpoint:
        if (endpoint := await serverless.endpoint(name)) is not None:
            return endpoint
        sandbox = await _find(name) or await _latest(name)
        if sandbox is None:
            raise LaunchError(f"The server of {name} ended, and nothing is left of it.")
        with errors(f"reach {name}"):
            ready = asyncio.ensure_future(sandbox.wait_until_ready.aio(timeout=READY_SECONDS))
            ended = asyncio.ensure_future(sandbox.wait.aio(raise_on_termination=False))
            try:
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if await sandbox.poll.aio() is not None:
                    how = f"The server of {name} ended with exit code {sandbox.returncode}"
                    raise kit.ended(how, await _tail(sandbox, kit.LOG_LINES))
                await ready
                return Endpoint(url=(await sandbox.tunnels.aio())[PORT].url)
            finally:
                ready.cancel()
                ended.cancel()

    async def list(self) -> list[Instance]:
        async def looked_at(sandbox: modal.Sandbox, tags: dict[str, str]) -> Instance:
            ready = await _is_ready(sandbox)
            return _instance(sandbox, tags, "running" if ready else "starting")

        there = [looked_at(sandbox, tags) async for sandbox, tags in _sandboxes()]
        with errors("look at the sandboxes"):
            sandboxes = await asyncio.gather(*there)
        return [*sandboxes, *await serverless.instances()]

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        def meant(sandbox: modal.Sandbox, tags: dict[str, str]) -> bool:
            return only is None or only(_instance(sandbox, tags, "running"))

        with errors(f"end {name}"):
            async for sandbox, tags in _sandboxes():
                if tags[TAG] == name and meant(sandbox, tags):
                    await _stop(sandbox)
            await serverless.terminate(name, only)
            while (left := await _find(name)) and meant(left, await left.get_tags.aio()):
                await asyncio.sleep(POLL_SECONDS)

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        if await serverless.exists(name):
            async for line in serverless.logs(name, follow=follow):
                yield line
            return
        running = await _find(name)
        sandbox = running or await _latest(name)
        if sandbox is None:
            raise NotFoundError(f"Modal knows of no sandbox {name}.")
        with errors(f"read the log of {name}"):
            if follow and running:
                async for line in sandbox.stderr:
                    yield str(line).rstrip("\n")
            else:
                for line in await _tail(sandbox, 10_000):
                    yield line


def _instance(
    sandbox: modal.Sandbox, tags: dict[str, str], state: Literal["starting", "running"]
) -> Instance:
    by = f", by {tags[BY]}" if BY in tags else ""
    return Instance(
        name=tags[TAG],
        provider="modal",
        state=state,
        started_at=datetime.fromisoformat(tags[CREATED]),
        detail=f"{sandbox.object_id}{by}",
        identity=sandbox.object_id,
        owner=tags.get(OWNER),
    )


async def _is_ready(sandbox: modal.Sandbox) -> bool:
    """Whether its server listens, as its readiness probe says."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await sandbox.wait_until_ready.aio(timeout=1)
    except (TimeoutError, ModalTimeoutError):
        return False
    except ModalError:  # it has no probe, or has ended: whoever asks it will see
        return True
    return True


async def _check_owner(sandbox: modal.Sandbox, spec: ClusterSpec, name: str) -> None:
    with errors(f"look at {name}"):
        tags = await sandbox.get_tags.aio()
    if tags.get(OWNER) != spec.owner:
        raise taken(name, tags.get(BY))


def _check_client() -> Check:
    """Modal's protocol may change with the minor version of its client."""
    pinned = re.search(r"modal~=([\d.]+)", " ".join(requires("art-cloud") or []))
    assert pinned is not None
    subject, message = "client of Modal", f"modal {modal.__version__}"
    if modal.__version__.split(".")[:2] == pinned[1].split(".")[:2]:
        return Check(subject=subject, state="ok", message=message)
    message += f", and this version of art-cloud was tested with {pinned[1]}"
    cure = f"pip install 'modal~={pinned[1]}'"
    return Check(subject=subject, state="warning", message=message, cure=cure)


def _check_proxy_token() -> Check:
    subject = "proxy token of Modal"
    try:
        serverless.proxy_headers()
    except ConfigError as error:
        return Check(subject=subject, state="ok", message="None", cure=str(error))
    return Check(subject=subject, state="ok", message="Set: serverless clusters can be reached")


async def _image(options: Options) -> modal.Image:
    if options.image is not None:
        return modal.Image.from_registry(options.image)
    image = modal.Image.debian_slim(python_version=PYTHON)
    this = await asyncio.to_thread(source)
    if this.wheel is None:
        return image.uv_pip_install(this.requirement(EXTRAS))
    there = f"/wheels/{this.wheel.name}"
    image = image.add_local_file(this.wheel, there, copy=True)
    return image.uv_pip_install(this.requirement(EXTRAS, there))


async def _sandboxes() -> AsyncIterator[tuple[modal.Sandbox, dict[str, str]]]:
    """All that run, with their tags; `_find` is the quick way to one."""
    with errors("list the sandboxes"):
        try:
            app = await modal.App.lookup.aio(APP)
        except ModalNotFoundError:
            return
        async for sandbox in modal.Sandbox.list.aio(app_id=app.app_id):
            tags = await sandbox.get_tags.aio()
            if TAG in tags and await sandbox.poll.aio() is None:
                yield sandbox, tags


async def _find(name: str) -> modal.Sandbox | None:
    with errors(f"look for {name}"):
        try:
            sandbox = await modal.Sandbox.from_name.aio(APP, name)
        except ModalNotFoundError:
            return None
        return sandbox if await sandbox.poll.aio() is None else None


async def _latest(name: str) -> modal.Sandbox | None:
    """The newest sandbox of this name, also one that ended: `modal.Sandbox.list` has none."""
    from modal._utils.async_utils import synchronizer
    from modal.sandbox._impl_v2 import SandboxImplV2
    from modal_proto.api_pb2 import SandboxListRequest, SandboxTag

    @synchronizer.create_blocking
    async def list_page(client: Any, request: SandboxListRequest) -> Any:
        return await SandboxImplV2.list_page(client, request)

    with errors(f"look for {name}"):
        try:
            app = await modal.App.lookup.aio(APP)
        except ModalNotFoundError:
            return None
        request = SandboxListRequest(
            app_id=app.app_id or "",
            include_finished=True,
            tags=[SandboxTag(tag_name=TAG, tag_value=name)],
        )
        found = (await list_page.aio(await modal.Client.from_env.aio(), request)).sandboxes
        return await modal.Sandbox.from_id.aio(found[0].id) if found else None


async def _stop(sandbox: modal.Sandbox) -> None:
    """Let the server come to its end; then end the sandbox, whatever it does."""
    with suppress(ModalError, TimeoutError):
        stopping = await sandbox.exec.aio("python3", "-c", STOP)
        if await stopping.wait.aio() == 0:
            async with asyncio.timeout(ENDING_SECONDS):
                await sandbox.wait.aio(raise_on_termination=False)
    await sandbox.terminate.aio(wait=True)


async def _tail(sandbox: modal.Sandbox, lines: int) -> list[str]:
    try:
        text = "".join([entry.message async for entry in sandbox.logs.tail.aio(lines)])
    except ExecutionError:  # it never ran
        return []
    return text.splitlines()[-lines:]
