"""What the server holds: one base model, a trainer and an engine over it, and many adapters.

The engine knows policies only (`project/model@17`), each loaded from a folder of its own. A plain
name is turned into the newest policy here, for each request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from art_cloud.shared.errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    StoreFullError,
)
from art_cloud.shared.names import ModelName, PolicyName
from art_cloud.shared.protocol import Durability, EngineName, ModelInfo, Sample
from art_cloud.store.base import NO_SPACE
from art_cloud.store.checkpoints import Checkpoints, Manifest, Writer
from art_cloud.store.opening import open_store

from ..inference import Engine, EngineStats
from ..inference.placement import Mode
from ..inference.vllm.process import find_python
from ..training import BaseModel, Trainer, load_base
from .canary import Canary
from .engines import make_engine
from .models import Models
from .stored_models import StoredModels

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NEW = (
    "The step was not made, and the one before it is still served. Repeat the call; if it fails "
    "again, restart the server and see its log (`art-cloud logs`)."
)
MOVED_BYTES = 16 << 20
"""So much read or written means that a download or an upload gets on, and is not a log's line."""
POLL_SECONDS = 1.0
FETCHED = (
    "It is not served. Was it trained on another base model of this name? Start the server with "
    "that one, or go on from another step."
)


@dataclass(frozen=True)
class Settings:
    state: Path
    store: str
    engine: EngineName = "transformers"
    vllm_python: str | None = None
    placement: Mode | None = None
    name: str = "server"
    """Of the cluster."""
    durability: Durability = "sync"
    read_only: bool = False
    """Serve what the store has; make nothing."""


def bytes_moved() -> int:
    """What this process has read and written, sockets not counted; 0 where Linux is not there to
    tell."""
    try:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))


