"""The models of a server that only reads: those that are in the store, as new as they are there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from art_cloud.shared.errors import NotFoundError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Manifest

from .models import Models

Find = Callable[[ModelName], Manifest | None]
"""The newest step in the store."""


class StoredModels(Models):
    """A plain name means the newest step that was in the store when the request came: requests that
    come while the store is being asked share the next answer."""

    def __init__(self, find: Find, open_base: Callable[[str], Awaitable[None]]) -> None:
        super().__init__()
        self._find = find
        self._open_base = open_base
        self._asking = asyncio.Lock()
        self._asked: dict[ModelName, float] = {}

    async def settled(self, name: ModelName) -> None:
        """Raises `NotFoundError` if the store has no such model."""
        came = time.monotonic()
        async with self._asking:
            if self._asked.get(name, -math.inf) > came:
                return
            asked = time.monotonic()
            if (newest := await asyncio.to_thread(self._find, name)) is None:
                raise NotFoundError(
                    f"The store has no step of {name}. This server only reads: register the model "
                    "with the one that trains."
                )
            await self._open_base(newest.base_model)
            self.set_newest(newest)
            self._asked[name] = asked
