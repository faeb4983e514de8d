"""What the server knows of each model: kept in one `ModelState`, and changed by its methods alone.

A method that changes a model is an arrow in docs/develop/life-of-a-step.md, and is named as there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from art_cloud.shared.errors import ArtCloudError, NotFoundError, RivalError
from art_cloud.shared.names import ModelName
from art_cloud.store.base import Store
from art_cloud.store.checkpoints import Checkpoints, Manifest

log = logging.getLogger(__name__)

FENCED_SECONDS = 60.0
"""How long a server stays of which all models are fenced: their clients are told why meanwhile, and
may register them anew."""


class Storing:
    """A served step on its way to the store, behind its job."""

    def __init__(self, policy: str, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.policy = policy
        self._store = store
        self.begin()

    def begin(self) -> None:
        """Try to store it, again where that failed."""
        self.task = asyncio.create_task(self._store())
        self.task.add_done_callback(lambda done: done.cancelled() or done.exception())


class ModelState:
    """One model: which step is the newest, where that stands, and whether it may be used."""

    def __init__(self, checkpoints: Checkpoints, changed: asyncio.Event) -> None:
        self.name = checkpoints.name
        self.checkpoints = checkpoints
        """Its steps in the store. They remember what was logged, and read only what is new."""
        self._changed = changed
        """Set whenever the model becomes registered or fenced."""
        self._newest: Manifest | None = None
        self._calls: dict[str, int] = {}
        self._unsure: set[str] = set()
        self._resident: tuple[int, str] | None = None
        self._reference: int | None = None
        self._storing: Storing | None = None
        self._fenced: RivalError | None = None
        self._left_out: ArtCloudError | None = None
        self._repeated = asyncio.Event()
        self._repeated.set()

    @property
    def is_registered(self) -> bool:
        return self._newest is not None

    @property
    def known(self) -> Manifest:
        """The newest step that this server had, of a fenced model too."""
        assert self._newest is not None, f"{self.name} is not registered"
        return self._newest

    @property
    def newest(self) -> Manifest:
        """What the plain name means. Raises `RivalError` if the model is fenced."""
        self.check_not_fenced()
        return self.known

    @property
    def fenced(self) -> RivalError | None:
        """What fenced the model."""
        return self._fenced

    @property
    def storing(self) -> Storing | None:
        """The step that is served and not durable: at most one."""
        return self._storing

    @property
    def reference(self) -> int | None:
        """The step that the KL penalty pulled towards the last time."""
        return self._reference

    def check_not_fenced(self) -> None:
        if self._fenced is not None:
            raise RivalError(*self._fenced.args)

    def check_not_left_out(self) -> None:
        if self._left_out is not None:
            raise type(self._left_out)(*self._left_out.args)

    def step_of(self, call: str) -> int | None:
        """The step that a call made, be it removed since."""
        return self._calls.get(call)

    def is_unsure(self, call: str) -> bool:
        """Whether a call failed, and its step may be in the store all the same."""
        return call in self._unsure

    @property
    def is_resident(self) -> bool:
        """Whether what the trainer holds of the model, if anything, is the newest step."""
        return self._resident == (self.known.step, self.known.call_id)

    async def until_repeated(self) -> None:
        """Return once no step is made again that was served before a restart."""
        await self._repeated.wait()

    async def until_durable(self) -> None:
        """Return once no step is on its way to the store. One that could not be stored is tried
        again.

        Raises why it can't be; then it stays pending, unless it is a `RivalError`.
        """
        self.store_again()
        if self._storing is not None:
            await asyncio.shield(self._storing.task)

    def store_again(self) -> bool:
        """Try again to store a step that could not be stored, if there is one."""
        if self._storing is None or not self._storing.task.done():
            return False
        self._storing.begin()
        return True

    def register(self, newest: Manifest, calls: dict[str, int]) -> None:
        """Go on from the newest step in the store, and from which call made which step there."""
        self._calls = calls
        self._set_newest(newest)

    def train(self) -> None:
        """The trainer changes what it holds: that is no step, until one is made of it."""
        self._resident = None

    def make(
        self, step: Manifest, store: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """What the trainer holds is the newest step now: in the store, or served, and on its way
        there by `store`."""
        self._storing = None if store is None else Storing(step.policy, store)
        self._resident = step.step, step.call_id
        self._set_newest(step)

    def make_durable(self, stored: Manifest) -> None:
        """The step that was on its way to the store is there."""
        self._storing = None
        if self.known.call_id == stored.call_id:
            self._newest = stored

    def lose(self, error: RivalError) -> None:
        """The step that was on its way to the store never comes there."""
        self._storing = None
        self.fence(error)

    def give_up(self, call: str) -> None:
        """A call fails without knowing whether its manifest came to the store."""
        self._unsure.add(call)

    def fence(self, error: RivalError) -> None:
        """Another server trains the model: requests are told so until it is registered again."""
        log.error("%s", error)
        self._fenced = error
        self._changed.set()

    def leave_out(self, why: ArtCloudError) -> None:
        """A model that this server had can't be served: whoever asks for it is told why."""
        log.error("%s is not served: %s", self.name, why)
        self._left_out = why

    def repeat(self) -> None:
        """A step that was served has to be made again: until then nobody gets the one before it."""
        self._repeated.clear()

    def end_repeating(self) -> None:
        self._repeated.set()

    def refer_to(self, step: int) -> None:
        """The KL penalty pulls towards this step: retention keeps it."""
        self._reference = step

    def _set_newest(self, newest: Manifest) -> None:
        if self._newest is None or self._fenced is not None:
            self._changed.set()
        self._newest = newest
        self._calls[newest.call_id] = newest.step
        self._fenced = self._left_out = None