class Runtime:
    """`base`, `trainer` and `engine` are there once `open_base` was awaited."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._vllm_python = find_python(settings.vllm_python) if settings.engine == "vllm" else None
        self.store = open_store(settings.store, create=not settings.read_only)
        self.cache = settings.state / "cache"
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir(parents=True)
        self.base: BaseModel | None = None
        self.loading_seconds: float | None = None
        self.models = Models()
        if settings.read_only:
            self.models = StoredModels(lambda name: self.checkpoints(name).newest(), self.open_base)
        self.writer = Writer(
            cluster=settings.name, host=socket.gethostname(), started_at=datetime.now(UTC)
        )
        self._trainer: Trainer | None = None
        self._engine: Engine | None = None
        self._canary: Canary | None = None
        self._in_use: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._in_training_thread = 0
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()
        self._training_thread = ThreadPoolExecutor(
            1, "training", torch.set_num_threads, (torch.get_num_threads(),)
        )

    async def close(self) -> None:
        self._training_thread.shutdown(wait=True)
        if self._engine is not None:
            await self._engine.close()

    async def train(self, step: Callable[[], T]) -> T:
        """A step of the trainer, in its thread, the engine asleep where both do not fit."""

        def run() -> T:
            try:
                return step()
            finally:
                if self.base is not None and self.base.device.type == "cuda":
                    torch.cuda.empty_cache()  # for the engine

        async with self.engine.asleep():
            return await self.in_training_thread(run)

    def in_training_thread(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Have it called there, after whatever was put there before."""
        loop = asyncio.get_running_loop()
        called = loop.run_in_executor(self._training_thread, lambda: function(*args, **kwargs))
        self._in_training_thread += 1
        called.add_done_callback(self._left_training_thread)
        return called

    def _left_training_thread(self, called: asyncio.Future[T]) -> None:
        self._in_training_thread -= 1

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise ConfigError("The server has no base model yet: register a model first.")
        return self._trainer

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("The server has no base model yet: register a model first.")
        return self._engine

    @property
    def base_name(self) -> str | None:
        return self.base.name if self.base else None

    @property
    def vocabulary(self) -> int:
        """The base model's number of token ids."""
        assert self.base is not None
        return int(self.base.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> str:
        return str(self.base.device) if self.base else "none yet"

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine else EngineStats(0, 0, 0, None)

    @property
    def sampling(self) -> bool:
        stats = self.stats()
        return stats.running + stats.waiting > 0

    @property
    def moved(self) -> int:
        """Another number whenever a job gets on: with what the trainer computes, with what is read
        and written, and, unless the trainer is at work, with what the engine does for it."""
        trained = self._trainer.computed if self._trainer else 0
        waited_for = 0 if self._in_training_thread else self.stats().moved
        return trained + waited_for + bytes_moved() // MOVED_BYTES

    async def engine_ended(self) -> ArtCloudError:
        """Wait until the engine has ended for good, and return why."""
        while True:
            if self._engine is not None and (error := self._engine.ended) is not None:
                return error
            await asyncio.sleep(POLL_SECONDS)

    @property
    def policies(self) -> list[str]:
        return list(self._in_use)

    def steps_in_use(self, name: ModelName) -> set[int]:
        """The steps of a model that requests are being answered from."""
        busy = (PolicyName.parse(policy) for policy, users in self._in_use.items() if users)
        return {policy.step for policy in busy if policy.model == name}

    async def open_base(self, name: str) -> None:
        """Load the base model, unless it is loaded. One server holds one."""
        if self.base_name not in (None, name):
            raise ConflictError(
                f"This server holds {self.base_name}, and {name} was asked for. One server holds "
                "one base model: start another server for it."
            )
        if self.base is None:
            log.info("loading %s", name)
            started = time.monotonic()
            base = await self.in_training_thread(load_base, name)
            self._canary = Canary(base)
            trainer = Trainer(base)
            engine = make_engine(
                base, trainer.token_budget, self._vllm_python, self.settings.placement
            )
            self._engine = engine  # so that what it does meanwhile is seen
            try:
                await engine.start()
            except BaseException:
                self._engine = None
                raise
            self.base, self._trainer = base, trainer
            self.loading_seconds = time.monotonic() - started
            log.info("%s is loaded on %s", name, base.device)

    @property
    def canary(self) -> Canary:
        assert self._canary is not None
        return self._canary

    def checkpoints(self, name: ModelName) -> Checkpoints:
        return Checkpoints(self.store, name)

    def newest(self, name: ModelName) -> Manifest:
        """The newest step of a registered model, unless another server has trained it."""
        return self.models.newest(name)

    def info(self, name: ModelName) -> ModelInfo:
        manifest = self.newest(name)
        assert self.base is not None
        return ModelInfo(
            project=name.project,
            model=name.model,
            base_model=manifest.base_model,
            step=manifest.step,
            policy=manifest.policy,
            context_length=self.base.context_length,
        )

    def names(self) -> list[str]:
        """Every name that a request can be for: the base, each model, and its loaded policies."""
        return [*([self.base.name] if self.base else []), *self.models.names(), *self._in_use]

    def folder(self, manifest: Manifest, kind: str = "steps") -> Path:
        """A path of its own for each step, also for one that is made again by another call."""
        step = f"{manifest.step:06d}-{manifest.call_id}"
        return self.cache / kind / manifest.project / manifest.model / step

    def fetch(self, manifest: Manifest) -> Path:
        """The step's files on this machine; where nothing is trained, those that are served."""
        folder = self.folder(manifest)
        folder.parent.mkdir(parents=True, exist_ok=True)
        only = "adapter/" if self.settings.read_only else ""
        return self.checkpoints(manifest.name).fetch(manifest, folder, only=only)

    def fetch_reference(self, name: ModelName, step: int) -> Path:
        """The adapter that a KL penalty pulls towards, where no unloading removes it."""
        manifest = self.checkpoints(name).read(step)
        folder = self.folder(manifest, "references")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return self.checkpoints(name).fetch(manifest, folder, only="adapter/") / "adapter"

    @asynccontextmanager
    async def policy(self, requested: str) -> AsyncIterator[str | None]:
        """The policy that a request's `model` means now, kept loaded meanwhile; None is the base.

        Raises `NotFoundError` that says which names exist.
        """
        if self.base is not None and requested == self.base.name:
            yield None
            return
        manifest = await self._find(requested)
        await self.load(manifest)
        self.hold(manifest.policy)
        try:
            yield manifest.policy
        finally:
            self.release(manifest.policy)

    def hold(self, policy: str) -> None:
        """Keep a policy loaded, and its folder, until it is released."""
        self._in_use[policy] = self._in_use.pop(policy) + 1  # used last

    def release(self, policy: str) -> None:
        self._in_use[policy] -= 1
        if not self._in_use[policy]:
            self._released.set()

    async def _find(self, requested: str) -> Manifest:
        try:
            if "@" in requested:
                name = PolicyName.parse(requested)
                await self.models.settled(name.model)
                newest = self.models.known(name.model)
                if newest.step == name.step:
                    return newest
                steps = self.checkpoints(name.model)
                loaded = requested in self._in_use  # then it is served, be it removed meanwhile
                manifest = await asyncio.to_thread(
                    steps.record if loaded else steps.read, name.step
                )
                if manifest.step > newest.step:
                    raise NotFoundError(
                        f"{requested} was made by another server; this one is at step "
                        f"{newest.step}. Register the model again to go on from there."
                    )
                return manifest
            model = ModelName.parse(requested)
            await self.models.settled(model)
            return self.models.newest(model)
        except ConfigError:
            raise NotFoundError(
                f"The model {requested!r} does not exist. There are: {', '.join(self.names())}."
            ) from None

    async def load(self, manifest: Manifest) -> None:
        """Let the engine serve a step, unless it does already."""
        if manifest.policy in self._in_use:
            return
        async with self._loading:
            if manifest.policy in self._in_use:
                return
            if manifest.base_model != self.base_name:
                raise InvalidRequestError(
                    f"{manifest.policy} is an adapter of {manifest.base_model}; this server holds "
                    f"{self.base_name}. Start a server with that base model."
                )
            await self._make_room()
            folder = await asyncio.to_thread(self.fetch, manifest)
            try:
                await self.engine.load(manifest.policy, folder / "adapter")
                if manifest.probe:
                    sample = await self.canary.sample(self.engine, manifest.policy)
                    self.canary.compare(sample, manifest.probe, FETCHED)
            except BaseException:
                await self._remove(manifest.policy, folder)
                raise
            self._folders[manifest.policy] = folder
            self._in_use[manifest.policy] = 0

    @asynccontextmanager
    async def new_step(self, draft: Manifest) -> AsyncIterator[Path]:
        """A slot of the engine and a folder for the files of a step that is not counted yet.

        If the block fails, both the engine and the cache forget the step. Raises `StoreFullError`
        if there is no space for its files.
        """
        async with self._loading:
            await self._make_room()
            self._in_use[draft.policy] = 1
            self._folders[draft.policy] = folder = self.folder(draft)
        try:
            folder.mkdir(parents=True)
            yield folder
        except BaseException as error:
            self._in_use[draft.policy] = 0
            await self.unload(draft.policy)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise StoreFullError(
                    f"No space left for {draft.policy} in {self.cache} ({error.strerror}): the "
                    "step was not made. Free some space on the server's disk and repeat."
                ) from error
            raise
        self.release(draft.policy)

    async def serve(self, draft: Manifest, expected: Awaitable[dict[int, float]]) -> float:
        """Let the engine serve the adapter of a `new_step`; how far it is from what is `expected`.

        Raises `CanaryError` if the engine serves other weights.
        """

        async def sample() -> Sample:
            await self.engine.load(draft.policy, self._folders[draft.policy] / "adapter")
            return await self.canary.sample(self.engine, draft.policy)

        return self.canary.compare(*await asyncio.gather(sample(), expected), NEW)

    async def unload(self, policy: str) -> None:
        """Stop serving a step, unless a request uses it or the engine does not serve it."""
        async with self._loading:
            await self._unload(policy)

    async def make_room(self) -> None:
        """Before a new step is there: then it need not wait for it."""
        async with self._loading:
            await self._make_room()

    async def _make_room(self) -> None:
        """Before a load: drop what was used longest ago, the newest steps of the models last, never
        one in use; where all are, wait for one."""
        while len(self._in_use) >= self.engine.slots:
            newest = self.models.policies()
            idle = [policy for policy, users in self._in_use.items() if not users]
            if idle:
                await self._unload(min(idle, key=lambda policy: policy in newest))
            else:
                log.info("all %d slots of the engine are in use: waiting", self.engine.slots)
                self._released.clear()
                await self._released.wait()

    async def _unload(self, policy: str) -> None:
        if self._in_use.get(policy) == 0:
            del self._in_use[policy]
            await self._remove(policy, self._folders.pop(policy))

    async def _remove(self, policy: str, folder: Path) -> None:
        if policy in self.engine.policies():
            await self.engine.unload(policy)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@functools.cache
def package_versions() -> dict[str, str]:
    return {name: version(name) for name in ("art-cloud", "torch", "transformers", "peft")}
