"""How what the trainer holds becomes a step: served and compared, stored, and then the newest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from art_cloud.shared.errors import (
    ArtCloudError,
    ConflictError,
    RivalError,
    StoreFullError,
    StoreUnavailableError,
)
from art_cloud.shared.protocol import StepResult
from art_cloud.store.base import Blob
from art_cloud.store.checkpoints import Manifest
from art_cloud.store.transfer import Rate

from .canary import EXPECTED
from .commits import Commits, log_progress, until_answered
from .jobs import RETRY_SECONDS, Report
from .journal import TRAINED
from .pruning import Pruner
from .runtime import Runtime

log = logging.getLogger(__name__)

BEHIND_SECONDS = 0.1
"""How long an upload behind its job waits, so that the first tokens of the step come first."""

Keep = Callable[[], Awaitable[None]]
"""Keeps what a step was trained on, once the step is in the store."""


async def nothing() -> None:
    pass


async def nobody(call_id: str, error: ArtCloudError | None) -> None:
    pass


class Publisher:
    """With durability "sync" a step is the newest once it is in the store; with "async" once it is
    served, and it is stored behind its job."""

    def __init__(self, runtime: Runtime, pruner: Pruner) -> None:
        self.commits = Commits(self._durable, self._not_durable)
        self.note_stored: Callable[[str, ArtCloudError | None], Awaitable[None]] = nobody
        """Told the id of a call whose step was stored after its job, or could not be."""
        self.unsure: set[str] = set()
        """Ids of calls that failed when their manifests were sent: these may be in the store."""
        self._runtime = runtime
        self._pruner = pruner

    async def publish(self, draft: Manifest, report: Report, keep: Keep = nothing) -> Manifest:
        """Make what the trainer holds the step `draft`.

        Raises `CanaryError` if the engine would serve other weights, `RivalError` if another call
        took the step's number, `ConflictError` if another one has begun the model. Then there is no
        such step here. Once its manifest is in the store, nothing raises any more.
        """
        runtime, trainer, name = self._runtime, self._runtime.trainer, str(draft.name)
        behind = runtime.settings.durability == "async" and draft.kind != "init"
        tell = log_progress if behind else report

        async with runtime.new_step(draft) as folder:
            saved = runtime.in_training_thread(trainer.save_adapter, name, folder)
            report({"phase": f"loading {draft.policy}", TRAINED: 1})
            await saved
            expected = runtime.in_training_thread(
                trainer.next_logprobs, name, runtime.canary.prompt_ids, EXPECTED
            )
            saved = runtime.in_training_thread(trainer.save_optimizer, name, folder)

            async def upload() -> dict[str, Blob]:
                await saved
                if behind:
                    await asyncio.sleep(BEHIND_SECONDS)
                return await self._upload(draft, folder, tell)

            uploading = None if behind else asyncio.create_task(upload())
            try:
                difference = await runtime.serve(draft, expected)
                found = {
                    "metrics": draft.metrics | {"canary": difference},
                    "probe": await expected,
                    "writer": runtime.writer,
                }
                draft = draft.model_copy(update=found)
                await self.commits.settled(draft.name)
                runtime.models.check_not_fenced(draft.name)
                await saved
                if uploading is None:
                    runtime.hold(draft.policy)
                    self.commits.begin(
                        draft, lambda: self._create(draft, folder, upload(), keep, tell)
                    )
                else:
                    draft = await self._create(draft, folder, uploading, keep, tell)
            except BaseException:
                await asyncio.wait([uploading or saved])
                (uploading or saved).exception()  # it, or what came before it, is raised
                raise
            runtime.models.set_newest(draft)
        if not behind:
            self._pruner.after(draft)
        return draft

    def result(self, manifest: Manifest) -> StepResult:
        return StepResult(
            step=manifest.step,
            policy=manifest.policy,
            metrics=manifest.metrics,
            durable=manifest.policy not in self.commits.pending,
        )

    async def _upload(self, draft: Manifest, folder: Path, tell: Report) -> dict[str, Blob]:
        checkpoints, rate = self._runtime.checkpoints(draft.name), Rate()

        def watch(done: int, total: int) -> None:
            tell({"phase": f"storing {draft.policy}: {rate.words(done, total)}"})

        upload = partial(asyncio.to_thread, checkpoints.upload, folder, watch)
        return await until_answered(upload, tell)

    async def _create(
        self,
        draft: Manifest,
        folder: Path,
        files: Awaitable[dict[str, Blob]],
        keep: Keep,
        tell: Report,
    ) -> Manifest:
        checkpoints = self._runtime.checkpoints(draft.name)
        manifest = draft.model_copy(update={"files": await files})
        create = partial(asyncio.to_thread, checkpoints.create, manifest, folder)
        try:
            stored = await until_answered(create, tell)
        except ConflictError:
            raise
        except BaseException as error:
            self.unsure.add(draft.call_id)
            if isinstance(error, StoreUnavailableError):
                raise StoreUnavailableError(
                    f"{error} Whether {draft.policy} came there all the same is not known: if it "
                    f"did, the next call that trains {draft.name} says so."
                ) from error
            raise
        await keep()
        return stored

    async def _durable(self, manifest: Manifest) -> None:
        """A step that is the newest already is in the store."""
        self._runtime.models.set_newest(manifest)
        self._runtime.release(manifest.policy)
        self._pruner.after(manifest)
        await self._note(manifest, None)

    async def _not_durable(self, draft: Manifest, error: ArtCloudError) -> None:
        """A step that is the newest here could not be stored, or never will be."""
        if isinstance(error, RivalError):
            self._runtime.models.fence(draft.name, error)
            self._runtime.release(draft.policy)
            await self._runtime.unload(draft.policy)
        await self._note(draft, error)

    async def _note(self, manifest: Manifest, error: ArtCloudError | None) -> None:
        while True:
            try:
                return await self.note_stored(manifest.call_id, error)
            except StoreFullError as full:
                log.error("what became of %s can't be noted yet: %s", manifest.policy, full)
                await asyncio.sleep(RETRY_SECONDS)
