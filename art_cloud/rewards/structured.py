"""Ask a model at any OpenAI-compatible endpoint for JSON of a given form: judges and generators.

An answer that can't be used is sent back once with what is wrong about it. Rate limits, overload
and lost connections are retried by the `openai` client, which honours `Retry-After`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError

from ..model import Model
from ..shared.errors import (
    AnswerError,
    AuthError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    ServerUnavailableError,
)
from ..shared.validation import complaint

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import Choice

F = TypeVar("F", bound=BaseModel)

OPENAI = "https://api.openai.com/v1"
CONCURRENCY = 8
OURS = {"model", "messages", "response_format", "stream", "n"}
QUOTED = 2000
"""How many characters of a bad answer are shown in an error, and to the model when it is asked
again."""


class ChatOptions(TypedDict, total=False):
    """How to reach a judge or a generator that is given by its name.

    base_url: The endpoint. Default: OPENAI_BASE_URL, or OpenAI's own.
    api_key: Default: OPENAI_API_KEY, which goes only to the default endpoint.
    max_concurrency: Requests under way at once. All calls in one event loop that give the same
        endpoint, model and limit share it.
    price: USD for a million prompt tokens and for a million completion tokens. What the endpoint
        itself reports as `usage.cost` comes first.
    """

    base_url: str | None
    api_key: str | None
    max_concurrency: int
    price: tuple[float, float] | None


@dataclass
class ChatUsage:
    """The requests that were made to a model so far."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    def add(self, usage: CompletionUsage | None, price: tuple[float, float] | None) -> None:
        self.requests += 1
        if usage is None:
            return
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        cost = (usage.model_extra or {}).get("cost")
        if not isinstance(cost, int | float) and price is not None:
            cost = (usage.prompt_tokens * price[0] + usage.completion_tokens * price[1]) / 1e6
        if isinstance(cost, int | float):
            self.cost = (self.cost or 0.0) + cost


@dataclass
class _Shared:
    """State that all calls to one model in one event loop share."""

    permits: asyncio.Semaphore
    refuses_schema: bool = False


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str, int], _Shared]] = (
    WeakKeyDictionary()
)


@asynccontextmanager
async def open_chat(
    model: str | Model[Any],
    options: ChatOptions | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> AsyncIterator[StructuredChat]:
    """A `StructuredChat` with a model, for the length of the block.

    Args:
        model: a name at the endpoint of `options`, or a `Model` that brings its own endpoint.
        parameters: of every request: temperature, reasoning_effort, timeout, ...

    Raises:
        ConfigError: it is not known where the model answers or with which key, or a parameter is
            none of a chat completion.
    """
    asked, given = options or {}, dict(parameters or {})
    own = isinstance(model, str)
    if isinstance(model, str):
        model = _model_of(model, asked)
    elif asked.get("base_url") or asked.get("api_key"):
        raise ConfigError(
            f"Model {model.name!r} brings its own endpoint. Leave base_url and api_key out, or "
            "give the model by its name."
        )
    limit = asked.get("max_concurrency", CONCURRENCY)
    if limit < 1:
        raise ConfigError(f"max_concurrency is {limit}. Give a number of requests above 0.")
    client, name = model.openai_client(), model.get_inference_name()
    known = inspect.signature(client.chat.completions.create).parameters.keys() - OURS
    if unknown := given.keys() - known:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: can't be set of a request to {name}. "
            "Parameters of OpenAI's chat completions can, such as temperature, "
            "max_completion_tokens, reasoning_effort and timeout; others go into extra_body."
        )
    loops = _shared.setdefault(asyncio.get_running_loop(), {})
    shared = loops.setdefault(
        (str(client.base_url), name, limit), _Shared(asyncio.Semaphore(limit))
    )
    try:
        yield StructuredChat(client, name, given, asked.get("price"), shared)
    finally:
        if own:
            await model.close()


