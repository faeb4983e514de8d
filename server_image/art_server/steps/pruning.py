"""After each step: remove from the store the steps that the model's retention does not keep."""

from __future__ import annotations

import asyncio
import logging

from art_cloud.shared.config import Retention
from art_cloud.shared.errors import ArtCloudError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints, Manifest, ranges
from art_cloud.store.retention import prune

from .runtime import Runtime

log = logging.getLogger(__name__)


class Pruner:
    """Prunes one model at a time. A model that comes meanwhile is pruned after its next step."""

    def __init__(self, runtime: Runtime) -> None:
        self.references: dict[ModelName, int] = {}
        """The step that each model's KL penalty pulls towards: it stays."""
        self._runtime = runtime
        self._checkpoints: dict[ModelName, Checkpoints] = {}
        self._pruning: asyncio.Task[None] | None = None

    def after(self, newest: Manifest) -> None:
        """Begin it, once `newest` is in the store. No job waits for it."""
        if newest.retention is None or not (self._pruning is None or self._pruning.done()):
            return
        in_use = self._runtime.steps_in_use(newest.name)
        if newest.name in self.references:
            in_use.add(self.references[newest.name])
        checkpoints = self.checkpoints(newest.name)
        self._pruning = asyncio.create_task(_prune(checkpoints, newest.retention, in_use))

    def checkpoints(self, name: ModelName) -> Checkpoints:
        """Always the same: it remembers what was logged, and reads only what is new."""
        return self._checkpoints.setdefault(name, self._runtime.checkpoints(name))


async def _prune(checkpoints: Checkpoints, retention: Retention, in_use: set[int]) -> None:
    try:
        removed = await asyncio.to_thread(prune, checkpoints, retention, keep=in_use)
    except ArtCloudError as error:
        log.warning("no step of %s was removed: %s", checkpoints.name, error)
    else:
        if removed:
            steps = ranges([info.step for info in removed])
            log.info("retention of %s: removed step %s", checkpoints.name, steps)
