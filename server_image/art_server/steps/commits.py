"""How a step gets to the store: with patience while the store is away, and behind its job if asked.

With `--durability async` a job is done once its step is served. The step goes to the store while
the next one is rolled out, and the model's next step waits for that before it counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from art_cloud.shared.errors import ArtCloudError, RivalError, StoreUnavailableError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Manifest

from .jobs import Report

log = logging.getLogger(__name__)

T = TypeVar("T")

STORE_SECONDS = 600.0
"""How long a store may stay away before a job that needs it fails."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries


async def until_answered(work: Callable[[], Awaitable[T]], report: Report) -> T:
    """Repeat `work` while the store does not answer, and say so.

    Raises:
        StoreUnavailableError: it did not for `STORE_SECONDS`.
    """
    since, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return await work()
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


Storing = Coroutine[Any, Any, Manifest]
"""A step on its way to the store."""


@dataclass
class _Commit:
    draft: Manifest
    store: Callable[[], Storing]
    task: asyncio.Task[None]


class Commits:
    """At most one step of each model is served and not durable.

    `durable` is told of each that is, and `failed` of one that could not be stored: with a
    `RivalError` if another server took its number.
    """

    def __init__(
        self,
        durable: Callable[[Manifest], Awaitable[None]],
        failed: Callable[[Manifest, ArtCloudError], Awaitable[None]],
    ) -> None:
        self._durable = durable
        self._failed = failed
        self._commits: dict[ModelName, _Commit] = {}

    @property
    def pending(self) -> list[str]:
        """The policies that are not durable."""
        return [commit.draft.policy for commit in self._commits.values()]

    def begin(self, draft: Manifest, store: Callable[[], Storing]) -> None:
        """`store` a step, and follow it there; again when it could not be stored."""
        self._commits[draft.name] = _Commit(draft, store, self._start(draft, store()))

    async def settled(self, name: ModelName) -> None:
        """Return once no step of the model is pending. One that could not be stored is tried again.

        Raises why it can't be; then it stays pending, unless it is a `RivalError`.
        """
        if (commit := self._commits.get(name)) is None:
            return
        if commit.task.done():
            commit.task = self._start(commit.draft, commit.store())
        await asyncio.shield(commit.task)

    async def retried(self, name: ModelName) -> None:
        """As `settled`, but return at once if the step may still come to the store by itself."""
        if (commit := self._commits.get(name)) is not None and commit.task.done():
            await self.settled(name)

    async def close(self, grace: float) -> None:
        """Let what is under way come to its end, for `grace` seconds."""
        if tasks := [commit.task for commit in self._commits.values()]:
            await asyncio.wait(tasks, timeout=grace)
        for commit in self._commits.values():
            commit.task.cancel()
            log.warning(
                "%s is not in the store: it is made again when the server is started again in this "
                "folder, or by its client on another machine",
                commit.draft.policy,
            )

    def _start(self, draft: Manifest, storing: Storing) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(draft, storing))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _run(self, draft: Manifest, storing: Storing) -> None:
        try:
            manifest = await storing
        except RivalError as error:
            del self._commits[draft.name]
            await self._failed(draft, error)
            raise
        except ArtCloudError as error:
            log.error("%s is served, and could not be stored: %s", draft.policy, error)
            await self._failed(draft, error)
            raise
        except Exception:
            log.exception("%s is served, and could not be stored", draft.policy)
            raise
        del self._commits[draft.name]
        await self._durable(manifest)
