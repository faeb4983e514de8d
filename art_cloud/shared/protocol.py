"""What client and server say to each other, beside the OpenAI routes.

All routes lie under `/art/v1` and need the cluster's bearer token; errors have OpenAI's shape,
with the `code` of a class in `errors`.

    GET    server                                ServerInfo                      (no sign of use)
    POST   lease                                 ServerInfo     (renews the lease of the cluster)
    PUT    credentials                           StoreCredentials
    PUT    models/{project}/{model}              RegisterRequest -> JobInfo      (safe to repeat)
    GET    models/{project}/{model}              ModelInfo
    POST   models/{project}/{model}/train        a batch (`wire`) -> JobInfo     (Call-Id)
    POST   models/{project}/{model}/sft          SFTRequest -> JobInfo           (Call-Id)
    POST   models/{project}/{model}/log          LogRequest
    GET    models/{project}/{model}/checkpoints  list[CheckpointInfo]
    DELETE models/{project}/{model}/checkpoints/{step}
    GET    models/{project}/{model}/history      list of rows: step, kind, created_at, metrics
    POST   models/{project}/{model}/prune        PruneRequest -> list[CheckpointInfo]
    POST   models/{project}/{model}/fork         ForkRequest -> CheckpointInfo
    POST   sessions                              SessionRequest -> SessionInfo
    POST   sessions/{id}/close                   Recording                       (safe to repeat)
    DELETE sessions/{id}
    GET    jobs/{id}                             JobInfo
    GET    jobs/{id}/events                      server-sent JobEvents, after `Last-Event-ID`

A session's own OpenAI routes lie under `/sessions/{id}/v1` and need the session's key.

A job's call carries an id of the caller's: a repeat is answered with what the first one did.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PlainSerializer,
    SecretStr,
)

from .config import Count, Frozen, LoRAConfig, Retention, SFTConfig, StepNumber
from .names import ModelName

PROTOCOL = 1
CALL_ID = "Art-Call-Id"
AFTER = "Art-After"
"""The id of the call before, whose step may not be durable yet: a server that does not know it has
taken another's place, and makes no step from what is in the store."""
VERSION = "Art-Version"
POLICY = "Art-Policy"

EngineName = Literal["transformers", "vllm"]
"""What samples on a server."""

K = TypeVar("K")
Durability = Literal["sync", "async"]
"""When a job is done: once its step is in the store, or once it is served."""


def is_finite(value: object) -> bool:
    """Whether it is a number that JSON has."""
    try:
        return isinstance(value, int | float) and isfinite(value)
    except OverflowError:  # an integer that no float can be
        return False


def finite(found: Any) -> Any:
    """The entries of a mapping whose values are finite numbers. A value that is no mapping is
    returned as it is."""
    if not isinstance(found, Mapping):
        return found
    return {name: value for name, value in found.items() if is_finite(value)}


Finite = Annotated[dict[K, float], BeforeValidator(finite), PlainSerializer(finite)]
"""Numbers by their names. Those that JSON lacks (inf, nan) and null are dropped, both when read and
when written."""
Metrics = Finite[str]


class Received(BaseModel):
    """A message that the other side may extend in a later version."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Sample(Received):
    """One call of the model: exactly the ids that the engine saw and sampled (lengths P, C, C).

    `logprobs` are natural logs under the distribution that was sampled from, at `temperature` and
    before any top-p or top-k cut (a greedy sample, temperature 0, is scored at temperature 1).
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[FiniteFloat]
    policy: str
    temperature: FiniteFloat = 1.0
    masked: bool = False
    """Whether a grammar, a forced tool, a bias or a penalty had a say in what was sampled: the
    logprobs are then not the model's own, and nothing is trained on them."""


class Clock(Received):
    """A limit of the server's life. The server ends a little before `remaining` is 0."""

    name: str
    """`lease`, `idle`, `budget` or `deadline`."""
    limit: float
    remaining: float
    unit: Literal["s", "USD"]


class ServerInfo(Received):
    version: str
    protocol: int
    base_model: str | None
    """None until a model is registered, when the server was started without one."""
    engine: str
    device: str
    store: str
    single_writer: bool = False
    """Whether two servers that train one model are not told apart: the store has no conditional
    writes that hold."""
    credentials_until: datetime | None = None
    """When the server's credentials for the store end, if it knows."""
    policies: list[str]
    not_durable: list[str] = []
    """Policies that are served and not in the store yet (`--durability async`)."""
    jobs_queued: int
    requests_running: int
    requests_waiting: int
    training: str | None
    """What the trainer is doing now, in words."""
    started_at: datetime
    loading_seconds: float | None = None
    """Seconds that loading the base model took."""
    clocks: list[Clock] = []
    """The limits of the server's life."""
    warnings: list[str] = []
    """Announced ends of the server that nobody can put off."""
    steps_made: NonNegativeInt = 0
    """Counted since `started_at`, as the tokens trained on and sampled."""
    tokens_trained: NonNegativeInt = 0
    tokens_sampled: NonNegativeInt = 0


