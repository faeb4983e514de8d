"""A running art-cloud server, as a script sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import httpx
from pydantic import BaseModel, ValidationError

from .client.calls import Calls
from .client.checkpoints import ModelCheckpoints
from .client.http import Address, ServerClient, parse, path_of
from .rollouts.batch import as_groups, logged_trajectories, make_batch, mean_metrics, reward_metrics
from .rollouts.group import TrajectoryGroup
from .rollouts.recording import RecordedTrajectory, fill
from .rollouts.trajectory import Messages, Trajectory
from .shared.config import Frozen, LoRAConfig, Retention, SFTConfig, TrainConfig
from .shared.errors import ConfigError, NotFoundError, VersionMismatchError
from .shared.names import ModelName, whole_path
from .shared.progress import say
from .shared.protocol import (
    PROTOCOL,
    LogRequest,
    Metrics,
    ModelInfo,
    Recording,
    RegisterRequest,
    ServerInfo,
    SessionInfo,
    SessionRequest,
    SFTExample,
    SFTRequest,
    StepResult,
)
from .shared.validation import complaint, is_loopback
from .shared.version import __version__
from .shared.wire import encode_batch
from .trackers.feeds import Trackers, wanted
from .trackers.tracker import Run, run_id

if TYPE_CHECKING:
    from .links.tunnel import Tunnel
    from .trackers.tracker import TrackerName

C = TypeVar("C", bound=Frozen)
TrainResult: TypeAlias = StepResult
"""What a training call returns: the new `step`, its `policy` name and its `metrics`."""

REPEATED = 10
"""A warning that still holds is printed again after so many steps."""


class Logged(Protocol):
    """What a backend knows of a model whose trajectories and metrics it keeps."""

    name: str
    project: str
    report_metrics: list[TrackerName] | None

    @property
    def full_name(self) -> ModelName: ...

    async def get_step(self) -> int: ...

    def attach(
        self,
        backend: Backend,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None: ...

    def tracked_config(self) -> dict[str, Any]: ...


@runtime_checkable
class Trainable(Logged, Protocol):
    """What a backend knows of a model that it trains."""

    base_model: str
    lora: LoRAConfig
    retention: Retention | None

    def get_inference_name(self, step: int | None = None) -> str: ...

    def move(self, base_url: str, api_key: str) -> None: ...

    async def close(self) -> None: ...


class Backend:
    """A server at `url`, for whoever has its `token`.

    `async with` checks that the server is there and speaks this version, and closes the connections
    at the end. While the server can't be reached, calls are tried again for `patience` seconds;
    training calls carry an id, so that one that is sent twice counts once. `headers` are sent with
    every request, for a proxy before the server.

    Raises, from every call:
        AuthError: the token is wrong.
        ServerUnavailableError: nobody answered for `patience` seconds.
        ArtCloudError: what the server reports, as the class that it names.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience: float = 60.0,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._server = ServerClient(
            url, token, patience=patience, headers=self._headers, transport=transport
        )
        self._calls = Calls(self._server)
        self._models: list[Trainable] = []
        self._trackers = Trackers()
        self._steps_without_signal = 0

    tunnel: Tunnel | None = None
    """The way to the server, if it is on another machine: `url` is this end of it."""

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def inference_url(self) -> str:
        """The URL where completions are answered: `url`, unless another server does that for this
        one."""
        return self.url

    def __repr__(self) -> str:
        return f"Backend({self.url!r})" if self.tunnel is None else f"Backend({self.tunnel!r})"

    async def __aenter__(self) -> Backend:
        await self.info()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, also those of the models' OpenAI clients. The server stays.

        Waits until the steps that this backend made are durable, if there are any that are not.
        """
        await self._trackers.close()
        await self._calls.close()
        for model in self._models:
            await model.close()
        await self._server.close()

    @property
    def _token(self) -> str:
        return self._server.address.token

    async def back(self) -> Address:
        """Wait until the server answers, and return its address and its token.

        Raises:
            ServerUnavailableError: it did not for `patience` seconds.
        """
        await self._server.call("GET", "server")
        return self._server.address

    async def info(self) -> ServerInfo:
        """What the server says of itself.

        Raises:
            VersionMismatchError: it is of another version.
        """
        content = await self._server.call("GET", "server")
        _check_version(parse(AnyServerInfo, content))
        return parse(ServerInfo, content)

    async def register(self, model: Logged) -> None:
        """Load or begin the model on the server: what `model.register(backend)` does."""
        trackers, server = wanted(model.name, model.report_metrics), await self.info()
        if not isinstance(model, Trainable):
            model.attach(self)
            return await self._track(model, trackers, server)
        await self.prepare(model)
        model.attach(self, f"{self.inference_url}/v1", self._token, self._headers)
        if not any(known is model for known in self._models):
            self._models.append(model)
        await self._track(model, trackers, server)

    async def _track(
        self, model: Logged, trackers: Sequence[TrackerName], server: ServerInfo
    ) -> None:
        """Show the history of `model` in `trackers`, and its steps from now on."""
        name = model.full_name
        if trackers and not self._trackers.has(name):
            history = await ModelCheckpoints(self._server, name).history()
            run = Run(
                id=run_id(name, history, server.store),
                project=model.project,
                name=model.name,
                config=model.tracked_config(),
                history=history,
            )
            self._trackers.open(name, run, trackers)

    def cost(self) -> Metrics:
        """`cost/usd` and `cost/usd_per_hour` of the server's machine, if its price is known."""
        return {}

    async def prepare(self, model: Trainable) -> None:
        """Have the server load the newest step of `model`, or make its step 0."""
        base_model = model.base_model
        if not base_model:
            raise ConfigError(f"Model {model.full_name} names no base_model to train a LoRA on.")
        if is_loopback(self.url) and self.tunnel is None:
            base_model = whole_path(base_model)
        request = RegisterRequest(base_model=base_model, lora=model.lora, retention=model.retention)
        await self._calls.register(model.full_name, request)

    async def train(
        self,
        model: Trainable,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """One step of GRPO (or of the loss that `config` names) on scored groups.

        Args:
            overrides: fields of TrainConfig to take instead of those of `config`.

        Raises:
            UntrainableError: nothing can be learned from a group or trajectory as it is; the
                message names it. Nothing was sent.
            ConfigError: an override is not a field of TrainConfig, or not a value of it.
            JobError: the step was not made.
        """
        chosen = _override(config or TrainConfig(), overrides)
        name, groups = model.full_name, list(trajectory_groups)
        body = encode_batch(make_batch(name, groups, chosen))
        result = await self._calls.make_step(name, "train", body, f"train {model.name}")
        metrics = result.metrics | self.cost()
        self._trackers.tell(name, result.step, "train", metrics, groups)
        if result.metrics.get("groups_without_signal") == result.metrics.get("groups", -1):
            self._say_nothing_learned(result)
        return result

    def _say_nothing_learned(self, result: TrainResult) -> None:
        """Say that a step had nothing to learn from: of the first such step of this backend, and of
        every tenth."""
        self._steps_without_signal += 1
        if self._steps_without_signal == 1:
            say(
                f"{result.policy}: within each group all rewards are equal, so there was nothing "
                "to learn. The step counts; the weights are those of the step before."
            )
        elif self._steps_without_signal % REPEATED == 0:
            say(f"{result.policy}: nothing to learn in {self._steps_without_signal} steps so far.")

    async def train_sft(
        self,
        model: Trainable,
        trajectories: Iterable[Trajectory | Messages],
        config: SFTConfig | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """Supervised fine-tuning on the assistant's messages; all of it is one step of the model.

        Raises:
            ConfigError: there is no trajectory, or an override is not a field of SFTConfig.
            JobError: the step was not made.
        """
        request = SFTRequest(
            examples=[_example(item) for item in trajectories],
            config=_override(config or SFTConfig(), overrides),
        )
        if not request.examples:
            raise ConfigError("There is no trajectory to fine-tune on.")
        name = model.full_name
        result = await self._calls.make_step(name, "sft", request, f"fine-tune {model.name}")
        self._trackers.tell(name, result.step, "sft", result.metrics | self.cost())
        return result

    async def model_info(self, model: Trainable) -> ModelInfo:
        name = model.full_name
        return parse(ModelInfo, await self._calls.ask(name, "GET", path_of(name)))

    async def log(
        self,
        model: Logged,
        trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException] | None = None,
        *,
        split: str = "val",
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Keep trajectories and metrics beside a step: what `model.log` does."""
        groups = as_groups(trajectories or [])
        try:
            rows, samples = logged_trajectories(groups)
            request = LogRequest(
                split=split,
                step=await model.get_step() if step is None else step,
                metrics={**reward_metrics(groups), **mean_metrics(groups), **(metrics or {})},
                trajectories=rows,
                samples=samples,
            )
        except ValidationError as error:
            raise ConfigError(f"This can't be logged: {complaint(error)}.") from error
        path = f"{path_of(model.full_name)}/log"
        await self._calls.ask(model.full_name, "POST", path, request)
        shown = {f"{split}/{key}": value for key, value in request.metrics.items()}
        self._trackers.tell(model.full_name, request.step, split, shown, groups)
        return request.metrics

    @asynccontextmanager
    async def record(
        self, model: Trainable, step: int | None = None
    ) -> AsyncIterator[RecordedTrajectory]:
        """Record an agent for the length of a block: what `model.record()` does."""
        request = SessionRequest(model=model.get_inference_name(step))
        session = parse(SessionInfo, await self._server.call("POST", "sessions", request))
        trajectory = RecordedTrajectory(
            base_url=f"{self._server.url}/sessions/{session.id}/v1", api_key=session.key
        )
        try:
            yield trajectory
        finally:
            try:
                closed = await self._server.call("POST", f"sessions/{session.id}/close")
            except NotFoundError as error:
                raise NotFoundError(
                    "The recording is lost: the server was restarted while it ran. Run the rollout "
                    "again."
                ) from error
            fill(trajectory, parse(Recording, closed))
            await self._server.call("DELETE", f"sessions/{session.id}")

    def checkpoints(self, model: Trainable) -> ModelCheckpoints:
        """The steps of `model` that are kept."""
        return ModelCheckpoints(self._server, model.full_name)


class AnyServerInfo(BaseModel):
    """The part of ServerInfo that every version has."""

    version: str = "unknown"
    protocol: int = 0


def _check_version(server: AnyServerInfo) -> None:
    if server.protocol == PROTOCOL and server.version == __version__:
        return
    newer = _numbers(server.version) > _numbers(__version__)
    side, version = ("this client", server.version) if newer else ("the server", __version__)
    raise VersionMismatchError(
        f"The server is art-cloud {server.version} (protocol {server.protocol}), this client "
        f"{__version__} (protocol {PROTOCOL}). Upgrade {side}: pip install art-cloud=={version}"
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _override(config: C, overrides: dict[str, Any]) -> C:
    if not overrides:
        return config
    return type(config)(**{**config.model_dump(), **overrides})


def _example(item: Trajectory | Messages) -> SFTExample:
    if isinstance(item, Trajectory):
        return SFTExample.model_validate({"messages": item.messages(), "tools": item.tools})
    return SFTExample.model_validate({"messages": item})
