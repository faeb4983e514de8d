"""Functions of the plane in `modal_plane`, called with `.map`: their inputs go to containers, as
many at once as there are inputs, and come back as outputs.

An input whose container is lost is reported as such; Modal's client then sends it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_grpc
from modal_proto import api_pb2 as api

from .modal_containers import Container
from .modal_sandboxes import POLL_SECONDS, Result, claims, new_id, new_jwt

if TYPE_CHECKING:
    from .modal_plane import ModalPlane

MOST_CONTAINERS = 4
"""Of a function that does not say how many."""

Start = Callable[["Function", str], Awaitable[Container]]
"""Start a container that talks to that address."""


@dataclass
class Input:
    id: str
    call: Call
    index: int
    content: api.FunctionInput
    retry_count: int = 0


@dataclass
class Call:
    """One `.map`."""

    function: Function
    id: str = field(default_factory=lambda: new_id("fc"))
    inputs: dict[str, Input] = field(default_factory=dict)
    outputs: list[api.FunctionGetOutputsItem] = field(default_factory=list)

    def put(self, input_: Input, **output: Any) -> None:
        item = api.FunctionGetOutputsItem(
            idx=input_.index, input_id=input_.id, retry_count=input_.retry_count, **output
        )
        self.outputs.append(item)


@dataclass
class Function:
    plane: ModalPlane
    app_id: str
    definition: api.Function
    start: Start
    queue: deque[Input] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)
    starting: int = 0
    worked: list[api.FunctionPutOutputsItem] = field(default_factory=list)
    """What its containers handed in, with when they began and ended by their own clocks."""

    @property
    def is_up(self) -> bool:
        """Whether all containers that were started have asked for an input."""
        return not self.starting and all(worker.is_up for worker in self.workers)

    async def add(self, *inputs: Input) -> None:
        self.queue.extend(inputs)
        wanted = len(self.queue) + sum(worker.holds is not None for worker in self.workers)
        most = self.definition.autoscaler_settings.max_containers or MOST_CONTAINERS
        missing = min(wanted, most) - len(self.workers) - self.starting
        self.starting += max(0, missing)
        await asyncio.gather(*(self._start() for _ in range(missing)))

    async def _start(self) -> None:
        worker = Worker(self)
        url = await self.plane.serve(api_grpc.ModalClientBase, worker)
        worker.container = await self.start(self, url)
        self.workers.append(worker)
        self.starting -= 1
        self.plane.watch(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        assert worker.container is not None
        await worker.container.process.wait()
        self.workers.remove(worker)
        if (lost := worker.holds) is not None:
            failure = Result(status=Result.GENERIC_STATUS_INTERNAL_FAILURE, exception="lost")
            lost.call.put(lost, result=failure)

    async def close(self) -> None:
        self.queue.clear()
        containers = [worker.container for worker in self.workers if worker.container]
        await asyncio.gather(*(container.stop() for container in containers))


class Worker:
    """The calls of `ModalClient` that one container makes. Each has an address of its own for them,
    as at Modal it is that of the container's machine: nothing else tells containers apart."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.container: Container | None = None
        self.is_up = False
        self.holds: Input | None = None

    def authenticate(self, metadata: Any) -> None:
        if metadata.get("x-modal-client-type") != str(api.CLIENT_TYPE_CONTAINER):
            raise GRPCError(Status.UNAUTHENTICATED, "Not a container")

    async def ContainerHello(self, _: Any) -> Any:
        return Empty()

    async def ContainerHeartbeat(self, _: Any) -> Any:
        return api.ContainerHeartbeatResponse()

    async def TaskResult(self, request: Any) -> Any:
        """The container can't run the function at all: what waits for it fails."""
        while self.function.queue:
            input_ = self.function.queue.popleft()
            input_.call.put(input_, result=request.result)
        return Empty()

    async def FunctionGetInputs(self, _: Any) -> Any:
        function, self.is_up = self.function, True
        while not (function.queue and function.is_up):  # else the first would take all
            await asyncio.sleep(POLL_SECONDS)
        input_ = self.holds = function.queue.popleft()
        if function.plane.preemptions:
            function.plane.preemptions -= 1
            assert self.container is not None
            self.container.kill()
        item = api.FunctionGetInputsItem(
            input_id=input_.id,
            input=input_.content,
            function_call_id=input_.call.id,
            function_call_invocation_type=api.FUNCTION_CALL_INVOCATION_TYPE_SYNC,
            retry_count=input_.retry_count,
            function_map_idx=input_.index,
        )
        return api.FunctionGetInputsResponse(inputs=[item])

    async def FunctionPutOutputs(self, request: Any) -> Any:
        for output in request.outputs:
            assert self.holds is not None
            self.holds.call.put(self.holds, result=output.result, data_format=output.data_format)
            self.function.worked.append(output)
            self.holds = None
        return Empty()


class Calls:
    """The calls of `ModalClient` that a program makes which maps a function."""

    functions: dict[str, Function]

    def __init__(self) -> None:
        super().__init__()
        self.function_calls: dict[str, Call] = {}

    async def FunctionMap(self, request: Any) -> Any:
        if request.function_call_type != api.FUNCTION_CALL_TYPE_MAP or request.pipelined_inputs:
            raise GRPCError(Status.UNIMPLEMENTED, "this plane knows .map only")
        function = self.functions[request.function_id]
        call = Call(function)
        self.function_calls[call.id] = call
        return api.FunctionMapResponse(
            function_call_id=call.id,
            function_call_jwt=new_jwt(call=call.id),
            retry_policy=function.definition.retry_policy,
            sync_client_retries_enabled=True,
            max_inputs_outstanding=1000,
        )

    async def FunctionPutInputs(self, request: Any) -> Any:
        call = self.function_calls[request.function_call_id]
        inputs = [Input(new_id("in"), call, item.idx, item.input) for item in request.inputs]
        call.inputs |= {one.id: one for one in inputs}
        await call.function.add(*inputs)
        return api.FunctionPutInputsResponse(
            inputs=[
                api.FunctionPutInputsResponseItem(
                    idx=one.index, input_id=one.id, input_jwt=_jwt_of(one)
                )
                for one in inputs
            ]
        )

    async def FunctionRetryInputs(self, request: Any) -> Any:
        call = self.function_calls[claims(request.function_call_jwt)["call"]]
        again = []
        for item in request.inputs:
            input_ = call.inputs[claims(item.input_jwt)["input"]]
            input_.retry_count = item.retry_count
            again.append(input_)
        await call.function.add(*again)
        return api.FunctionRetryInputsResponse(input_jwts=map(_jwt_of, again))

    async def FunctionGetOutputs(self, request: Any) -> Any:
        call = self.function_calls[request.function_call_id]
        seen, give_up = int(request.last_entry_id.split("-")[0]), time.monotonic() + request.timeout
        while len(call.outputs) == seen and time.monotonic() < give_up:
            await asyncio.sleep(POLL_SECONDS)
        return api.FunctionGetOutputsResponse(
            outputs=call.outputs[seen:], last_entry_id=f"{len(call.outputs)}-0"
        )


def _jwt_of(input_: Input) -> str:
    return new_jwt(input=input_.id, idx=input_.index)
