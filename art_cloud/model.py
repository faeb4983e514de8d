"""The models of a script: those that are prompted, and those that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from typing_extensions import TypeVar

from .shared.config import LoRAConfig, Retention, SFTConfig, TrainConfig
from .shared.errors import ConfigError
from .shared.names import ModelName
from .shared.validation import is_loopback
from .trackers.tracker import TrackerName

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from .backend import Backend, TrainResult
    from .rollouts.group import TrajectoryGroup
    from .rollouts.recording import RecordedTrajectory
    from .rollouts.trajectory import Messages, Trajectory

ConfigT = TypeVar("ConfigT", default=Any)

REQUEST_SECONDS = 1200.0
"""How long a completion may take: requests queue while many rollouts are under way."""
RETRIES = 4
TRACKED_CONFIG = {"base_model", "lora", "config"}


class Model(BaseModel, Generic[ConfigT]):
    """A model that is asked and not trained, at any OpenAI-compatible endpoint.

    `config` is the script's own: whatever tells one agent from another.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: str
    project: str
    config: ConfigT | None = None
    inference_model_name: str | None = None
    inference_base_url: str | None = None
    inference_api_key: str | None = Field(None, repr=False, exclude=True)
    report_metrics: list[TrackerName] | None = None
    """The trackers that show its metrics and rollouts: "wandb", "langfuse". None: W&B, if
    WANDB_API_KEY is set."""
    _backend: Backend | None = PrivateAttr(None)
    _client: AsyncOpenAI | None = PrivateAttr(None)
    _headers: Mapping[str, str] | None = PrivateAttr(None)

    @property
    def trainable(self) -> bool:
        return False

    @property
    def full_name(self) -> ModelName:
        """`project/name`.

        Raises:
            ConfigError: one of the two is not a valid name.
        """
        return ModelName(self.project, self.name)

    def backend(self) -> Backend:
        """The backend that this model is registered with.

        Raises:
            ConfigError: none.
        """
        if self._backend is None:
            raise ConfigError(
                f"Model {self.name!r} is not registered. `await model.register(backend)` first."
            )
        return self._backend

    async def register(self, backend: Backend) -> None:
        """Register a model that is only prompted: `backend` keeps what is logged of it."""
        await backend.register(self)

    def attach(
        self,
        backend: Backend,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Remember the backend, and the endpoint at which it serves this model, if it does."""
        self._backend = backend
        if base_url is not None:
            self.inference_model_name = self.get_inference_name()
            self.inference_base_url, self.inference_api_key = base_url, api_key
            self._headers = headers
            self._client = None

    def move(self, base_url: str, api_key: str) -> None:
        """Use another server from now on, also with the client that was made before."""
        self.inference_base_url, self.inference_api_key = base_url, api_key
        if self._client is not None:
            self._client.base_url, self._client.api_key = base_url, api_key

    def tracked_config(self) -> dict[str, Any]:
        """The settings of this model, as JSON, that trackers show beside its metrics."""
        return self.model_dump(mode="json", include=TRACKED_CONFIG, fallback=str)

    async def close(self) -> None:
        """Close the OpenAI client; the next call of `openai_client` makes a new one."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    def openai_client(self) -> AsyncOpenAI:
        """A client of the endpoint where this model answers; the same one on each call.

        Raises:
            ConfigError: the endpoint is not known (yet).
        """
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """The name for `model` in a request: the newest weights or, for a trained model, those of
        `step`."""
        return self.inference_model_name or self.name

    async def get_step(self) -> int:
        """The newest step; 0 of a model that is not trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException] | None = None,
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Keep trajectories and their mean metrics beside the step that they were sampled from.

        Args:
            trajectories: groups, or trajectories that stand alone.
            split: what they are of; a metric is then found as `split/name`, say `val/reward`.
            metrics: more metrics, or those to keep without any trajectory.
            step: None: the newest.

        Returns:
            The metrics that were kept, under their names without the split.
        """
        return await self.backend().log(self, trajectories, split=split, metrics=metrics, step=step)

    def _make_client(self) -> AsyncOpenAI:
        import openai

        from .client.openai_http import http_client

        if self.inference_base_url is None or self.inference_api_key is None:
            raise ConfigError(
                f"It is not known where model {self.name!r} answers. "
                + (
                    "Call `await model.register(backend)` first."
                    if self.trainable
                    else "Give inference_base_url and inference_api_key."
                )
            )
        return openai.AsyncOpenAI(
            base_url=self.inference_base_url,
            api_key=self.inference_api_key,
            default_headers=self._headers,
            max_retries=RETRIES,
            timeout=REQUEST_SECONDS,
            http_client=http_client(
                self._backend.back if self._backend and self.trainable else None,
                timeout=REQUEST_SECONDS,
                trust_env=not is_loopback(self.inference_base_url),
            ),
        )


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A LoRA on `base_model`, trained step by step; each step stays available as `name@step`."""

    base_model: str
    lora: LoRAConfig = LoRAConfig()
    retention: Retention | None = None
    """Which steps the server keeps in the store; None: all of them."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)  # makes the private attributes
        _ = self.full_name  # refuse a bad name here, not at the first call

    @property
    def trainable(self) -> bool:
        return True

    async def register(self, backend: Backend) -> None:
        """Make `backend` serve and train this model, from its newest step if there is one.

        Raises:
            ConflictError: a model of this name has another base model or another LoRA.
        """
        await backend.register(self)

    def get_inference_name(self, step: int | None = None) -> str:
        """`project/name`, the newest step at the time of each request; or `project/name@step`."""
        return str(self.full_name if step is None else self.full_name.at(step))

    async def get_step(self) -> int:
        """The newest step: how many times this model was trained."""
        return (await self.backend().model_info(self)).step

    def record(self, step: int | None = None) -> AbstractAsyncContextManager[RecordedTrajectory]:
        """Record an agent as it is, in any language or framework, for the length of a block.

            async with model.record() as trajectory:
                await run_agent(base_url=trajectory.base_url, api_key=trajectory.api_key)
                trajectory.reward = 1.0

        Whatever OpenAI-compatible client uses that address is recorded, streams and parallel
        requests included; after the block the trajectory holds the conversations, with a choice
        wherever the model answered. Requests may name any model: a session has this one.

        Args:
            step: sample from this step's weights; None: from the newest at each request.

        Raises:
            NotFoundError: at the end of the block, if the server was restarted meanwhile: the
                recording is lost.
        """
        return self.backend().record(self, step)

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """`backend.train` of the backend that this model is registered with."""
        return await self.backend().train(self, trajectory_groups, config, **overrides)

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory | Messages],
        config: SFTConfig | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """`backend.train_sft` of the backend that this model is registered with."""
        return await self.backend().train_sft(self, trajectories, config, **overrides)

    async def history(self) -> list[dict[str, Any]]:
        """A row for each step that ever was, those that were deleted too; `pandas.DataFrame` of it
        is the table of the run.

        `step`, `kind`, `created_at` (ISO 8601), and the step's metrics: those of training under
        their own names, what `log` kept as `split/name`.
        """
        return await self.backend().checkpoints(self).history()

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all steps but the newest and the best by `best_checkpoint_metric`."""
        await self.backend().checkpoints(self).delete(keep_best=best_checkpoint_metric)
