"""Deployed apps of the plane in `modal_plane`: servers that scale from zero to one and back.

A server's container is Modal's real entrypoint in a process of its own, its stable address a real
TLS listener that asks for a proxy token. A request that finds no container starts one and is
answered with 503; without requests for the scaledown window the container gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api

from .modal_sandboxes import GPUS, HOST, POLL_SECONDS, free_port, new_id

if TYPE_CHECKING:
    from .modal_plane import ModalPlane

EXIT_SECONDS = 30.0
"""How long a container may take to end after SIGTERM."""
LARGEST_BODY = 1 << 30
OWN_HEADERS = {"transfer-encoding", "connection", "modal-key", "modal-secret", "host"}
"""Of one hop, or for Modal only."""


@dataclass
class Deployed:
    """A server, whether a container of it runs or not."""

    app_id: str
    function: api.Function
    url: str = ""
    folder: Path = Path()
    port: int = 0
    process: asyncio.subprocess.Process | None = None
    listens: bool = False
    starts: int = 0
    requests: int = 0
    idle_since: float = 0.0
    runner: web.AppRunner | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    codes: list[int] = field(default_factory=list)
    """With which its containers ended."""

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def window(self) -> float:
        settings = self.function.autoscaler_settings
        return float(settings.scaledown_window or self.function.task_idle_timeout_secs or 60)


def ranked(function: api.Function) -> api.FunctionData:
    """The form in which a client reads a function back."""
    return api.FunctionData(
        module_name=function.module_name,
        function_name=function.function_name,
        function_type=function.function_type,
        is_server=function.is_server,
        http_config=function.http_config,
        autoscaler_settings=function.autoscaler_settings,
        ranked_functions=[api.FunctionData.RankedFunction(rank=0, function=function)],
    )


class Apps:
    """The calls of `ModalClient` about mounts, apps and servers, from laptops and containers."""

    plane: ModalPlane
    apps: dict[str, str]
    environments: dict[str, dict[str, str]]

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """By digest."""
        self.mounts: dict[str, list[api.MountFile]] = {}
        self.layouts: dict[str, api.AppLayout] = {}
        self.created: dict[str, float] = {}
        self.servers: dict[str, Deployed] = {}

    async def MountBatchedCheckExistence(self, request: Any) -> Any:
        missing = [one for one in request.sha256_hex_hashes if one not in self.files]
        return api.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Any) -> Any:
        if request.WhichOneof("data_oneof") == "data":
            self.files[request.sha256_hex] = request.data
        return api.MountPutFileResponse(exists=request.sha256_hex in self.files)

    async def MountGetOrCreate(self, request: Any) -> Any:
        mount = new_id("mo")
        self.mounts[mount] = list(request.files)
        return api.MountGetOrCreateResponse(
            mount_id=mount,
            handle_metadata=api.MountHandleMetadata(content_checksum_sha256_hex="0"),
        )

    async def AppGetByDeploymentName(self, request: Any) -> Any:
        return api.AppGetByDeploymentNameResponse(app_id=self.apps.get(request.name, ""))

    async def AppCreate(self, request: Any) -> Any:
        return api.AppCreateResponse(app_id=new_id("ap"), app_page_url="https://modal.test/app")

    async def AppGetLayout(self, request: Any) -> Any:
        return api.AppGetLayoutResponse(app_layout=self.layouts.get(request.app_id))

    async def FunctionPrecreate(self, request: Any) -> Any:
        function = request.existing_function_id or new_id("fu")
        return api.FunctionPrecreateResponse(
            function_id=function,
            handle_metadata=api.FunctionHandleMetadata(function_name=request.function_name),
        )

    async def FunctionCreate(self, request: Any) -> Any:
        function, id_ = request.function, request.existing_function_id
        gpu = function.resources.gpu_config.gpu_type
        if gpu and gpu.upper() not in GPUS:
            raise GRPCError(Status.INVALID_ARGUMENT, f"Not a valid GPU type: {gpu}")
        if not function.is_server:
            raise GRPCError(Status.UNIMPLEMENTED, "this plane runs servers only")
        if (server := self.servers.get(id_)) is None:
            server = self.servers[id_] = Deployed(request.app_id, function)
            await self._listen(server)
        server.function = function
        return api.FunctionCreateResponse(
            function_id=id_,
            function=function,
            function_data=ranked(function),
            handle_metadata=self._handle(id_),
        )

    def _handle(self, id_: str) -> api.FunctionHandleMetadata:
        server = self.servers[id_]
        return api.FunctionHandleMetadata(
            function_name=server.function.function_name,
            function_type=server.function.function_type,
            app_id=server.app_id,
            _experimental_flash_urls=[server.url],
        )

    async def AppPublish(self, request: Any) -> Any:
        self.apps[request.name] = request.app_id
        self.created.setdefault(request.app_id, time.time())
        needed = {
            dependency.object_id
            for function in request.function_ids.values()
            for dependency in self.servers[function].function.object_dependencies
        }
        volume = api.VolumeMetadata(version=api.VOLUME_FS_VERSION_V2)
        self.layouts[request.app_id] = api.AppLayout(
            function_ids=request.function_ids,
            objects=[
                *(
                    api.Object(object_id=id_, function_handle_metadata=self._handle(id_))
                    for id_ in request.function_ids.values()
                ),
                *(
                    api.Object(
                        object_id=id_, volume_metadata=volume if id_.startswith("vo-") else None
                    )
                    for id_ in needed
                ),
            ],
        )
        return api.AppPublishResponse(url="https://modal.test/app", deployed_at=time.time())

    async def AppList(self, _: Any) -> Any:
        return api.AppListResponse(
            apps=[
                api.AppListResponse.AppListItem(
                    app_id=id_,
                    description=name,
                    name=name,
                    state=api.APP_STATE_DEPLOYED,
                    created_at=self.created.get(id_, 0.0),
                    n_running_tasks=sum(server.runs for server in self._of(id_)),
                )
                for name, id_ in self.apps.items()
            ]
        )

    async def AppGetLifecycle(self, request: Any) -> Any:
        at = self.created.get(request.app_id, 0.0)
        return api.AppGetLifecycleResponse(
            lifecycle=api.AppLifecycle(created_at=at, deployed_at=at)
        )

    async def AppHeartbeat(self, _: Any) -> Any:
        return Empty()

    async def AppClientDisconnect(self, request: Any) -> Any:
        """An app that was not published goes with its client."""
        return Empty() if request.app_id in self.created else await self.AppStop(request)

    async def AppStop(self, request: Any) -> Any:
        self.apps = {name: id_ for name, id_ in self.apps.items() if id_ != request.app_id}
        for server in self._of(request.app_id):
            await self.close(server)
        self.servers = {
            id_: one for id_, one in self.servers.items() if one.app_id != request.app_id
        }
        return Empty()

    async def FunctionGet(self, request: Any) -> Any:
        layout = self.layouts.get(self.apps.get(request.app_name, ""))
        id_ = layout.function_ids.get(request.object_tag) if layout else None
        if id_ is None:
            raise GRPCError(Status.NOT_FOUND, f"No {request.app_name}/{request.object_tag}")
        return api.FunctionGetResponse(
            function_id=id_,
            handle_metadata=self._handle(id_),
            function=ranked(self.servers[id_].function),
        )

    async def ContainerHello(self, _: Any) -> Any:
        return Empty()

    async def ContainerHeartbeat(self, _: Any) -> Any:
        return api.ContainerHeartbeatResponse()

    async def ContainerServerLifecycleReady(self, _: Any) -> Any:
        return Empty()

    async def TaskResult(self, _: Any) -> Any:
        return Empty()

    async def VolumeCommit(self, _: Any) -> Any:
        return api.VolumeCommitResponse()

    def _of(self, app_id: str) -> list[Deployed]:
        return [server for server in self.servers.values() if server.app_id == app_id]

    def app_log(self, app_id: str) -> bytes:
        """Of all containers of an app, one after the other."""
        logs = (self.plane.folder / "containers").glob(f"{app_id}-*/log")
        return b"".join(path.read_bytes() for path in sorted(logs))

    async def _listen(self, server: Deployed) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(server, request)

        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", answer)
        server.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await server.runner.setup()
        await web.TCPSite(server.runner, HOST, 0, ssl_context=self.plane.tls).start()
        server.url = "https://{}:{}".format(*server.runner.addresses[0])

    async def _answer(self, server: Deployed, request: web.Request) -> web.StreamResponse:
        sent = (request.headers.get("Modal-Key"), request.headers.get("Modal-Secret"))
        if not server.function.http_config.unauthenticated and sent != self.plane.proxy_token:
            return web.Response(status=401, text="modal-http: missing credentials")
        if not server.listens:
            self.plane.watch(self._start_container(server))
            return web.Response(status=503, text="modal-http: no container")
        server.requests += 1
        try:
            return await self._pass_on(server, request)
        except aiohttp.ClientError:
            return web.Response(status=502, text="modal-http: the container does not answer")
        finally:
            server.requests -= 1
            server.idle_since = time.monotonic()

    async def _pass_on(self, server: Deployed, request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{server.port}{request.rel_url}"
        kept = {
            key: value for key, value in request.headers.items() if key.lower() not in OWN_HEADERS
        }
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session,
            session.request(
                request.method, url, headers=kept, data=await request.read(), allow_redirects=False
            ) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            for key, value in answer.headers.items():
                if key.lower() not in OWN_HEADERS:
                    response.headers[key] = value
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _start_container(self, server: Deployed) -> None:
        if server.starting.locked() or server.runs:
            return
        async with server.starting:
            server.starts += 1
            task, server.port = new_id("ta"), free_port()
            folder = f"{server.app_id}-{server.starts:03}"
            server.folder = self.plane.folder / "containers" / folder
            server.folder.mkdir(parents=True)
            self._place_code(server)
            arguments = server.folder / "arguments"
            [id_] = [id_ for id_, one in self.servers.items() if one is server]
            arguments.write_bytes(
                api.ContainerArguments(
                    task_id=task,
                    function_id=id_,
                    app_id=server.app_id,
                    function_def=server.function,
                    app_layout=self.layouts[server.app_id],
                    environment_name="main",
                ).SerializeToString()
            )
            environment = {
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "HOME": str(server.folder),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(server.folder),
                "MODAL_CONTAINER_ARGUMENTS_PATH": str(arguments),
                "MODAL_IS_REMOTE": "1",
                "MODAL_SERVER_URL": self.plane.environment["MODAL_SERVER_URL"],
                "MODAL_TASK_ID": task,
                "MODAL_IMAGE_ID": server.function.image_id,
            }
            opened = f'"port": {server.function.http_config.port}'
            for secret in server.function.secret_ids:
                for key, value in self.environments[secret].items():
                    environment[key] = value.replace(opened, f'"port": {server.port}')
            with (server.folder / "log").open("wb") as log:
                server.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "modal._container_entrypoint"),
                    cwd=server.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.plane.watch(self._watch_container(server, server.process))
            await self._wait_for_port(server)

    def _place_code(self, server: Deployed) -> None:
        for mount in server.function.mount_ids:
            for file in self.mounts.get(mount, []):
                path = server.folder / file.filename.removeprefix("/root/").lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files[file.sha256_hex])

    async def _wait_for_port(self, server: Deployed) -> None:
        give_up = time.monotonic() + server.function.http_config.startup_timeout
        while server.runs and not server.listens and time.monotonic() < give_up:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.close()
                server.idle_since, server.listens = time.monotonic(), True
            await asyncio.sleep(POLL_SECONDS)
        if not server.listens:
            await self.scale_down(server)

    async def _watch_container(self, server: Deployed, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            idle = server.listens and not server.requests
            if idle and time.monotonic() - server.idle_since > server.window:
                await self.scale_down(server)
            await asyncio.sleep(POLL_SECONDS)
        server.listens = False
        server.codes.append(process.returncode)
        with contextlib.suppress(ProcessLookupError):  # a container takes all its processes along
            os.killpg(process.pid, signal.SIGKILL)

    async def scale_down(self, server: Deployed) -> None:
        server.listens = False
        if server.process is None:
            return
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            server.process.terminate()
            await asyncio.wait_for(server.process.wait(), EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        await server.process.wait()

    async def close(self, server: Deployed) -> None:
        await self.scale_down(server)
        if server.runner is not None:
            await server.runner.cleanup()
