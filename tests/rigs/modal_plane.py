"""A control plane that the real `modal` client talks to, for the part of Modal that is used here.

It speaks Modal's own gRPC on loopback. A sandbox is a real process (group) in a folder of its own,
its tunnel a real TLS listener with a certificate of the plane's own authority. What the plane does
not know, it answers with UNIMPLEMENTED, so that a newer client fails loudly.

It differs from Modal: no container and no GPU, so where an argument names a port that is opened,
the process gets another one that is free; and a volume is an empty folder that is not mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_grpc, task_command_router_grpc
from modal_proto import api_pb2 as api

from .modal_apps import Apps
from .modal_functions import Function, Worker
from .modal_sandboxes import HOST, Result, Router, Sandbox, logged, new_id, new_jwt
from .modal_servers import Server as DeployedServer

BUILDER = "2025.06"


class Control(Apps):
    """The calls of `ModalClient`: apps, images, secrets, volumes and sandboxes."""

    def __init__(self, plane: ModalPlane) -> None:
        super().__init__()
        self.plane = plane
        self.apps: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.images: dict[str, api.Image] = {}

    def authenticate(self, metadata: Any) -> None:
        if metadata.get("x-modal-client-type") == str(api.CLIENT_TYPE_CONTAINER):
            return  # it has no token
        sent = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if sent != self.plane.token:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")

    async def ClientHello(self, _: Any) -> Any:
        return api.ClientHelloResponse(image_builder_version=BUILDER)

    async def AuthTokenGet(self, _: Any) -> Any:
        return api.AuthTokenGetResponse(token=new_jwt())

    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api.EnvironmentSettings(image_builder_version=BUILDER)
        name = request.deployment_name or "main"
        return api.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=api.EnvironmentMetadata(name=name, settings=settings)
        )

    async def AppGetOrCreate(self, request: Any) -> Any:
        if request.app_name not in self.apps:
            if request.object_creation_type != api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found")
            self.apps[request.app_name] = new_id("ap")
        return api.AppGetOrCreateResponse(app_id=self.apps[request.app_name])

    async def AppFetchLogs(self, request: Any) -> Any:
        logs = (s.log.read_bytes() for s in self.sandboxes.values() if s.task_id == request.task_id)
        text = b"".join(logs) if request.task_id else self.app_log(request.app_id)
        items = [logged(line) for line in text.splitlines(keepends=True)[-request.limit :]]
        return api.AppFetchLogsResponse(batches=[api.TaskLogsBatch(items=items)])

    async def ImageGetOrCreate(self, request: Any) -> Any:
        if any("not-there" in line for line in request.image.dockerfile_commands):
            raise GRPCError(Status.NOT_FOUND, "Image not-there not found")
        image = new_id("im")
        self.images[image] = request.image
        return api.ImageGetOrCreateResponse(
            image_id=image,
            metadata=api.ImageMetadata(image_builder_version=request.builder_version),
        )

    async def ImageJoinStreaming(self, _: Any) -> AsyncIterator[Any]:
        yield api.ImageJoinStreamingResponse(
            result=Result(status=Result.GENERIC_STATUS_SUCCESS),
            metadata=api.ImageMetadata(image_builder_version=BUILDER),
        )

    async def SecretGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name
        known = self.secrets.get(name, "")
        secret = known if known in self.environments else new_id("st")
        if request.object_creation_type == api.OBJECT_CREATION_TYPE_UNSPECIFIED:
            if secret not in self.environments:
                raise GRPCError(Status.NOT_FOUND, f"Secret {name!r} not found")
        elif secret not in self.environments:
            self.environments[secret] = dict(request.env_dict)
        if name:
            self.secrets[name] = secret
        return api.SecretGetOrCreateResponse(secret_id=secret)

    async def SecretUpdate(self, request: Any) -> Any:
        environment = self.environments[request.secret_id]
        environment |= {update.key: update.value for update in request.updates}
        return Empty()

    async def SecretDelete(self, request: Any) -> Any:
        self.environments.pop(request.secret_id)
        return Empty()

    async def VolumeGetOrCreate(self, request: Any) -> Any:
        return api.VolumeGetOrCreateResponse(
            volume_id=new_id("vo"),
            version=api.VOLUME_FS_VERSION_V2,
            metadata=api.VolumeMetadata(
                version=api.VOLUME_FS_VERSION_V2, name=request.deployment_name
            ),
        )


class ModalPlane:
    """`with ModalPlane(folder) as plane:` runs in a thread; `plane.environment` leads a client to
    it. All sandboxes are gone with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.token = ("ak-" + secrets.token_hex(8), "as-" + secrets.token_hex(8))
        self.proxy_token = ("wk-" + secrets.token_hex(8), "ws-" + secrets.token_hex(8))
        self.capacity = True
        self.preemptions = 0
        """How many more containers of functions are lost as soon as they have an input."""
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, list[GRPCError]] = {}
        """By call: what its next ones fail with."""
        self.control = Control(self)
        self.router_url = ""
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority = trustme.CA()
        self._authority.issue_cert(HOST).configure_cert(self.tls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[Server] = []
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> list[Sandbox]:
        return [one for one in self.control.sandboxes.values() if one.result is None]

    @property
    def servers(self) -> list[DeployedServer]:
        published = self.control.apps.values()
        return [one for one in self.control.servers.values() if one.app_id in published]

    @property
    def functions(self) -> list[Function]:
        return list(self.control.functions.values())

    def commands(self, sandbox: Sandbox) -> list[str]:
        """Those that its image is built with, from the base up."""
        found: list[str] = []
        ids = [sandbox.definition.image_id]
        for id_ in ids:
            image = self.control.images[id_]
            found[:0] = image.dockerfile_commands
            ids += [base.image_id for base in image.base_images]
        return found

    def lose(self, name: str, *, over_time: bool = False) -> None:
        """What a preempted or broken worker looks like, or the end of a sandbox's 24 hours."""
        [sandbox] = [one for one in self.running if one.definition.name == name]
        result = Result(status=Result.GENERIC_STATUS_FAILURE, exitcode=137, exception="lost")
        if over_time:
            result = Result(status=Result.GENERIC_STATUS_TIMEOUT, exitcode=124)
        self._do(self.control.end(sandbox, result))

    def scale_down(self, server: DeployedServer) -> None:
        """What a server's containers see of the end of their window, or of a preemption."""
        self._do(server.scale_down())

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def __enter__(self) -> ModalPlane:
        self._thread.start()
        self._do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        self.router_url = await self.serve(
            task_command_router_grpc.TaskCommandRouterBase, Router(self.control)
        )
        url = await self.serve(api_grpc.ModalClientBase, self.control)
        certificate = self.folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(certificate))
        self.environment = {
            "MODAL_SERVER_URL": url,
            "MODAL_TOKEN_ID": self.token[0],
            "MODAL_TOKEN_SECRET": self.token[1],
            "MODAL_PROXY_TOKEN_ID": self.proxy_token[0],
            "MODAL_PROXY_TOKEN_SECRET": self.proxy_token[1],
            "SSL_CERT_FILE": str(certificate),
        }

    async def _close(self) -> None:
        for sandbox in self.running:
            await self.control.end(sandbox, Result(status=Result.GENERIC_STATUS_TERMINATED))
        for one in (*self.control.servers.values(), *self.control.functions.values()):
            await one.close()
        for server in self._servers:
            server.close()
            await server.wait_closed()
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def serve(self, base: type[Any], service: Control | Router | Worker) -> str:
        handlers = {name: self._handler(name, service) for name in base.__abstractmethods__}
        server = Server(
            [type("Service", (base,), handlers)()], status_details_codec=custom_detail_codec
        )
        await server.start("127.0.0.1", 0)
        self._servers.append(server)
        assert server._server is not None
        return "http://{}:{}".format(*server._server.sockets[0].getsockname())

    def _handler(self, name: str, service: Control | Router | Worker) -> Any:
        method = getattr(service, name, None)

        async def handle(_: Any, stream: Any) -> None:
            request = await stream.recv_message()
            self.calls[name] += 1
            service.authenticate(stream.metadata)
            if faults := self.faults.get(name):
                raise faults.pop(0)
            if method is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"this plane has no {name}")
            answer = method(request)
            if hasattr(answer, "__aiter__"):
                async for message in answer:
                    await stream.send_message(message)
            else:
                await stream.send_message(await answer or Empty())

        return handle


@contextlib.contextmanager
def modal_plane(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    """A plane that this process, and those it starts, take for Modal."""
    import modal

    with ModalPlane(folder / "modal") as plane:
        for key, value in plane.environment.items():
            monkeypatch.setenv(key, value)
        try:
            yield plane
        finally:
            modal.Client.from_env().close()  # else the next test's client would be this one
