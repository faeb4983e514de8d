"""How what the trainer holds becomes a step: served and compared, stored, and then the newest.

With `--durability async` a job is done once its step is served. The step goes to the store while
the next one is rolled out, and the model's next step waits for that before it counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from art_cloud.shared.config import Retention
from art_cloud.shared.errors import (
    ArtCloudError,
    ConflictError,
    RivalError,
    StoreFullError,
    StoreUnavailableError,
)
from art_cloud.shared.protocol import Durability
from art_cloud.store.base import Blob
from art_cloud.store.checkpoints import Checkpoints, Manifest, Writer, ranges
from art_cloud.store.retention import prune
from art_cloud.store.transfer import Rate

from .canary import EXPECTED
from .compute import Compute
from .jobs import RETRY_SECONDS, Report
from .journal import TRAINED
from .models import ModelState
from .policies import Policies

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

STORE_SECONDS = 600.0
"""How long a store may stay away before a job that needs it fails."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries
BEHIND_SECONDS = 0.1
"""How long an upload behind its job waits, so that the first tokens of the step come first."""

Keep = Callable[[], Awaitable[None]]
"""Keeps what a step was trained on, once the step is in the store."""
NoteStored = Callable[[str, ArtCloudError | None], Awaitable[None]]
"""Told the id of a call whose step was stored after its job, or could not be."""


async def nothing() -> None:
    pass


async def nobody(call_id: str, error: ArtCloudError | None) -> None:
    pass


async def ask_store(
    report: Report, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `question`, called in a thread, reads or writes there: again while the store does not
    answer, and saying so.

    Raises:
        StoreUnavailableError: it did not for `STORE_SECONDS`.
    """
    since, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return await asyncio.to_thread(question, *args, **kwargs)
        except StoreUnavailableError as error:
            left = since + STORE_SECONDS - time.monotonic()
            if left <= 0:
                raise StoreUnavailableError(
                    f"{error} It was tried for {STORE_SECONDS:.0f} s."
                ) from error
            report({"phase": f"the store does not answer, trying again: {error}"})
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def log_progress(data: dict[str, Any]) -> None:
    """A `Report` for what goes on when its job is done."""
    log.info("%s", data["phase"])


@dataclass
class Publisher:
    """With durability "sync" a step is the newest once it is in the store; with "async" once it is
    served, and it is stored behind its job."""

    compute: Compute
    policies: Policies
    durability: Durability
    writer: Writer
    note_stored: NoteStored
    _pruning: asyncio.Task[None] | None = None

    async def publish(
        self, model: ModelState, draft: Manifest, report: Report, keep: Keep = nothing
    ) -> Manifest:
        """Make what the trainer holds the step `draft` of the model.

        Raises `CanaryError` if the engine would serve other weights, `RivalError` if another call
        took the step's number, `ConflictError` if another one has begun the model. Then there is no
        such step here. Once its manifest is in the store, nothing raises any more.
        """
        compute, policies, name = self.compute, self.policies, str(model.name)
        trainer, aside = compute.trainer, compute.in_training_thread
        behind = self.durability == "async" and draft.kind != "init"
        tell = log_progress if behind else report

        async with policies.new(draft) as folder:
            saved = aside(trainer.save_adapter, name, folder)
            report({"phase": f"loading {draft.policy}", TRAINED: 1})
            await saved
            expected = aside(trainer.next_logprobs, name, compute.canary.prompt_ids, EXPECTED)
            saved = aside(trainer.save_optimizer, name, folder)

            async def upload() -> dict[str, Blob]:
                await saved
                if behind:
                    await asyncio.sleep(BEHIND_SECONDS)
                return await self._upload(model, draft, folder, tell)

            uploading = None if behind else asyncio.create_task(upload())
            try:
                difference = await policies.serve(draft, expected)
                found = {
                    "metrics": draft.metrics | {"canary": difference},
                    "probe": await expected,
                    "writer": self.writer,
                }
                draft = draft.model_copy(update=found)
                await model.until_durable()
                model.check_not_fenced()
                await saved
                if uploading is None:
                    policies.hold(draft.policy)
                    served = draft
                    model.make(
                        served,
                        lambda: self._follow(
                            model, served, self._create(model, served, folder, upload(), keep, tell)
                        ),
                    )
                else:
                    draft = await self._create(model, draft, folder, uploading, keep, tell)
                    model.make(draft)
            except BaseException:
                await asyncio.wait([uploading or saved])
                (uploading or saved).exception()  # it, or what came before it, is raised
                raise
        if not behind:
            self._prune(model)
        return draft

    async def _upload(
        self, model: ModelState, draft: Manifest, folder: Path, tell: Report
    ) -> dict[str, Blob]:
        rate = Rate()

        def watch(done: int, total: int) -> None:
            tell({"phase": f"storing {draft.policy}: {rate.words(done, total)}"})

        return await ask_store(tell, model.checkpoints.upload, folder, watch)

    async def _create(
        self,
        model: ModelState,
        draft: Manifest,
        folder: Path,
        files: Awaitable[dict[str, Blob]],
        keep: Keep,
        tell: Report,
    ) -> Manifest:
        manifest = draft.model_copy(update={"files": await files})
        try:
            stored = await ask_store(tell, model.checkpoints.create, manifest, folder)
        except ConflictError:
            raise
        except BaseException as error:
            model.give_up(draft.call_id)
            if isinstance(error, StoreUnavailableError):
                raise StoreUnavailableError(
                    f"{error} Whether {draft.policy} came there all the same is not known: if it "
                    f"did, the next call that trains {draft.name} says so."
                ) from error
            raise
        await keep()
        return stored

    async def _follow(
        self, model: ModelState, served: Manifest, storing: Awaitable[Manifest]
    ) -> None:
        """A step that is the newest already, on its way to the store."""
        try:
            stored = await storing
        except ArtCloudError as error:
            if isinstance(error, RivalError):
                model.lose(error)
                self.policies.release(served.policy)
                await self.policies.unload(served.policy)
            else:
                log.error("%s is served, and could not be stored: %s", served.policy, error)
            await self._note(served, error)
            raise
        except Exception:
            log.exception("%s is served, and could not be stored", served.policy)
            raise
        model.make_durable(stored)
        self.policies.release(stored.policy)
        self._prune(model)
        await self._note(stored, None)

    async def _note(self, manifest: Manifest, error: ArtCloudError | None) -> None:
        while True:
            try:
                return await self.note_stored(manifest.call_id, error)
            except StoreFullError as full:
                log.error("what became of %s can't be noted yet: %s", manifest.policy, full)
                await asyncio.sleep(RETRY_SECONDS)

    def _prune(self, model: ModelState) -> None:
        """Begin to remove from the store what the model's retention does not keep. No job waits
        for it. One model at a time: one that comes meanwhile is pruned after its next step."""
        if model.known.retention is None or not (self._pruning is None or self._pruning.done()):
            return
        keep = self.policies.steps_in_use(model.name)
        if model.reference is not None:
            keep.add(model.reference)
        work = asyncio.to_thread(_prune, model.checkpoints, model.known.retention, keep)
        self._pruning = asyncio.create_task(work)


def _prune(checkpoints: Checkpoints, retention: Retention, keep: set[int]) -> None:
    try:
        removed = prune(checkpoints, retention, keep=keep)
    except ArtCloudError as error:
        log.warning("no step of %s was removed: %s", checkpoints.name, error)
    else:
        if removed:
            steps = ranges([info.step for info in removed])
            log.info("retention of %s: removed step %s", checkpoints.name, steps)