class StoreCredentials(Frozen):
    """New credentials with which the server reaches its store: variables, as boto3 names them."""

    variables: dict[str, SecretStr]


class RegisterRequest(Frozen):
    base_model: str
    lora: LoRAConfig = LoRAConfig()
    retention: Retention | None = None


class ModelInfo(Received):
    project: str
    model: str
    base_model: str
    step: NonNegativeInt
    policy: str
    context_length: int


class StepResult(Received):
    """The result of a finished job: the newest step and its metrics."""

    step: NonNegativeInt
    policy: str
    metrics: Metrics = {}
    durable: bool = True
    """Whether the step is in the store: the loss of the server's machine can't undo it then."""


class ErrorBody(Received):
    """OpenAI's error object."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


JobKind = Literal["register", "train", "sft"]
JobState = Literal["queued", "running", "done", "failed"]


class JobInfo(Received):
    id: str
    kind: JobKind
    project: str
    model: str
    state: JobState
    result: StepResult | None = None
    error: ErrorBody | None = None

    @property
    def name(self) -> ModelName:
        return ModelName(self.project, self.model)

    @property
    def durable(self) -> bool:
        return self.result is not None and self.result.durable


class JobEvent(Received):
    """An event of a job, numbered from 1. Its kinds are `queued`, `started`, `progress`, then
    `done` or `failed`, whose `data` is the job's `StepResult` or `ErrorBody`. A `warning` is about
    the server."""

    number: int
    type: Literal["queued", "started", "progress", "warning", "done", "failed"]
    time: datetime
    data: dict[str, Any] = {}


class TrainGroup(Frozen):
    """One group of trajectories: their rewards, and for each the places of its samples in the
    batch.

    What else is known of each trajectory is not trained on, and kept beside the step.
    """

    rewards: list[FiniteFloat]
    samples: list[list[NonNegativeInt]]
    metrics: list[dict[str, FiniteFloat]] = []
    metadata: list[dict[str, Any]] = []


class SFTExample(Frozen):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class SFTRequest(Frozen):
    examples: list[SFTExample]
    config: SFTConfig = SFTConfig()


class LoggedTrajectory(Frozen):
    """`group` and `trajectory` count from 0 within the call; `samples` are places in its batch."""

    group: Count
    trajectory: Count
    reward: FiniteFloat
    metrics: Metrics
    metadata: dict[str, Any]
    messages: list[Any]
    logs: list[str]
    samples: list[NonNegativeInt]


class LogRequest(Frozen):
    """An evaluation's trajectories and their mean metrics, kept beside the step they belong to."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    split: str
    step: StepNumber
    metrics: dict[str, FiniteFloat]
    trajectories: list[LoggedTrajectory] = []
    samples: bytes = b""
    """A batch (`wire`) without groups."""


class ForkRequest(Frozen):
    to_project: str
    to_model: str
    step: StepNumber | None = None


class PruneRequest(Frozen):
    retention: Retention
    dry_run: bool = False


class CheckpointInfo(Received):
    project: str
    model: str
    step: NonNegativeInt
    kind: Literal["init", "train", "sft", "fork", "push"]
    created_at: datetime
    bytes: int
    call_id: str = ""
    """The id of the call that made the step."""
    metrics: Metrics
    """The metrics of the train call, and those that were logged for this step (`val/reward`, ...).
    """


class SessionRequest(Frozen):
    model: str
    """`project/model`, or one of its policies."""


class SessionInfo(Received):
    id: str
    key: str = Field(repr=False)


class RecordedChoice(Received):
    message: NonNegativeInt
    finish_reason: str
    sample: NonNegativeInt


class RecordedCall(Received):
    """One request that was answered in full. Numbers are places in the lists of its `Recording`."""

    messages: list[NonNegativeInt]
    tools: NonNegativeInt | None
    choices: list[RecordedChoice]


class Recording(Received):
    """What a session recorded, its calls in the order in which they were made."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    texts: list[Any]
    """Messages and lists of tools, each once, however often it was sent."""
    calls: list[RecordedCall]
    cancelled: NonNegativeInt
    """How many requests the client gave up, or were under way when the session was closed."""
    samples: bytes
    """A batch (`wire`) without groups."""
