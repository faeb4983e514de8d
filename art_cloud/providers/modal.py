"""Modal: the server as a named sandbox, which ends when the server does.

A sandbox lives in the Modal app "art-cloud" under the cluster's name and with its tag, so it is
found from any machine of the same workspace. It is reached over Modal's TLS tunnel; the server asks
for the cluster's token on every route. (Modal's connect tokens would take the Authorization header,
where OpenAI clients send their key.)

Source of what Modal does: https://modal.com/docs/guide/sandboxes and .../sandbox-networking.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

import modal
from modal.exception import (
    AlreadyExistsError,
    AuthError,
    ExecutionError,
    ImageBuildError,
    InvalidError,
    ResourceExhaustedError,
)
from modal.exception import ConnectionError as ModalConnectionError
from modal.exception import Error as ModalError
from modal.exception import NotFoundError as ModalNotFoundError
from pydantic import Field, ValidationError

from ..config import Frozen
from ..errors import ConfigError, LaunchError, NotFoundError, ProviderError
from ..http import complaint
from ..wheel import source
from . import ClusterSpec, Endpoint, Instance, Offer

APP = "art-cloud"
TAG = "art-cloud-cluster"
CREATED = "art-cloud-created"
PORT = 8321
STATE = "art-server"
"""Folder of the server's state, in the sandbox."""
PYTHON, EXTRAS = "3.12", "server,vllm"
"""Of the image."""
CACHE = "/cache"
"""Where the volume for weights from the Hugging Face hub is mounted."""
LONGEST_SECONDS = 24 * 3600
"""A sandbox ends then at the latest; the next one goes on from the store."""
READY_SECONDS = 1200
ENDING_SECONDS = 70.0
"""How long a server may take to finish or abandon its step before its sandbox is ended."""
STOP = f"import json,os; os.kill(json.load(open('{STATE}/endpoint.json'))['pid'], 15)"
"""Asks the server to end, from within its sandbox."""
POLL_SECONDS = 0.2
LOG_LINES = 15

PRICES = {
    "T4": 0.59,
    "L4": 0.80,
    "A10": 1.10,
    "L40S": 1.95,
    "A100-40GB": 2.10,
    "A100-80GB": 2.50,
    "H100": 3.95,
    "H200": 4.54,
    "B200": 6.25,
}
"""US dollars an hour for one GPU, as https://modal.com/pricing listed them in the middle of 2026.
CPU and memory are billed beside them, and some regions cost more."""


class Options(Frozen):
    """What `up("modal", ...)` takes beside the common arguments."""

    gpu: str
    """A name of Modal's, with ":2" for two of them."""
    image: str | None = None
    """A registry's image that has `art-server`, best by digest ("ghcr.io/me/art@sha256:..."); None:
    Modal builds one of this version, once."""
    region: str | None = None
    cpu: float | None = Field(default=None, gt=0)
    memory: int | None = Field(default=None, gt=0)
    """MiB."""

    @property
    def price(self) -> float:
        """US dollars an hour."""
        name, _, count = self.gpu.partition(":")
        name = {"A100": "A100-40GB", "A10G": "A10"}.get(name.upper(), name.upper().rstrip("!"))
        if name not in PRICES or not (count.isdecimal() or not count) or count == "0":
            near = get_close_matches(name, PRICES, n=3, cutoff=0.3)
            raise ConfigError(
                f"Modal has no GPU {self.gpu!r}. "
                + (f"Did you mean {' or '.join(near)}? " if near else "")
                + f"It has {', '.join(PRICES)}; gpu='H100:2' asks for two."
            )
        return PRICES[name] * int(count or 1)


