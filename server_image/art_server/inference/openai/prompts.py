"""Token ids of a request's messages or prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from art_cloud.shared.errors import ContextLengthError, InvalidRequestError

from .prompt_length import PromptLength
from .requests import ChatRequest, CompletionRequest


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The messages under the tokenizer's own chat template; its special tokens stand in the text.

    `variables` are further ones that the template knows. Raises `InvalidRequestError` if there is
    no template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError(
            "This model's tokenizer has no chat template. Use /v1/completions, or a chat model."
        )
    variables = variables or {}
    check_variables(variables)
    plain = [_plain(message) for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            plain,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InvalidRequestError(
            f"The model's chat template refuses the messages: {error}"
        ) from error
    return text


def check_variables(variables: Mapping[str, Any]) -> None:
    """Check variables of a chat template. Raises `InvalidRequestError` if one of them is none."""
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := sorted(variables.keys() & parameters.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs: {', '.join(taken)} can't be set from outside. Leave it out."
        )


def read_chat(
    tokenizer: PreTrainedTokenizerBase, request: ChatRequest, length: PromptLength
) -> list[int]:
    """The ids of a chat request's prompt. Raises `InvalidRequestError` as `render` does."""
    text = render(
        tokenizer,
        [message.model_dump(exclude_none=True) for message in request.messages],
        [tool.model_dump() for tool in request.tools] if request.tool_choice == "auto" else None,
        variables=request.chat_template_kwargs,
    )
    length.check(text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def read_prompts(
    tokenizer: PreTrainedTokenizerBase,
    request: CompletionRequest,
    vocab_size: int,
    length: PromptLength,
) -> list[list[int]]:
    """The ids of each prompt of the request; text may hold special tokens.

    Raises `InvalidRequestError` if a prompt is empty or an id is not in the vocabulary.
    """
    given: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    for one in given:
        if isinstance(one, str):
            length.check(one)
    prompts = [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in given]
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt is empty. Give at least one token.")
    highest = max(max(prompt) for prompt in prompts)
    if highest >= vocab_size:
        raise InvalidRequestError(
            f"prompt has token id {highest}, but the vocabulary ends at {vocab_size - 1}."
        )
    return prompts


def room(prompt_ids: Sequence[int], limit: int | None, context_length: int) -> int:
    """How many tokens may follow the prompt. Raises `ContextLengthError` where prompt and limit
    don't fit."""
    left = context_length - len(prompt_ids)
    if left < 1:
        raise ContextLengthError(
            f"The prompt has {len(prompt_ids)} tokens, and the model's context length is "
            f"{context_length}: no room is left to answer. Shorten the prompt."
        )
    if limit is not None and limit > left:
        raise ContextLengthError(
            f"The prompt has {len(prompt_ids)} tokens and max_tokens is {limit}, which together "
            f"exceed the model's context length of {context_length}. Shorten the prompt, or ask "
            f"for {left} tokens at most."
        )
    return left if limit is None else limit


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: text content, tool arguments as objects, no
    `developer` role."""
    plain = dict(message)
    if plain.get("role") == "developer":
        plain["role"] = "system"
    plain["content"] = _text(plain.get("content") or "")
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return plain


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequestError(
            f"messages.content is {content!r:.100}. It has to be text, or a list of parts."
        )
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"messages.content has a part of type {part.get('type')!r}. Only text is read."
            )
    return "".join(part["text"] for part in content)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("messages.tool_calls: each call needs function.name.")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)
        except ValueError as error:
            raise InvalidRequestError(
                f"messages.tool_calls: the arguments of {function['name']!r} are not JSON: {error}"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
