"""A control plane that the real `modal` client talks to, for the part of Modal that is used here.

It speaks Modal's own gRPC on loopback. A sandbox is a real process (group) in a folder of its own,
its tunnel a real TLS listener with a certificate of the plane's own authority. What the plane does
not know, it answers with UNIMPLEMENTED, so that a newer client fails loudly.

It differs from Modal: no container and no GPU, and a volume is an empty folder that is not mounted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_grpc, task_command_router_grpc
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router

HOST = "127.0.0.2"
"""Of the tunnels: an address that no client takes for its own machine."""
GPUS = {"T4", "L4", "A10", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200"}
LONGEST_SECONDS = 24 * 3600
POLL_SECONDS = 0.02
BUILDER = "2025.06"

Result = api.GenericResult


@dataclass
class Sandbox:
    id: str
    app_id: str
    definition: api.Sandbox
    folder: Path
    tags: dict[str, str]
    created_at: float = field(default_factory=time.time)
    process: asyncio.subprocess.Process | None = None
    """None while there is no capacity for it."""
    result: api.GenericResult | None = None
    tunnels: list[api.TunnelData] = field(default_factory=list)
    listeners: list[asyncio.Server] = field(default_factory=list)

    @property
    def task_id(self) -> str:
        return self.id.replace("sb-", "ta-")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def handle(self) -> api.SandboxHandleMetadata:
        return api.SandboxHandleMetadata(app_id=self.app_id, result=self.result)


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(11)}"  # 22 characters: what is longer is another generation


def new_jwt() -> str:
    parts = ({"alg": "none"}, {"exp": time.time() + 3600})
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    return b".".join([*encoded, b"x"]).decode()


class Control:
    """The calls of `ModalClient`: apps, images, secrets, volumes and sandboxes."""

    def __init__(self, plane: ModalPlane) -> None:
        self.plane = plane
        self.apps: dict[str, str] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.images: dict[str, api.Image] = {}
        self.sandboxes: dict[str, Sandbox] = {}

    def authenticate(self, metadata: Any) -> None:
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
        secret = new_id("st")
        self.environments[secret] = dict(request.env_dict)
        return api.SecretGetOrCreateResponse(secret_id=secret)

    async def VolumeGetOrCreate(self, request: Any) -> Any:
        return api.VolumeGetOrCreateResponse(
            volume_id=new_id("vo"),
            version=api.VOLUME_FS_VERSION_V2,
            metadata=api.VolumeMetadata(
                version=api.VOLUME_FS_VERSION_V2, name=request.deployment_name
            ),
        )

    async def SandboxCreate(self, request: Any) -> Any:
        definition = request.definition
        gpu = definition.resources.gpu_config
        if gpu.gpu_type.upper() not in GPUS:
            raise GRPCError(Status.INVALID_ARGUMENT, f"Not a valid GPU type: {gpu.gpu_type}")
        if not 0 < definition.timeout_secs <= LONGEST_SECONDS:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be at most 24 hours")
        if self._running(request.app_id, definition.name):
            message = f"Sandbox {definition.name!r} already exists"
            raise GRPCError(Status.ALREADY_EXISTS, message)
        id_ = new_id("sb")
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        folder = self.plane.folder / id_
        folder.mkdir()
        sandbox = Sandbox(id_, request.app_id, definition, folder, tags)
        self.sandboxes[id_] = sandbox
        if self.plane.capacity:
            await self._start(sandbox)
        return api.SandboxCreateResponse(sandbox_id=id_, metadata=sandbox.handle)

    def _running(self, app_id: str, name: str) -> Sandbox | None:
        found = (
            sandbox
            for sandbox in self.sandboxes.values()
            if (sandbox.app_id, sandbox.definition.name) == (app_id, name)
            and sandbox.result is None
        )
        return next(found, None)

    async def _start(self, sandbox: Sandbox) -> None:
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(sandbox.folder),
            "OMP_NUM_THREADS": "1",
        }
        for secret in sandbox.definition.secret_ids:
            environment |= self.environments[secret]
        for port in sandbox.definition.open_ports.ports:
            sandbox.tunnels.append(await self._tunnel(sandbox, port.port))
        with sandbox.log.open("wb") as log:
            sandbox.process = await asyncio.create_subprocess_exec(
                *sandbox.definition.entrypoint_args,
                cwd=sandbox.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.plane.watch(self._watch(sandbox))

    async def _watch(self, sandbox: Sandbox) -> None:
        assert sandbox.process is not None
        code = await sandbox.process.wait()
        status = Result.GENERIC_STATUS_FAILURE if code else Result.GENERIC_STATUS_SUCCESS
        await self.end(sandbox, Result(status=status, exitcode=code if code >= 0 else 128 - code))

    async def end(self, sandbox: Sandbox, result: api.GenericResult) -> None:
        """A sandbox takes all its processes and connections with it."""
        if sandbox.result is not None:
            return
        sandbox.result = result
        if sandbox.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(sandbox.process.pid, signal.SIGKILL)
            await sandbox.process.wait()
        for listener in sandbox.listeners:
            listener.close()

    async def _tunnel(self, sandbox: Sandbox, port: int) -> api.TunnelData:
        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

        listener = await asyncio.start_server(relay, HOST, 0, ssl=self.plane.tls)
        sandbox.listeners.append(listener)
        public = listener.sockets[0].getsockname()[1]
        return api.TunnelData(host=HOST, port=public, container_port=port)

    def _sandbox(self, request: Any) -> Sandbox:
        try:
            return self.sandboxes[request.sandbox_id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"{request.sandbox_id} not found") from None

    async def SandboxGetTaskId(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
        task = sandbox.task_id if sandbox.process else ""
        return api.SandboxGetTaskIdResponse(task_id=task, task_result=sandbox.result)

    async def SandboxGetTunnels(self, request: Any) -> Any:
        result = Result(status=Result.GENERIC_STATUS_SUCCESS)
        return api.SandboxGetTunnelsResponse(result=result, tunnels=self._sandbox(request).tunnels)

    async def SandboxWait(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
        give_up = time.monotonic() + request.timeout
        while sandbox.result is None and time.monotonic() < give_up:
            await asyncio.sleep(POLL_SECONDS)
        return api.SandboxWaitResponse(result=sandbox.result, metadata=sandbox.handle)

    async def SandboxTerminate(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
        before = sandbox.result
        await self.end(sandbox, Result(status=Result.GENERIC_STATUS_TERMINATED))
        return api.SandboxTerminateResponse(existing_result=before)

    async def SandboxListV2(self, request: Any) -> Any:
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        return api.SandboxListResponse(
            sandboxes=[
                api.SandboxInfo(
                    id=sandbox.id,
                    created_at=sandbox.created_at,
                    app_id=sandbox.app_id,
                    name=sandbox.definition.name,
                    metadata=sandbox.handle,
                    task_info=api.TaskInfo(id=sandbox.task_id, result=sandbox.result),
                )
                for sandbox in sorted(self.sandboxes.values(), key=lambda one: -one.created_at)
                if (request.include_finished or sandbox.result is None)
                and sandbox.app_id == request.app_id
                and wanted <= set(sandbox.tags.items())
                and (not request.before_timestamp or sandbox.created_at < request.before_timestamp)
            ]
        )

    async def SandboxGetFromName(self, request: Any) -> Any:
        sandbox = self._running(self.apps.get(request.app_name, ""), request.sandbox_name)
        if sandbox is None:
            raise GRPCError(Status.NOT_FOUND, f"No sandbox {request.sandbox_name!r}")
        return api.SandboxGetFromNameResponse(sandbox_id=sandbox.id, metadata=sandbox.handle)

    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        """Sandboxes without a GPU are of a later generation: here there are none."""
        raise GRPCError(Status.NOT_FOUND, f"No sandbox {request.sandbox_name!r}")

    async def SandboxTagsGet(self, request: Any) -> Any:
        tags = self._sandbox(request).tags.items()
        return api.SandboxTagsGetResponse(
            tags=[api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags]
        )

    async def SandboxGetLogs(self, request: Any) -> AsyncIterator[Any]:
        sandbox = self._sandbox(request)
        offset, ended = int(request.last_entry_id or 0), False
        while not ended:
            ended = sandbox.result is not None
            data = sandbox.log.read_bytes()[offset:]
            offset += len(data)
            if data and request.file_descriptor == api.FILE_DESCRIPTOR_STDERR:
                yield api.TaskLogsBatch(entry_id=str(offset), items=[_logged(data)])
            await asyncio.sleep(POLL_SECONDS)
        yield api.TaskLogsBatch(eof=True)

    async def AppFetchLogs(self, request: Any) -> Any:
        found = (s for s in self.sandboxes.values() if s.task_id == request.task_id)
        items = [
            _logged(line)
            for sandbox in found
            for line in sandbox.log.read_bytes().splitlines(keepends=True)[-request.limit :]
        ]
        return api.AppFetchLogsResponse(batches=[api.TaskLogsBatch(items=items)])

    async def TaskGetCommandRouterAccess(self, _: Any) -> Any:
        return api.TaskGetCommandRouterAccessResponse(url=self.plane.router_url, jwt=new_jwt())


def _logged(data: bytes) -> api.TaskLogs:
    return api.TaskLogs(
        data=data.decode(), file_descriptor=api.FILE_DESCRIPTOR_STDERR, timestamp=time.time()
    )


class Router:
    """The calls of `TaskCommandRouter`, which a client makes to the machine of a sandbox."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def authenticate(self, metadata: Any) -> None:
        if not metadata.get("authorization", "").startswith("Bearer "):
            raise GRPCError(Status.UNAUTHENTICATED, "no token")

    async def SandboxWaitUntilReady(self, request: Any) -> Any:
        found = self._control.sandboxes.values()
        [sandbox] = [one for one in found if one.task_id == request.task_id]
        probe = list(sandbox.definition.readiness_probe.exec_command.argv)
        give_up = time.monotonic() + request.timeout
        while time.monotonic() < give_up:
            if sandbox.result is not None:
                raise GRPCError(Status.FAILED_PRECONDITION, "it ended before it was ready")
            process = await asyncio.create_subprocess_exec(*probe, cwd=sandbox.folder)
            if await process.wait() == 0:
                return router.SandboxWaitUntilReadyTcrResponse()
            await asyncio.sleep(POLL_SECONDS)
        raise GRPCError(Status.DEADLINE_EXCEEDED, "not ready")