class ModalProvider:
    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        options = _options(spec)
        region = options.region or "any"
        return [Offer(provider="modal", region=region, price_per_hour=options.price)]

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        options = _options(spec)
        if await _find(name) is not None:
            return
        with _errors(f"start {name}"):
            app = await modal.App.lookup.aio(APP, create_if_missing=True)
            cache = modal.Volume.from_name(f"{APP}-cache", create_if_missing=True)
            environment = spec.server_environment() | {"HF_HOME": f"{CACHE}/huggingface"}
            try:
                await modal.Sandbox.create.aio(
                    *("art-server", "--host", "0.0.0.0", "--port", str(PORT)),  # noqa: S104
                    *("--state", STATE, *spec.server_arguments(name)),
                    app=app,
                    name=name,
                    tags={TAG: name, CREATED: datetime.now(UTC).isoformat()},
                    image=await _image(options),
                    secrets=[modal.Secret.from_dict(dict(environment))],
                    volumes={CACHE: cache},
                    gpu=options.gpu,
                    region=options.region,
                    cpu=options.cpu,
                    memory=options.memory,
                    timeout=LONGEST_SECONDS,
                    encrypted_ports=[PORT],
                    readiness_probe=modal.Probe.with_exec("test", "-f", f"{STATE}/endpoint.json"),
                )
            except AlreadyExistsError:
                return

    async def endpoint(self, name: str) -> Endpoint:
        sandbox = await _find(name) or await _latest(name)
        if sandbox is None:
            raise LaunchError(f"The server of {name} ended, and nothing is left of it.")
        with _errors(f"reach {name}"):
            ready = asyncio.ensure_future(sandbox.wait_until_ready.aio(timeout=READY_SECONDS))
            ended = asyncio.ensure_future(sandbox.wait.aio(raise_on_termination=False))
            try:
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if await sandbox.poll.aio() is not None:
                    raise LaunchError(await _last_words(sandbox, name))
                await ready
                return Endpoint(url=(await sandbox.tunnels.aio())[PORT].url)
            finally:
                ready.cancel()
                ended.cancel()

    async def list(self) -> list[Instance]:
        return [
            Instance(
                name=tags[TAG],
                provider="modal",
                state="running",
                started_at=datetime.fromisoformat(tags[CREATED]),
                detail=sandbox.object_id,
            )
            async for sandbox, tags in _sandboxes()
        ]

    async def terminate(self, name: str) -> None:
        with _errors(f"end {name}"):
            async for sandbox, tags in _sandboxes():
                if tags[TAG] == name:
                    await _stop(sandbox)
            while await _find(name) is not None:
                await asyncio.sleep(POLL_SECONDS)

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        running = await _find(name)
        sandbox = running or await _latest(name)
        if sandbox is None:
            raise NotFoundError(f"Modal knows of no sandbox {name}.")
        with _errors(f"read the log of {name}"):
            if follow and running:
                async for line in sandbox.stderr:
                    yield str(line).rstrip("\n")
            else:
                for line in await _tail(sandbox, 10_000):
                    yield line


def _options(spec: ClusterSpec) -> Options:
    try:
        return Options.model_validate(spec.options)
    except ValidationError as error:
        known = ", ".join(Options.model_fields)
        raise ConfigError(
            f'up("modal", ...): {complaint(error)}. Its options are: {known}.'
        ) from error


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
    with _errors("list the sandboxes"):
        try:
            app = await modal.App.lookup.aio(APP)
        except ModalNotFoundError:
            return
        async for sandbox in modal.Sandbox.list.aio(app_id=app.app_id):
            tags = await sandbox.get_tags.aio()
            if TAG in tags and await sandbox.poll.aio() is None:
                yield sandbox, tags


async def _find(name: str) -> modal.Sandbox | None:
    with _errors(f"look for {name}"):
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

    with _errors(f"look for {name}"):
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


async def _last_words(sandbox: modal.Sandbox, name: str) -> str:
    lines = "\n".join(f"  {line}" for line in await _tail(sandbox, LOG_LINES)) or "  (nothing)"
    return (
        f"The server of {name} ended with exit code {sandbox.returncode}. The last lines of "
        f"what it wrote:\n{lines}\nMend what they name, then start it again."
    )


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except AuthError as error:
        raise ConfigError(
            f"Could not {what}: Modal does not take your token ({error}). Run `modal setup`, or "
            "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."
        ) from error
    except ResourceExhaustedError as error:
        raise LaunchError(
            f"Could not {what}: Modal has no such GPU free ({error}). Nothing is left running. Try "
            "again later, another gpu=, or no region=."
        ) from error
    except ImageBuildError as error:
        raise LaunchError(f"Could not {what}: the image was not built ({error}).") from error
    except (InvalidError, ModalNotFoundError) as error:
        raise ConfigError(f"Could not {what}: Modal refuses it ({error}).") from error
    except ModalConnectionError as error:
        raise ProviderError(
            f"Could not {what}: Modal can't be reached ({error}). Whether something runs is not "
            "known: look again when you are online."
        ) from error
    except ModalError as error:
        raise ProviderError(f"Could not {what}: {type(error).__name__}: {error}") from error
