"""The replacement of a lost machine by another of the same spec, unless the server ended as it
should."""

from __future__ import annotations

import asyncio
from typing import Literal

from ..links.endpoint import Endpoint
from ..shared.errors import IncompleteListError, LaunchError, ProviderError, ServerUnavailableError
from ..shared.progress import say
from .credentials import with_secrets
from .registry import ClusterRecord, Registry
from .spec import Provider

Replacement = tuple[Endpoint, str]
"""Where a server listens, and its token."""
OnLoss = Literal["relaunch", "raise"]
MAX_RELAUNCHES = 3
"""How many machines one `up` replaces: if they are lost again and again, another one won't help."""
LAUNCH_SECONDS = 1800.0
"""A cluster whose server does not listen after this long is given up."""


class Relauncher:
    """The callback for when the server of `record` can't be reached (`attached.Replace`).

    Each server has a token of its own: whoever takes the place of a lost one, as a port of a
    machine that others use too, is sent a token that opens nothing any more.
    """

    def __init__(self, provider: Provider, record: ClusterRecord, on_loss: OnLoss) -> None:
        self._provider = provider
        self._record = record
        self._on_loss = on_loss
        self._relaunches = 0

    async def __call__(self) -> Replacement | None:
        """The address and token of a new server; None if the old one exists, or may exist.

        Raises:
            ServerUnavailableError: it is gone and must not, or not once more, be started again.
            LaunchError: the new one did not come up.
        """
        name = self._record.name
        if (now := Registry().current(self._record)) and now.spec.token != self._record.spec.token:
            self._record = now  # another program has started it again
            return await self._replacement()
        if await self._may_exist():
            return None
        self._refuse_what_must_not_be()
        self._relaunches += 1
        say(
            f"{name} is gone: its machine was lost, or its server ended (art-cloud logs {name}). "
            f"Starting it again, {self._relaunches} of at most {MAX_RELAUNCHES} times."
        )
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                self._record = Registry().renew_token(self._record)
                await self._provider.launch(await with_secrets(self._record.spec), name)
                return await self._replacement()
        except TimeoutError:
            raise LaunchError(
                f"The new server of {name} did not listen within {LAUNCH_SECONDS:.0f} s. What it "
                f"wrote: art-cloud logs {name}. To end it: art-cloud down {name}"
            ) from None

    async def _replacement(self) -> Replacement:
        endpoint = await self._provider.endpoint(self._record.name)
        return endpoint, self._record.spec.token.get_secret_value()

    async def _may_exist(self) -> bool:
        """Whether the instance may still exist. A provider that can't tell is asked again later."""
        name = self._record.name
        try:
            instances = await self._provider.list()
        except IncompleteListError as error:
            instances = error.instances
            if name in error.unsure:
                return True
        except ProviderError:
            return True
        return any(map(self._record.has, instances))

    def _refuse_what_must_not_be(self) -> None:
        record = self._record
        now = Registry().get(record.name)
        if now is None or now.key != record.key or now.state == "ending":
            why = "It was ended: art-cloud down, or another program. Start it again with art.up()."
        elif record.spec.is_over:
            why = "What its budget or its deadline allowed is over."
        elif self._on_loss == "raise":
            why = "Start it again with art.up(): it goes on from the newest step in its store."
        elif self._relaunches >= MAX_RELAUNCHES:
            why = (
                f"It was started again {MAX_RELAUNCHES} times already. See what ends it: art-cloud "
                f"logs {record.name}"
            )
        else:
            return
        raise ServerUnavailableError(f"The machine of {record.name} is gone. {why}")
