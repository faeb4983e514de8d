"""The engine `vllm`: a vLLM server of its own, and a proxy to it that says what was sampled."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from transformers import PreTrainedModel

from art_cloud.shared.errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    ServerError,
    ServerStoppingError,
    ServerUnavailableError,
)

from ..adapters import check_adapter
from ..engine import EngineStats, Route, not_loaded
from ..openai.prompt_length import is_long
from .bodies import Call, events, known_parameters, prepare, refused
from .process import BASE, VllmProcess, VllmSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

ROUTES: tuple[Route, ...] = ("chat/completions", "completions")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""
OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a connection that this process causes, not vLLM: it has too few descriptors or
buffers."""
COUNT_SECONDS = 5.0
"""How often vLLM's count of tokens is read."""
STARTS = 3
"""How often in a row vLLM may fail to come back before its engine gives up."""


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


class NotReachedError(ServerUnavailableError):
    """vLLM did not get the request."""


@dataclass
class Adapter:
    folder: Path
    alias: str
    """The adapter's name in vLLM. No name is used twice: vLLM's prefix cache goes by name and path,
    and must not answer with keys and values of an adapter that had the same policy and folder
    before."""
    users: int = 0
    retired: bool = False


class VllmEngine:
    """`art_server.inference.engine.Engine` on a vLLM server.

    When vLLM dies, it is started again with the policies that were loaded: requests in flight fail
    with `ServerUnavailableError`, those that come meanwhile wait.
    """

    name = "vllm"

    def __init__(self, settings: VllmSettings, model: PreTrainedModel, name: str) -> None:
        """`model` is what vLLM will serve, known to clients as `name`; its shapes are kept."""
        self.settings = settings
        self.slots = settings.slots
        self._base_model_name = name
        self._shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        self._process = VllmProcess(settings)
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[Route, frozenset[str]] = {}
        self._adapters: dict[str, Adapter] = {}
        self._loads = 0
        self._loading = asyncio.Lock()
        self._ready = asyncio.Event()
        """Set while no request has to wait: vLLM answers, or the engine has ended for good."""
        self._reason: str | None = "vLLM is starting"
        self._ended: ArtCloudError | None = None
        self._idle = asyncio.Event()
        self._power = asyncio.Lock()
        """Held while vLLM is put to sleep, woken or started."""
        self._watching: asyncio.Task[None] | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
        self._running = self._waiting = self._tokens_generated = 0
        self._moved = 0
        self._counting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._launch()
        self._open()
        self._watching = asyncio.create_task(self._watch())
        self._counting = asyncio.create_task(self._count())

    async def close(self) -> None:
        self._ended = ServerStoppingError("The inference engine stops. Ask again when it is back.")
        self._ready.set()
        for task in (self._watching, self._counting):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._session is not None:
            await self._session.close()
            await self._process.end()

    async def load(self, policy: str, adapter: Path) -> None:
        folder = await asyncio.to_thread(adapter.resolve)
        async with self._loading:
            if (there := self._adapters.get(policy)) is not None:
                if there.folder == folder:
                    return
                raise ConflictError(
                    f"Policy {policy!r} is loaded from another folder. A name always means one set "
                    "of weights: load this one under a new step."
                )
            rank = await asyncio.to_thread(check_adapter, folder, self._shapes)
            if rank > self.settings.max_rank:
                await self._raise_rank(policy, rank)
            if len(self._adapters) >= self.slots:
                raise ConflictError(
                    f"All {self.slots} slots of vLLM are taken. Unload a policy before {policy}."
                )
            self._loads += 1
            loaded = Adapter(folder, f"{policy}#{self._loads}")
            await self._reach(lambda: self._load(loaded), again=ServerUnavailableError)
            self._adapters[policy] = loaded

    async def unload(self, policy: str) -> None:
        if (adapter := self._adapters.pop(policy, None)) is None:
            raise not_loaded(policy)
        adapter.retired = True
        if not adapter.users:
            await self._forget(adapter)

    def policies(self) -> list[str]:
        return sorted(self._adapters)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        if not self.settings.can_sleep:
            yield
            return
        async with self._power:
            self._hold("the trainer has the memory")
            await self._until_idle()
            try:
                async with self._post("/sleep?level=1"):
                    yield
            finally:
                with suppress(ServerUnavailableError):  # whoever watches starts it again
                    async with self._post("/wake_up"):
                        self._open()

    def stats(self) -> EngineStats:
        waits = self._waiting > 0
        return EngineStats(
            running=self._running,
            waiting=self._waiting,
            tokens_generated=self._tokens_generated,
            reason=self._reason if waits else None,
            moved=self._moved + self._process.said,
        )

    @property
    def ended(self) -> ArtCloudError | None:
        return self._ended

    async def create(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> dict[str, Any]:
        call = await self._prepare(route, body, policy, stream=False)
        async with self._send(call, policy) as response:
            answer = call.whole(json.loads(await response.read()))
        self._tokens_generated += answer["usage"]["completion_tokens"]
        return answer

    async def stream(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        call = await self._prepare(route, body, policy, stream=True)
        async with self._send(call, policy) as response:
            async for event in events(response.content.iter_any()):
                self._moved += 1
                if "error" in event:
                    raise ServerError(f"vLLM failed while it answered: {event['error']}.")
                for chunk in call.chunks(event):
                    for choice in chunk["choices"]:
                        if "sample" in choice:
                            self._tokens_generated += len(choice["sample"]["completion_ids"])
                    yield chunk

    async def _prepare(
        self, route: Route, body: dict[str, Any], policy: str | None, *, stream: bool
    ) -> Call:
        if isinstance(self._ended, ServerStoppingError):
            raise self._ended
        work = partial(
            prepare,
            route,
            body,
            policy or self._base_model_name,
            known=self._known[route],
            context_length=self.settings.context_length,
            stream=stream,
        )
        return await asyncio.to_thread(work) if is_long(body) else work()

    @asynccontextmanager
    async def _send(self, call: Call, policy: str | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a call; return vLLM's answer with status 200. The policy stays loaded meanwhile."""
        adapter = None
        if policy is not None and (adapter := self._adapters.get(policy)) is None:
            raise not_loaded(policy)
        if adapter is not None:
            adapter.users += 1
        try:
            call.payload["model"] = adapter.alias if adapter else BASE
            async with AsyncExitStack() as stack:
                yield await self._reach(lambda: self._answer(call, stack), choices=call.choices)
        finally:
            if adapter is not None:
                adapter.users -= 1
                if adapter.retired and not adapter.users:
                    self._in_background(self._forget(adapter))

    async def _answer(self, call: Call, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        stack.enter_context(self._in_flight(call.choices))
        return await stack.enter_async_context(self._post(f"/v1/{call.route}", call.payload))

    @contextmanager
    def _in_flight(self, choices: int) -> Iterator[None]:
        self._running += choices
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= choices
            if not self._running:
                self._idle.set()

    async def _reach(
        self,
        reach: Callable[[], Awaitable[T]],
        *,
        choices: int = 0,
        again: type[ServerUnavailableError] = NotReachedError,
    ) -> T:
        """Wait for vLLM and `reach` it; `again` if it was not there, or went away like this."""
        while True:
            await self._up(choices)
            with suppress(again):
                return await reach()

    @asynccontextmanager
    async def _post(
        self, path: str, content: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        process = self._process
        data = None
        if content is not None:
            data = await asyncio.to_thread(_dump, content) if is_long(content) else _dump(content)
        try:
            async with self._session.post(
                path, data=data, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise await self._refusal(process, response)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(process, error) from error

    async def _refusal(
        self, process: VllmProcess, response: aiohttp.ClientResponse
    ) -> ArtCloudError:
        text = await response.text()
        try:
            error = json.loads(text)["error"]
        except (ValueError, LookupError, TypeError):
            error = {"message": text[:500]}
        if response.status < 500:
            return refused(response.status, error)
        if "EngineDead" in text or "EngineCore" in text:
            return self._lost(process, None)
        return ServerError(f"vLLM failed ({response.status}): {error.get('message')}")

    def _lost(self, process: VllmProcess, error: Exception | None) -> ArtCloudError:
        if self._ended is not None:
            return self._ended
        if isinstance(error, OSError) and error.errno in OUR_OWN:
            return ServerError(f"The server can't ask vLLM: {error}. Send fewer requests at once.")
        self._give_up(process)
        if isinstance(error, aiohttp.ClientConnectorError) or (
            isinstance(error, OSError) and error.errno == errno.EPIPE
        ):
            return NotReachedError("vLLM is not there. It is being started again.")
        log.warning("a request was lost with vLLM: %s", error or "its engine died")
        return ServerUnavailableError(
            "vLLM went away while it answered this request. It is being started again: send the "
            "request again."
        )

    async def _up(self, choices: int = 0) -> None:
        """Wait until vLLM answers."""
        self._waiting += choices
        try:
            while not self._ready.is_set():
                await self._ready.wait()
        finally:
            self._waiting -= choices
        if self._ended is not None:
            raise self._ended

    async def _count(self) -> None:
        """Follow how many tokens vLLM has read and sampled, unfinished answers included."""
        tokens = 0.0
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            if self._running and self._session is not None:
                with suppress(aiohttp.ClientError, OSError):  # a timeout is an OSError
                    seen = await self._process.tokens(self._session)
                    self._moved += seen != tokens
                    tokens = seen

    def _open(self) -> None:
        self._moved += 1
        self._reason = None
        self._ready.set()

    def _give_up(self, process: VllmProcess) -> None:
        """End a vLLM that can't be used, so that it is started again."""
        if process is self._process:
            self._hold("vLLM is being started again")
            process.kill()

    def _hold(self, reason: str) -> None:
        self._reason = reason
        self._ready.clear()

    async def _until_idle(self) -> None:
        """Wait until nothing is in flight; to be called while requests are held."""
        while self._running:
            await self._idle.wait()

    async def _raise_rank(self, policy: str, rank: int) -> None:
        """Start vLLM again with room for adapters of this rank."""
        enough = [known for known in RANKS if known >= rank]
        if not enough:
            raise ConfigError(f"{policy} has rank {rank}; vLLM serves up to {RANKS[-1]}.")
        async with self._power:
            log.info("%s has rank %d: vLLM is started again for that", policy, rank)
            self._hold(f"vLLM is being started again for rank {rank}")
            await self._until_idle()
            self.settings = replace(self.settings, max_rank=enough[0])
            self._process.kill()

    async def _load(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.alias, "lora_path": str(adapter.folder)}
        try:
            async with self._post("/v1/load_lora_adapter", body):
                pass
        except ServerUnavailableError:
            raise
        except ServerError as error:
            raise ConfigError(
                f"{adapter.folder} is no adapter of this base model: {error}"
            ) from error

    async def _forget(self, adapter: Adapter) -> None:
        with suppress(ServerError, InvalidRequestError):  # a vLLM that went away has forgotten it
            async with self._post("/v1/unload_lora_adapter", {"lora_name": adapter.alias}):
                pass

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _launch(self) -> None:
        await self._process.start()
        self._session = self._process.session()
        async with self._session.get("/openapi.json") as response:
            schema = json.loads(await response.read())
        self._known = {route: known_parameters(schema, route) for route in ROUTES}
        for adapter in self._adapters.values():
            await self._load(adapter)

    async def _watch(self) -> None:
        """Start vLLM again whenever it ends."""
        while True:
            code = await self._process.wait()
            log.error(
                "vLLM ended with exit code %s and is started again. Its last lines:\n%s",
                code,
                self._process.last_lines(),
            )
            self._hold("vLLM is being started again")
            async with self._power:
                await self._restart()
            self._open()
            if self._ended is not None:
                return

    async def _restart(self) -> None:
        for attempt in range(STARTS):
            assert self._session is not None
            await self._session.close()
            await self._process.end()
            self._process = VllmProcess(self.settings)
            try:
                return await self._launch()
            except (ArtCloudError, aiohttp.ClientError, OSError) as error:
                log.error("start %d of %d failed: %s", attempt + 1, STARTS, error)
                failure: Exception = error
        self._ended = ServerUnavailableError(f"vLLM does not come back. {failure}")
