"""The steps that a server keeps of a model, as a script sees them."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import RootModel

from ..shared.config import Retention
from ..shared.errors import ConfigError
from ..shared.names import ModelName
from ..shared.protocol import CheckpointInfo, ForkRequest, PruneRequest
from ..store.checkpoints import best
from .http import ServerClient, parse, path_of

CheckpointList = RootModel[list[CheckpointInfo]]
History = RootModel[list[dict[str, Any]]]


class Named(Protocol):
    """Anything that has a project and a name."""

    @property
    def full_name(self) -> ModelName: ...


class ModelCheckpoints:
    """The steps of one model."""

    def __init__(self, server: ServerClient, name: ModelName) -> None:
        self._server = server
        self._name = name

    async def list(self) -> Sequence[CheckpointInfo]:
        """List the steps that are kept, the oldest first."""
        content = await self._server.call("GET", f"{path_of(self._name)}/checkpoints")
        return parse(CheckpointList, content).root

    async def best(self, metric: str = "val/reward") -> CheckpointInfo:
        """The step where `metric` is highest; of equals, the newest.

        Raises:
            NotFoundError: none has that metric.
        """
        return best(await self.list(), metric)

    async def history(self) -> builtins.list[dict[str, Any]]:
        """A row for each step that ever was, as `model.history` returns it."""
        content = await self._server.call("GET", f"{path_of(self._name)}/history")
        return parse(History, content).root

    async def prune(
        self, retention: Retention, *, dry_run: bool = False
    ) -> Sequence[CheckpointInfo]:
        """Delete the steps that `retention` does not keep; those in use and those forked stay.

        Returns:
            What was deleted or, in a dry run, would be.

        Raises:
            NotFoundError: no step has the metric of `keep_best`: nothing was deleted.
        """
        request = PruneRequest(retention=retention, dry_run=dry_run)
        content = await self._server.call("POST", f"{path_of(self._name)}/prune", request)
        return parse(CheckpointList, content).root

    async def delete(
        self, step: int | None = None, *, keep_best: str | None = None
    ) -> Sequence[int]:
        """Delete `step`; or all but the newest and the best by the metric `keep_best`.

        Returns:
            The steps that were deleted.

        Raises:
            NotFoundError: no such step, or no step has the metric: nothing was deleted.
        """
        if (step is None) == (keep_best is None):
            raise ConfigError("Say which: delete(step), or delete(keep_best='val/reward').")
        if step is not None:
            steps = [step]
        else:
            assert keep_best is not None
            best = await self.best(keep_best)
            kept = await self.list()
            steps = [info.step for info in kept[:-1] if info.step != best.step]
        for each in steps:
            await self._server.call(
                "DELETE", f"{path_of(self._name)}/checkpoints/{each}", repeatable=False
            )
        return steps

    async def fork(self, to: Named | str, step: int | None = None) -> CheckpointInfo:
        """Begin the model `to` (or `project/model`) at `step` of this one; None: at its newest.

        Raises:
            ConflictError: `to` has steps already.
        """
        name = ModelName.parse(to) if isinstance(to, str) else to.full_name
        request = ForkRequest(to_project=name.project, to_model=name.model, step=step)
        path = f"{path_of(self._name)}/fork"
        content = await self._server.call("POST", path, request, repeatable=False)
        return parse(CheckpointInfo, content)
