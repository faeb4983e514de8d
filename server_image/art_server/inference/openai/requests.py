"""The OpenAI bodies that the `transformers` engine understands. What it can't do, it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from art_cloud.shared.errors import InvalidRequestError
from art_cloud.shared.validation import complaint

from ..engine import Route

# Parameters without any effect on what a local engine answers.
WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "return_token_ids",  # every choice carries them, in `sample`
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Parameters that are understood only where they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}

T = TypeVar("T", bound="GenerationRequest")
COLDEST = 0.01
"""The lowest temperature above 0, as in vLLM: requests between the two get this one."""
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(Body):
    model: str
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    """0 samples greedily; any other value counts as at least `COLDEST`: below it, divided logits
    overflow."""
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = None
    stop: str | list[str] = []
    max_tokens: PositiveInt | None = None
    ignore_eos: bool = False
    """Go on to `max_tokens` even after an end of text, as in vLLM."""
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _is_warm(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:
            raise ValueError(f"Input should be 0, for greedy sampling, or at least {COLDEST}")
        return temperature

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(stop for stop in stops if stop)


class Message(BaseModel):
    """A message of any role: fields that the chat template may know are passed through to it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    name: str


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as `enable_thinking`, as in vLLM."""

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: str | list[NonNegativeInt] | list[str] | list[list[NonNegativeInt]]
    logprobs: TopLogprobs | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int:
        return self.max_tokens or 16  # OpenAI's default for this route


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise InvalidRequestError(
            "tool_choice must be 'auto' or 'none': the transformers engine does not guide "
            "decoding, so it can't force a call. Use 'auto' and ask for the call in the prompt."
        )
    request = _parse(ChatRequest, "chat/completions", body)
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ. Set max_completion_tokens only."
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.")
    return request


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    return _parse(CompletionRequest, "completions", body)


def _parse(kind: type[T], route: Route, body: Mapping[str, Any]) -> T:
    for name, allowed in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise InvalidRequestError(
                f"{name}={body[name]!r:.100} is not supported by the transformers engine. Leave "
                f"{name} out."
            )
    known = {
        name: value
        for name, value in body.items()
        if value is not None and name not in WITHOUT_EFFECT and name not in NEUTRAL
    }
    try:
        request = kind.model_validate(known)
    except ValidationError as error:
        raise InvalidRequestError(_explain(error, route)) from error
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true.")
    return request


def _explain(error: ValidationError, route: Route) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a parameter of {route} that this engine knows. Leave it out."
    return f"{complaint(error)}. Got {first['input']!r:.100}."
