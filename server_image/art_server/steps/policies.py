"""The policies that the engine serves: their slots and folders, and who uses them.

The engine knows policies only (`project/model@17`), each loaded from a folder of its own. A plain
name is turned into the newest policy here, for each request.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

from art_cloud.shared.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    StoreFullError,
)
from art_cloud.shared.names import ModelName, PolicyName
from art_cloud.shared.protocol import Sample
from art_cloud.store.base import NO_SPACE
from art_cloud.store.checkpoints import Manifest

from .compute import Compute
from .models import Models

log = logging.getLogger(__name__)

NEW = (
    "The step was not made, and the one before it is still served. Repeat the call; if it fails "
    "again, restart the server and see its log (`art-cloud logs`)."
)
FETCHED = (
    "It is not served. Was it trained on another base model of this name? Start the server with "
    "that one, or go on from another step."
)


class Policies:
    """Each loaded policy has a slot of the engine, and a folder in `cache` that goes with it.

    `only` is the beginning of the files' paths that are fetched of a step.
    """

    def __init__(self, compute: Compute, models: Models, cache: Path, *, only: str = "") -> None:
        self.cache = cache
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        self._compute = compute
        self._models = models
        self._only = only
        self._in_use: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()

    def loaded(self) -> list[str]:
        return list(self._in_use)

    def names(self) -> list[str]:
        """Every name that a request can be for: the base, each model, and its loaded policies."""
        base = self._compute.base_name
        return [*([base] if base else []), *self._models.names(), *self._in_use]

    def steps_in_use(self, name: ModelName) -> set[int]:
        """The steps of a model that requests are being answered from."""
        busy = (PolicyName.parse(policy) for policy, users in self._in_use.items() if users)
        return {policy.step for policy in busy if policy.model == name}

    def fetch(self, manifest: Manifest) -> Path:
        """The step's files on this machine; where nothing is trained, those that are served."""
        return self._fetch(manifest, "steps", self._only)

    def fetch_reference(self, name: ModelName, step: int) -> Path:
        """The adapter that a KL penalty pulls towards, where no unloading removes it."""
        manifest = self._models.checkpoints(name).read(step)
        return self._fetch(manifest, "references", "adapter/") / "adapter"

    def _fetch(self, manifest: Manifest, kind: str, only: str) -> Path:
        folder = self._folder(manifest, kind)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return self._models.checkpoints(manifest.name).fetch(manifest, folder, only=only)

    def _folder(self, manifest: Manifest, kind: str = "steps") -> Path:
        """A path of its own for each step, also for one that is made again by another call."""
        step = f"{manifest.step:06d}-{manifest.call_id}"
        return self.cache / kind / manifest.project / manifest.model / step

    @asynccontextmanager
    async def asked_for(self, requested: str) -> AsyncIterator[str | None]:
        """The policy that a request's `model` means now, kept loaded meanwhile; None is the base.

        Raises `NotFoundError` that says which names exist.
        """
        if requested == self._compute.base_name:
            yield None
            return
        manifest = await self._find(requested)
        await self.load(manifest)
        self.hold(manifest.policy)
        try:
            yield manifest.policy
        finally:
            self.release(manifest.policy)

    async def _find(self, requested: str) -> Manifest:
        try:
            if "@" in requested:
                name = PolicyName.parse(requested)
                await self._models.until_known(name.model)
                newest = self._models.get(name.model).known
                if newest.step == name.step:
                    return newest
                steps = self._models.checkpoints(name.model)
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
            await self._models.until_known(model)
            return self._models.newest(model)
        except ConfigError:
            raise NotFoundError(
                f"The model {requested!r} does not exist. There are: {', '.join(self.names())}."
            ) from None

    def hold(self, policy: str) -> None:
        """Keep a policy loaded, and its folder, until it is released."""
        self._in_use[policy] = self._in_use.pop(policy) + 1  # used last

    def release(self, policy: str) -> None:
        self._in_use[policy] -= 1
        if not self._in_use[policy]:
            self._released.set()

    async def load(self, manifest: Manifest) -> None:
        """Let the engine serve a step, unless it does already."""
        if manifest.policy in self._in_use:
            return
        async with self._loading:
            if manifest.policy in self._in_use:
                return
            if manifest.base_model != self._compute.base_name:
                raise InvalidRequestError(
                    f"{manifest.policy} is an adapter of {manifest.base_model}; this server holds "
                    f"{self._compute.base_name}. Start a server with that base model."
                )
            await self._make_room()
            folder = await asyncio.to_thread(self.fetch, manifest)
            engine, canary = self._compute.engine, self._compute.canary
            try:
                await engine.load(manifest.policy, folder / "adapter")
                if manifest.probe:
                    sample = await canary.sample(engine, manifest.policy)
                    canary.compare(sample, manifest.probe, FETCHED)
            except BaseException:
                await self._remove(manifest.policy, folder)
                raise
            self._folders[manifest.policy] = folder
            self._in_use[manifest.policy] = 0

    @asynccontextmanager
    async def new(self, draft: Manifest) -> AsyncIterator[Path]:
        """A slot of the engine and a folder for the files of a step that is not counted yet.

        If the block fails, both the engine and the cache forget the step. Raises `StoreFullError`
        if there is no space for its files.
        """
        async with self._loading:
            await self._make_room()
            self._in_use[draft.policy] = 1
            self._folders[draft.policy] = folder = self._folder(draft)
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
        """Let the engine serve the adapter of a `new` policy; how far it is from what is
        `expected`, in nats.

        Raises `CanaryError` if the engine serves other weights.
        """
        engine, canary = self._compute.engine, self._compute.canary

        async def sample() -> Sample:
            await engine.load(draft.policy, self._folders[draft.policy] / "adapter")
            return await canary.sample(engine, draft.policy)

        return canary.compare(*await asyncio.gather(sample(), expected), NEW)

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
        slots = self._compute.engine.slots
        while len(self._in_use) >= slots:
            newest = self._models.policies()
            idle = [policy for policy, users in self._in_use.items() if not users]
            if idle:
                await self._unload(min(idle, key=lambda policy: policy in newest))
            else:
                log.info("all %d slots of the engine are in use: waiting", slots)
                self._released.clear()
                await self._released.wait()

    async def _unload(self, policy: str) -> None:
        if self._in_use.get(policy) == 0:
            del self._in_use[policy]
            await self._remove(policy, self._folders.pop(policy))

    async def _remove(self, policy: str, folder: Path) -> None:
        if policy in self._compute.engine.policies():
            await self._compute.engine.unload(policy)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