class Models:
    """The models that the server works for, and the store that their steps are in."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._states: dict[ModelName, ModelState] = {}
        self._changed = asyncio.Event()

    def checkpoints(self, name: ModelName) -> Checkpoints:
        """The steps in the store, of any model."""
        return Checkpoints(self.store, name)

    def state(self, name: ModelName) -> ModelState:
        """Of a model that is registered, or about to be."""
        if name not in self._states:
            self._states[name] = ModelState(self.checkpoints(name), self._changed)
        return self._states[name]

    def get(self, name: ModelName) -> ModelState:
        """Of a registered model. Raises `NotFoundError`, or why the model was left out."""
        if (state := self._states.get(name)) is not None:
            state.check_not_left_out()
            if state.is_registered:
                return state
        known = ", ".join(self.names()) or "none"
        raise NotFoundError(
            f"{name} is not registered with this server. Registered: {known}. "
            "Call model.register(backend) first."
        )

    def newest(self, name: ModelName) -> Manifest:
        """The newest step of a registered model, unless another server has trained it."""
        return self.get(name).newest

    def names(self) -> list[str]:
        return [str(state.name) for state in self._registered()]

    def policies(self) -> set[str]:
        """The newest of each model."""
        return {state.known.policy for state in self._registered()}

    def not_durable(self) -> list[str]:
        """The policies that are on their way to the store."""
        return [storing.policy for storing in self._storing()]

    async def until_known(self, name: ModelName) -> None:
        """Return once the model's plain name means what it has to mean for a request that came."""
        if name in self._states:
            await self._states[name].until_repeated()

    async def until_durable(self, name: ModelName) -> None:
        """As `ModelState` has it, of any model."""
        if name in self._states:
            await self._states[name].until_durable()

    async def all_fenced(self) -> str:
        """Wait until every model has been fenced for `FENCED_SECONDS`. Returns the reason."""
        while True:
            self._changed.clear()
            registered = self._registered()
            fences = [str(state.fenced) for state in registered if state.fenced]
            fenced = bool(fences) and len(fences) == len(registered)
            try:
                async with asyncio.timeout(FENCED_SECONDS if fenced else None):
                    await self._changed.wait()
            except TimeoutError:
                return "Other servers train all models of this one. " + " ".join(fences)

    async def close(self, grace: float) -> None:
        """Let what is on its way to the store come there, for `grace` seconds."""
        if tasks := [storing.task for storing in self._storing()]:
            await asyncio.wait(tasks, timeout=grace)
        for storing in self._storing():
            storing.task.cancel()
            log.warning(
                "%s is not in the store: it is made again when the server is started again in this "
                "folder, or by its client on another machine",
                storing.policy,
            )

    def _registered(self) -> list[ModelState]:
        return [state for state in self._states.values() if state.is_registered]

    def _storing(self) -> list[Storing]:
        return [state.storing for state in self._states.values() if state.storing]


class ReadOnlyModels(Models):
    """Those of a server that makes nothing. A plain name means the newest step that was in the
    store when the request came; requests that come while the store is asked share the next answer.
    """

    def __init__(self, store: Store, open_base: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(store)
        self._open_base = open_base
        self._asking = asyncio.Lock()
        self._asked: dict[ModelName, float] = {}

    async def until_known(self, name: ModelName) -> None:
        """Raises `NotFoundError` if the store has no such model."""
        came = time.monotonic()
        async with self._asking:
            if self._asked.get(name, -math.inf) > came:
                return
            asked = time.monotonic()
            newest = await asyncio.to_thread(self.checkpoints(name).newest)
            if newest is None:
                raise NotFoundError(
                    f"The store has no step of {name}. This server only reads: register the model "
                    "with the one that trains."
                )
            await self._open_base(newest.base_model)
            self.state(name).register(newest, {})
            self._asked[name] = asked
