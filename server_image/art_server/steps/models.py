"""The models that the server works for: which step is the newest, and whether it may be used."""

from __future__ import annotations

import asyncio
import logging

from art_cloud.shared.errors import ArtCloudError, NotFoundError, RivalError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Manifest

log = logging.getLogger(__name__)

FENCED_SECONDS = 60.0
"""How long a server stays of which all models are fenced: their clients are told why meanwhile, and
may register them anew."""


class Models:
    """Which step of each model is the newest, and whether the model may be used.

    A model is fenced when another server has trained it: every request for it gets that error
    until it is registered again. A model is repeating when, after a restart, a step that was
    served has to be made again: requests for its plain name wait, so that it never means an older
    step.
    """

    def __init__(self) -> None:
        self._newest: dict[ModelName, Manifest] = {}
        self._fenced: dict[ModelName, str] = {}
        self._left_out: dict[ModelName, ArtCloudError] = {}
        self._repeating: dict[ModelName, asyncio.Event] = {}
        self._fences_changed = asyncio.Event()

    def newest(self, name: ModelName) -> Manifest:
        """The newest step of a registered model.

        Raises `RivalError` if the model is fenced.
        """
        self.check_not_fenced(name)
        return self.known(name)

    def check_not_fenced(self, name: ModelName) -> None:
        if name in self._fenced:
            raise RivalError(self._fenced[name])

    def known(self, name: ModelName) -> Manifest:
        """The newest step that this server had, of a fenced model too."""
        try:
            return self._newest[name]
        except KeyError:
            if (why := self._left_out.get(name)) is not None:
                raise type(why)(*why.args) from None
            known = ", ".join(map(str, self._newest)) or "none"
            raise NotFoundError(
                f"{name} is not registered with this server. Registered: {known}. "
                "Call model.register(backend) first."
            ) from None

    def names(self) -> list[str]:
        return list(map(str, self._newest))

    def policies(self) -> set[str]:
        """The newest of each model."""
        return {manifest.policy for manifest in self._newest.values()}

    def set_newest(self, manifest: Manifest) -> None:
        """From the next request on, its model's plain name means this step."""
        self._newest[manifest.name] = manifest
        self._left_out.pop(manifest.name, None)
        if self._fenced.pop(manifest.name, None) is not None:
            self._fences_changed.set()

    def leave_out(self, name: ModelName, why: ArtCloudError) -> None:
        """A model that this server had can't be served: whoever asks for it is told why."""
        log.error("%s is not served: %s", name, why)
        self._left_out[name] = why

    def fence(self, name: ModelName, error: RivalError) -> None:
        log.error("%s", error)
        self._fenced[name] = str(error)
        self._fences_changed.set()

    async def all_fenced(self) -> str:
        """Wait until every model has been fenced for `FENCED_SECONDS`. Returns the reason."""
        while True:
            self._fences_changed.clear()
            fenced = bool(self._fenced) and self._newest.keys() <= self._fenced.keys()
            try:
                async with asyncio.timeout(FENCED_SECONDS if fenced else None):
                    await self._fences_changed.wait()
            except TimeoutError:
                return "Other servers train all models of this one. " + " ".join(
                    self._fenced.values()
                )

    def repeat(self, name: ModelName) -> None:
        """A step of the model is made again: `settled` waits from now on."""
        self._repeating[name] = asyncio.Event()

    def repeated(self, name: ModelName) -> None:
        if (event := self._repeating.pop(name, None)) is not None:
            event.set()

    async def settled(self, name: ModelName) -> None:
        if (event := self._repeating.get(name)) is not None:
            await event.wait()