class ModalPlane:
    """`with ModalPlane(folder) as plane:` runs in a thread; `plane.environment` leads a client to
    it. All sandboxes are gone with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = ("ak-" + secrets.token_hex(8), "as-" + secrets.token_hex(8))
        self.capacity = True
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

    def lose(self, name: str) -> None:
        """What a preempted or broken worker looks like."""
        [sandbox] = [one for one in self.running if one.definition.name == name]
        result = Result(status=Result.GENERIC_STATUS_FAILURE, exitcode=137, exception="lost")
        self._do(self.control.end(sandbox, result))

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
        self.router_url = await self._serve(
            task_command_router_grpc.TaskCommandRouterBase, Router(self.control)
        )
        url = await self._serve(api_grpc.ModalClientBase, self.control)
        certificate = self.folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(certificate))
        self.environment = {
            "MODAL_SERVER_URL": url,
            "MODAL_TOKEN_ID": self.token[0],
            "MODAL_TOKEN_SECRET": self.token[1],
            "SSL_CERT_FILE": str(certificate),
        }

    async def _close(self) -> None:
        for sandbox in self.running:
            await self.control.end(sandbox, Result(status=Result.GENERIC_STATUS_TERMINATED))
        for server in self._servers:
            server.close()
            await server.wait_closed()
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, base: type[Any], service: Control | Router) -> str:
        handlers = {name: self._handler(name, service) for name in base.__abstractmethods__}
        server = Server(
            [type("Service", (base,), handlers)()], status_details_codec=custom_detail_codec
        )
        await server.start("127.0.0.1", 0)
        self._servers.append(server)
        assert server._server is not None
        return "http://{}:{}".format(*server._server.sockets[0].getsockname())

    def _handler(self, name: str, service: Control | Router) -> Any:
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
