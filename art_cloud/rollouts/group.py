"""Rollouts of one task, scored together: complete, or still to be run."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Iterator
from inspect import isawaitable
from typing import Any, overload

from pydantic import BaseModel, PrivateAttr

from ..shared.errors import ConfigError
from .running import run_pending
from .trajectory import MetadataValue, RolloutFailure, Trajectory


class TrajectoryGroup(BaseModel):
    """Rollouts of one task: their rewards are compared with each other.

    Made from trajectories (and the exceptions of rollouts that failed), it is complete. Made from
    awaitables, it is awaited, alone or through `gather_trajectory_groups`, before it is used.
    """

    trajectories: list[Trajectory] = []
    exceptions: list[RolloutFailure] = []
    metadata: dict[str, MetadataValue] = {}
    metrics: dict[str, float | int | bool] = {}
    logs: list[str] = []
    _pending: list[Awaitable[Trajectory]] = PrivateAttr(default_factory=list)

    @overload
    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException],
        *,
        exceptions: Iterable[BaseException | RolloutFailure] = (),
        metadata: dict[str, MetadataValue] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        trajectories: Iterable[Awaitable[Trajectory]],
        *,
        exceptions: Iterable[BaseException | RolloutFailure] = (),
        metadata: dict[str, MetadataValue] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None: ...

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]],
        *,
        exceptions: Iterable[BaseException | RolloutFailure] = (),
        metadata: dict[str, MetadataValue] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None:
        given = list(trajectories)
        failed = [item for item in given if isinstance(item, BaseException)]
        super().__init__(
            trajectories=[
                t for t in given if not isinstance(t, BaseException) and not isawaitable(t)
            ],
            exceptions=[
                RolloutFailure.of(error) if isinstance(error, BaseException) else error
                for error in [*failed, *exceptions]
            ],
            metadata=metadata or {},
            metrics=metrics or {},
            logs=logs or [],
        )
        self._pending = [item for item in given if isawaitable(item)]

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._run().__await__()

    async def _run(self) -> TrajectoryGroup:
        """Run the pending rollouts; return a group of their results and of the trajectories that
        were there."""
        pending, self._pending = self._pending, []
        results = await run_pending(pending)
        return TrajectoryGroup(
            [*self.trajectories, *results],
            exceptions=self.exceptions,
            metadata=self.metadata,
            metrics=self.metrics,
            logs=self.logs,
        )

    def log(self, message: str) -> None:
        self.logs.append(message)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        self._check_run()
        return iter(self.trajectories)

    def __len__(self) -> int:
        self._check_run()
        return len(self.trajectories)

    def __bool__(self) -> bool:
        return True

    def _check_run(self) -> None:
        if self._pending:
            raise ConfigError(
                f"The {len(self._pending)} rollouts of this TrajectoryGroup have not run. Await "
                "it, or pass it to gather_trajectory_groups."
            )