class StructuredChat:
    """One model, asked for JSON. `usage` counts every request, also those whose answer was bad."""

    def __init__(
        self,
        client: AsyncOpenAI,
        name: str,
        parameters: Mapping[str, Any],
        price: tuple[float, float] | None,
        shared: _Shared,
    ) -> None:
        self.name = name
        self.usage = ChatUsage()
        self._client = client
        self._parameters = parameters
        self._price = price
        self._shared = shared

    def __str__(self) -> str:
        return f"{self.name} at {self._client.base_url.copy_with(userinfo=b'')}"

    async def ask(
        self, system: str, user: str, form: type[F], check: Callable[[F], Sequence[str]]
    ) -> F:
        """An answer of `form` in which `check` finds nothing wrong.

        Args:
            check: what is wrong with an answer, said so that the model can mend it.

        Raises:
            AnswerError: neither the first answer nor the mended one can be used.
            AuthError, NotFoundError, InvalidRequestError: the endpoint refused.
            ServerUnavailableError: it did not answer, after retries.
        """
        messages: list[Any] = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
        ]
        answer, problems = await self._try(messages, form, check)
        if isinstance(answer, str):
            messages += [
                {"role": "assistant", "content": answer[:QUOTED]},
                {
                    "role": "user",
                    "content": "Your answer can't be used:\n"
                    + "".join(f"- {problem}\n" for problem in problems)
                    + "Answer again, with the whole JSON and nothing else.",
                },
            ]
            answer, problems = await self._try(messages, form, check)
        if isinstance(answer, str):
            raise AnswerError(
                f"{self} gave no answer that can be used, and a second one, asked for with what "
                f"was wrong, was no better: {' '.join(problems)} It began: {answer[:QUOTED]!r}. "
                "Ask a more capable model, ask for less at once, or allow longer answers "
                "(max_completion_tokens)."
            )
        return answer

    async def _try(
        self, messages: list[Any], form: type[F], check: Callable[[F], Sequence[str]]
    ) -> tuple[F | str, Sequence[str]]:
        """Ask once: the parsed answer and None, or the answer's text and what is wrong with it."""
        choice = await self._complete(messages, form)
        text = choice.message.content or ""
        try:
            answer = form.model_validate_json(_json_in(text))
            problems = check(answer)
        except ValidationError as error:
            problems = [f"It is not JSON of the form that was asked for: {complaint(error)}."]
        if not problems:
            return answer, []
        if choice.finish_reason == "length":
            problems = ["It was cut off at the limit of tokens: be briefer.", *problems]
        if choice.message.refusal:
            problems = [f"It was a refusal: {choice.message.refusal[:QUOTED]}", *problems]
        return text, problems

    async def _complete(self, messages: list[Any], form: type[BaseModel]) -> Choice:
        async with self._shared.permits:
            if self._shared.refuses_schema:
                return await self._create(messages)
            try:
                return await self._create(messages, response_format=_response_format(form))
            except InvalidRequestError:
                choice = await self._create(messages)  # raises if that was not the reason
                self._shared.refuses_schema = True
                return choice

    async def _create(self, messages: list[Any], **more: Any) -> Choice:
        import openai

        try:
            completion: ChatCompletion = await self._client.chat.completions.create(
                model=self.name, messages=messages, **{**self._parameters, **more}
            )
        except openai.APIError as error:
            self._raise(error)
        self.usage.add(completion.usage, self._price)
        if not completion.choices:
            raise AnswerError(f"{self} answered without a choice. Try again, or another model.")
        return completion.choices[0]

    def _raise(self, error: Exception) -> NoReturn:
        import openai

        match error:
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                raise AuthError(f"{self} refuses the key. Give the right api_key.") from None
            case openai.NotFoundError():
                raise NotFoundError(f"There is no {self}: {error}. See base_url and the name.")
            case openai.BadRequestError() | openai.UnprocessableEntityError():
                raise InvalidRequestError(f"{self} refuses the request: {error}.") from error
            case openai.APIStatusError():
                raise ServerUnavailableError(
                    f"{self} answers {error.status_code}, after retries: {error}. Try again later, "
                    "or with a lower max_concurrency."
                ) from error
        raise ServerUnavailableError(
            f"{self} can't be reached, after retries: {error} Is it up, and is base_url right?"
        ) from error


def _model_of(name: str, options: ChatOptions) -> Model[Any]:
    """The model `name` at the endpoint of `options`, or of the environment."""
    base_url, api_key = options.get("base_url"), options.get("api_key")
    if base_url is None:
        base_url = os.environ.get("OPENAI_BASE_URL") or OPENAI
        api_key = api_key or os.environ.get("OPENAI_API_KEY")
        if base_url == OPENAI:
            name = name.removeprefix("openai/")  # as LiteLLM, and so OpenPipe ART, writes it
            if "/" in name:
                raise ConfigError(
                    f"{name!r} is none of OpenAI's models. Give the OpenAI-compatible endpoint "
                    "where it answers: base_url= and api_key=, or an art.Model."
                )
    if not api_key:
        raise ConfigError(
            f"There is no key for {name}: give api_key=, or set OPENAI_API_KEY for OpenAI's own "
            'endpoint. For an endpoint that wants none: api_key="none".'
        )
    return Model(name=name, project="asked", inference_base_url=base_url, inference_api_key=api_key)


def _response_format(form: type[BaseModel]) -> Any:
    """The `response_format` for a form. It has the same bytes on each call: endpoints compile a
    schema once."""
    schema = {"name": form.__name__.strip("_"), "schema": form.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _json_in(text: str) -> str:
    """The JSON object in an answer: without a grammar, models think before it and put it between
    fences."""
    text = text.rpartition("</think>")[2]
    start, end = text.find("{"), text.rfind("}")
    return text[start : end + 1] if 0 <= start < end else text
