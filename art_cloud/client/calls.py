"""The calls that make steps: each counted once, over servers that come and go.

A call is kept, with the id that makes it count once, until its step is in the store. A server that
is new to a model is handed what it lacks, in order, before anything else is asked of it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from uuid import uuid4

from pydantic import BaseModel, RootModel, ValidationError

from ..shared.errors import ArtCloudError, NotFoundError, RivalError, ServerError
from ..shared.names import ModelName
from ..shared.progress import Bar, progress, say, say_once
from ..shared.protocol import (
    CheckpointInfo,
    ErrorBody,
    JobEvent,
    JobInfo,
    RegisterRequest,
    StepResult,
    finite,
)
from ..shared.validation import complaint
from .http import ServerClient, error_of, parse, path_of

RESUBMISSIONS = 10
"""How often a call is sent again to servers that replaced the one that knew it."""
ASK_SECONDS = 0.2
"""How long to wait between two questions whether a step is durable."""

CheckpointList = RootModel[list[CheckpointInfo]]


@dataclass
class _Call:
    method: str
    path: str
    content: BaseModel | bytes
    id: str = field(default_factory=lambda: uuid4().hex)
    result: StepResult | None = None


class Calls:
    """Makes the calls of one client that count once."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._registered: dict[ModelName, RegisterRequest] = {}
        self._kept: dict[ModelName, list[_Call]] = defaultdict(list)

    async def register(self, name: ModelName, request: RegisterRequest) -> StepResult:
        """Have the server load the model, or begin it; then send it the calls that it lacks."""
        with progress(f"register {name.model}") as bar:
            result = await self._register(self._server, name, request, bar)
        self._registered[name] = request
        return result

    async def make_step(
        self, name: ModelName, kind: str, content: BaseModel | bytes, description: str
    ) -> StepResult:
        """Send a call that makes a step, show its progress, and return its result."""
        call = _Call("POST", f"{path_of(name)}/{kind}", content)
        with progress(description) as bar:
            try:
                call.result = await self._make(name, call, bar)
            except RivalError:
                self._kept[name].clear()  # whatever was on its way has lost its number
                raise
        if not call.result.durable:
            self._kept[name].append(call)
        return call.result

    async def ask(
        self, name: ModelName, method: str, path: str, content: BaseModel | None = None
    ) -> bytes:
        """Ask about a model; a server that was started again is told of it first."""
        try:
            return await self._server.call(method, path, content)
        except NotFoundError:
            if name not in self._registered:
                raise
        with progress(f"register {name.model}") as bar:
            await self._register(self._server, name, self._registered[name], bar)
        return await self._server.call(method, path, content)

    async def _make(self, name: ModelName, call: _Call, bar: Bar) -> StepResult:
        for attempt in count(1):
            try:
                await self._release_durable(name)
                after = self._kept[name][-1].id if self._kept[name] else None
                return await self._run(self._server, call, bar, after)
            except NotFoundError:
                if attempt == RESUBMISSIONS or name not in self._registered:
                    raise
                await self._register(self._server, name, self._registered[name], bar)
        raise AssertionError

    async def go_on_at(self, server: ServerClient) -> None:
        """Hand the models and kept calls of this client to another server, which its calls will go
        to from now on."""
        for name, request in self._registered.items():
            with progress(f"register {name.model}") as bar:
                await self._register(server, name, request, bar)

    async def close(self) -> None:
        """Wait until all steps that were made are durable; say so of those that are not."""
        for name, kept in self._kept.items():
            try:
                while kept:
                    await self._see_durable(name)
            except ArtCloudError as error:
                policies = ", ".join(call.result.policy for call in kept if call.result)
                say(f"{policies}: not known to be in the store: {error}")
                kept.clear()

    async def _run(
        self, server: ServerClient, call: _Call, bar: Bar, after: str | None = None
    ) -> StepResult:
        """Send a call, follow its job to the end, and return its result.

        Raises:
            NotFoundError: the server does not know the model, the call `after` which this one
                comes or, any more, the job.
        """
        sent = await server.call(call.method, call.path, call.content, call_id=call.id, after=after)
        job = parse(JobInfo, sent)
        async for event in server.events(job.id):
            _show(bar, event)
        return _result(event)

    async def _register(
        self, server: ServerClient, name: ModelName, request: RegisterRequest, bar: Bar
    ) -> StepResult:
        for attempt in count(1):
            try:
                found = await self._run(server, _Call("PUT", path_of(name), request), bar)
                return await self._replay(server, name, found, bar) if self._kept[name] else found
            except NotFoundError:
                if attempt == RESUBMISSIONS:
                    raise
        raise AssertionError

    async def _replay(
        self, server: ServerClient, name: ModelName, found: StepResult, bar: Bar
    ) -> StepResult:
        """Send again the kept calls that the server, whose newest step is `found`, lacks."""
        listed = await server.call("GET", f"{path_of(name)}/checkpoints")
        there = {info.call_id for info in parse(CheckpointList, listed).root}
        lacking = [call for call in self._kept[name] if call.id not in there]
        for call in lacking:
            assert call.result is not None
            if call.result.step != found.step + 1:
                self._kept[name].clear()
                raise RivalError(
                    f"{call.result.policy} was made by this program, and its server was lost "
                    f"before the step was in the store. Now {name} is at step {found.step}: "
                    "somebody else trained it meanwhile. Go on from there by registering it "
                    "again, or fork an earlier step."
                )
            say(f"{call.result.policy} was not durable when its server was lost: made again.")
            found = call.result = await self._run(server, call, bar)
        self._kept[name][:] = [c for c in lacking if c.result and not c.result.durable]
        return found

    async def _release_durable(self, name: ModelName) -> None:
        """Forget the kept calls whose steps are in the store.

        Raises:
            NotFoundError: the server does not know one of them: it is another one.
        """
        for call in list(self._kept[name]):
            if not (await self._job(call)).durable:
                return
            if call in self._kept[name]:  # else a new server was handed it meanwhile
                self._kept[name].remove(call)

    async def _see_durable(self, name: ModelName) -> None:
        """Ask once more whether the steps are durable; raise the error of one that won't be."""
        try:
            await self._release_durable(name)
            if kept := self._kept[name]:
                if (error := (await self._job(kept[0])).error) is not None:
                    raise error_of(error)
                await asyncio.sleep(ASK_SECONDS)
        except NotFoundError:
            if name not in self._registered:
                raise
            with progress(f"register {name.model}") as bar:
                await self._register(self._server, name, self._registered[name], bar)

    async def _job(self, call: _Call) -> JobInfo:
        return parse(JobInfo, await self._server.call("GET", f"jobs/{call.id}"))


def _result(last: JobEvent) -> StepResult:
    """The result in a job's last event; an event that the job failed is raised."""
    try:
        if last.type == "failed":
            raise error_of(ErrorBody.model_validate(last.data))
        return StepResult.model_validate(last.data)
    except ValidationError as error:
        raise ServerError(
            f"The server's last word on a job is not understood: {complaint(error)}. Are client "
            "and server of the same version?"
        ) from error


def _show(bar: Bar, event: JobEvent) -> None:
    """Show a `progress` event, which carries `phase`, `done` of `total`, and perhaps `metrics`."""
    data = event.data
    if "warning" in data:
        say_once(str(data["warning"]))
    if event.type == "warning":
        return
    words = [str(data.get("phase", event.type))]
    if isinstance(metrics := data.get("metrics"), dict) and event.type == "progress":
        words += [f"{name} {value:.4g}" for name, value in finite(metrics).items()]
    bar.update(data.get("done"), data.get("total"), ", ".join(words))
