"""Deployed and running apps of the plane in `modal_plane`, with their servers and functions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api

from . import modal_containers
from .modal_containers import Container
from .modal_functions import Calls, Function
from .modal_sandboxes import GPUS, Sandboxes, new_id
from .modal_servers import Server

if TYPE_CHECKING:
    from .modal_plane import ModalPlane


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


class Apps(Sandboxes, Calls):
    """The calls of `ModalClient` about mounts, apps and what is in them, from laptops and servers'
    containers."""

    plane: ModalPlane
    apps: dict[str, str]
    environments: dict[str, dict[str, str]]

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        """By digest."""
        self.mounts: dict[str, list[api.MountFile]] = {}
        self.layouts: dict[str, api.AppLayout] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.created: dict[str, float] = {}
        self.servers: dict[str, Server] = {}
        self.functions: dict[str, Function] = {}
        self.containers = 0
        self.restored: dict[str, Path] = {}
        """By checkpoint: what appears in a container that was made from it."""

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
            self.functions[id_] = Function(
                self.plane, request.app_id, function, self._start_function
            )
        elif (server := self.servers.get(id_)) is None:
            server = Server(self.plane, request.app_id, function, self._start_server)
            self.servers[id_] = server
            await server.listen()
        else:
            server.function = function
        return api.FunctionCreateResponse(
            function_id=id_,
            function=function,
            function_data=ranked(function),
            handle_metadata=self._handle(id_),
        )

    def _definition(self, id_: str) -> api.Function:
        server = self.servers.get(id_)
        return server.function if server else self.functions[id_].definition

    def _handle(self, id_: str) -> api.FunctionHandleMetadata:
        function, server = self._definition(id_), self.servers.get(id_)
        return api.FunctionHandleMetadata(
            function_name=function.function_name,
            function_type=function.function_type,
            app_id=server.app_id if server else self.functions[id_].app_id,
            _experimental_flash_urls=[server.url] if server else [],
        )

    async def AppPublish(self, request: Any) -> Any:
        self.tags.setdefault(request.app_id, {}).update(request.tags)
        if request.app_state == api.APP_STATE_DEPLOYED:
            self.apps[request.name] = request.app_id
            self.created.setdefault(request.app_id, time.time())
        needed = {
            dependency.object_id
            for function in request.function_ids.values()
            for dependency in self._definition(function).object_dependencies
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

    async def AppGetTags(self, request: Any) -> Any:
        return api.AppGetTagsResponse(tags=self.tags.get(request.app_id, {}))

    async def AppList(self, _: Any) -> Any:
        return api.AppListResponse(
            apps=[
                api.AppListResponse.AppListItem(
                    app_id=id_,
                    description=name,
                    name=name,
                    state=api.APP_STATE_DEPLOYED,
                    created_at=self.created.get(id_, 0.0),
                    n_running_tasks=sum(len(server.containers) for server in self._of(id_)),
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
        await self.end_all(request.app_id)
        for server in self._of(request.app_id):
            await server.close()
        for function in self.functions.values():
            if function.app_id == request.app_id:
                await function.close()
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
            function=ranked(self._definition(id_)),
        )

    async def FlashContainerList(self, request: Any) -> Any:
        server = self.servers[request.function_id]
        listed = api.FlashContainerListResponse.Container
        containers = [listed(port=one.port) for one in server.containers if one.listens]
        return api.FlashContainerListResponse(containers=containers)

    async def ContainerHello(self, _: Any) -> Any:
        return Empty()

    async def ContainerHeartbeat(self, _: Any) -> Any:
        return api.ContainerHeartbeatResponse()

    async def ContainerServerLifecycleReady(self, _: Any) -> Any:
        return Empty()

    async def ContainerCheckpoint(self, request: Any) -> Any:
        """The memory is not taken, and the container goes on as one does that was restored."""
        self.restored[request.checkpoint_id].write_text("{}")
        return Empty()

    async def TaskResult(self, _: Any) -> Any:
        return Empty()

    async def VolumeCommit(self, _: Any) -> Any:
        return api.VolumeCommitResponse()

    def _of(self, app_id: str) -> list[Server]:
        return [server for server in self.servers.values() if server.app_id == app_id]

    def app_log(self, app_id: str) -> bytes:
        """Of all containers of an app, one after the other."""
        logs = (self.plane.folder / "containers").glob(f"{app_id}-*/log")
        return b"".join(path.read_bytes() for path in sorted(logs))

    def _code(self, function: api.Function) -> dict[str, bytes]:
        """What is mounted, by path."""
        files = (file for mount in function.mount_ids for file in self.mounts.get(mount, []))
        return {file.filename: self.files[file.sha256_hex] for file in files}

    async def _start_container(
        self, app_id: str, function: api.Function, server_url: str, environment: dict[str, str]
    ) -> Container:
        layout = self.layouts[app_id]
        arguments = api.ContainerArguments(
            function_id=layout.function_ids[function.function_name],
            app_id=app_id,
            function_def=function,
            app_layout=layout,
            environment_name="main",
        )
        self.containers += 1
        folder = self.plane.folder / "containers" / f"{app_id}-{self.containers:03}"
        if function.checkpointing_enabled:
            arguments.function_def.is_checkpointing_function = True
            arguments.checkpoint_id = f"cp-{self.containers}"
            self.restored[arguments.checkpoint_id] = folder / "restored.json"
            environment = environment | {
                "MODAL_ENABLE_SNAP_RESTORE": "1",
                "MODAL_RESTORE_STATE_PATH": str(folder / "restored.json"),
            }
        code = self._code(function)
        return await modal_containers.start(folder, arguments, code, server_url, environment)

    async def _start_server(self, server: Server, port: int) -> Container:
        opened = f'"port": {server.function.http_config.port}'
        environment = {
            key: value.replace(opened, f'"port": {port}')
            for secret in server.function.secret_ids
            for key, value in self.environments[secret].items()
        }
        url = self.plane.environment["MODAL_SERVER_URL"]
        return await self._start_container(server.app_id, server.function, url, environment)

    async def _start_function(self, function: Function, url: str) -> Container:
        """It trusts the plane's authority, as it would trust the world's."""
        trusted = {"SSL_CERT_FILE": self.plane.environment["SSL_CERT_FILE"]}
        return await self._start_container(function.app_id, function.definition, url, trusted)
