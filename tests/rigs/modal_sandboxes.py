"""Sandboxes of the plane in `modal_plane`: real processes behind real TLS tunnels."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router

if TYPE_CHECKING:
    from .modal_plane import ModalPlane

HOST = "127.0.0.2"
"""Of the tunnels: an address that no client takes for its own machine."""
GPUS = {"T4", "L4", "A10", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200"}
LONGEST_SECONDS = 24 * 3600
POLL_SECONDS = 0.02

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


def new_jwt(**claims: Any) -> str:
    parts = ({"alg": "none"}, {"exp": time.time() + 3600, **claims})
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    return b".".join([*encoded, b"x"]).decode()


def claims(jwt: str) -> dict[str, Any]:
    encoded = jwt.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(encoded + -len(encoded) % 4 * "="))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Sandboxes:
    """The calls of `ModalClient` about sandboxes."""

    plane: ModalPlane
    environments: dict[str, dict[str, str]]
    """By secret."""
    apps: dict[str, str]
    """Ids by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sandboxes: dict[str, Sandbox] = {}

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
        folder = self.plane.folder / "sandboxes" / id_
        folder.mkdir(parents=True)
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
        arguments = list(sandbox.definition.entrypoint_args)
        for opened in sandbox.definition.open_ports.ports:
            port = free_port()
            arguments = [str(port) if one == str(opened.port) else one for one in arguments]
            sandbox.tunnels.append(await self._tunnel(sandbox, opened.port, port))
        with sandbox.log.open("wb") as log:
            sandbox.process = await asyncio.create_subprocess_exec(
                *arguments,
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

    async def end_all(self, app_id: str) -> None:
        for sandbox in self.sandboxes.values():
            if sandbox.app_id == app_id:
                await self.end(sandbox, Result(status=Result.GENERIC_STATUS_TERMINATED))

    async def _tunnel(self, sandbox: Sandbox, opened: int, port: int) -> api.TunnelData:
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
        return api.TunnelData(host=HOST, port=public, container_port=opened)

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
                yield api.TaskLogsBatch(entry_id=str(offset), items=[logged(data)])
            await asyncio.sleep(POLL_SECONDS)
        yield api.TaskLogsBatch(eof=True)

    async def TaskGetCommandRouterAccess(self, _: Any) -> Any:
        return api.TaskGetCommandRouterAccessResponse(url=self.plane.router_url, jwt=new_jwt())


def logged(data: bytes) -> api.TaskLogs:
    return api.TaskLogs(
        data=data.decode(), file_descriptor=api.FILE_DESCRIPTOR_STDERR, timestamp=time.time()
    )


class Router:
    """The calls of `TaskCommandRouter`, which a client makes to the machine of a sandbox."""

    def __init__(self, control: Sandboxes) -> None:
        self._control = control
        self._executed: dict[str, asyncio.subprocess.Process] = {}

    def authenticate(self, metadata: Any) -> None:
        if not metadata.get("authorization", "").startswith("Bearer "):
            raise GRPCError(Status.UNAUTHENTICATED, "no token")

    def _sandbox(self, request: Any) -> Sandbox:
        found = self._control.sandboxes.values()
        [sandbox] = [one for one in found if one.task_id == request.task_id]
        return sandbox

    async def TaskExecStart(self, request: Any) -> Any:
        self._executed[request.exec_id] = await asyncio.create_subprocess_exec(
            *request.command_args, cwd=self._sandbox(request).folder, stderr=subprocess.DEVNULL
        )
        return router.TaskExecStartResponse()

    async def TaskExecWait(self, request: Any) -> Any:
        return router.TaskExecWaitResponse(code=await self._executed[request.exec_id].wait())

    async def SandboxWaitUntilReady(self, request: Any) -> Any:
        sandbox = self._sandbox(request)
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
