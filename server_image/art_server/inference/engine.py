"""What the gateway asks of an inference engine.

Bodies and answers are OpenAI's, as plain dicts, so that an engine may be a proxy. The gateway has
already turned the request's model name into a policy: an engine only ever sees immutable weights.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from art_cloud.shared.errors import ArtCloudError, NotFoundError

Route = Literal["chat/completions", "completions"]


class EngineStats(NamedTuple):
    running: int = 0
    """How many choices are being generated."""
    waiting: int = 0
    """How many choices wait in the queue, for `reason`."""
    tokens_generated: int = 0
    """How many tokens were generated since the engine was started."""
    reason: str | None = None
    """Why choices wait, in words; None when none waits."""
    moved: int = 0
    """A number that changes whenever anything moves: a token, an adapter, a start of the engine."""


class Engine(Protocol):
    """Serves the base model and any number of policies at once.

    Every choice carries `sample` (an `art_cloud.protocol.Sample` as a dict; `policy` is the served
    policy, or the base model's name): in a stream, on the chunk that has its `finish_reason`. The
    gateway sets its `masked` (`masking.is_masked`), whatever the engine.

    There is no method to score a text with: the canary (`art_server.canary`) compares the `sample`s
    of an ordinary request with the trainer, so that it takes the way that rollouts take, through
    the prefix cache and all.
    """

    name: str
    slots: int
    """Policies that may be loaded at once."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End every request with `ServerStoppingError` and free the weights."""

    async def load(self, policy: str, adapter: Path) -> None:
        """Serve the PEFT folder `adapter` as `policy`. Safe to repeat; loses no request in flight.

        Raises `ConflictError` if `policy` already stands for another folder, `ConfigError` if the
        folder is not an adapter of this base model.
        """

    async def unload(self, policy: str) -> None:
        """Refuse new requests for `policy`; its weights go when those in flight are done.

        A name that nobody uses any more may be loaded again from another folder (of a step that was
        not counted in the end): nothing cached of the former weights may answer for it.

        Raises `NotFoundError` if it is not loaded.
        """

    def policies(self) -> list[str]:
        """The policies that a request may name now, sorted."""

    async def create(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> dict[str, Any]:
        """Return the whole answer. `policy` None means the base model; cancelling stops the
        generation.

        Raises `InvalidRequestError` (also `ContextLengthError`) and `NotFoundError`.
        """

    def stream(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer in OpenAI's chunks. Raises as `create`, before the first chunk; closing
        the generator stops the generation."""

    def asleep(self) -> AbstractAsyncContextManager[None]:
        """A block in which a step is trained. Where the memory is not enough for both, requests in
        flight are finished first, and those that come meanwhile wait."""

    def stats(self) -> EngineStats: ...

    @property
    def ended(self) -> ArtCloudError | None:
        """The error that ended the engine for good: it answers no request from then on."""


def not_loaded(policy: str) -> NotFoundError:
    return NotFoundError(f"Policy {policy!r} is not loaded. Ask for one that GET /v1/models lists.")
