"""The bodies that vLLM gets for those of clients, and the answers that clients get for vLLM's.

Every call asks vLLM for token ids and logprobs; each choice leaves with its `sample` and without
what its client did not ask for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from art_cloud.shared.errors import ContextLengthError, InvalidRequestError

from ..engine import Route
from ..openai.prompts import check_variables, room
from ..openai.requests import (
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)

# vLLM's parameters that would make the answer another one than its sample, or that no answer of
# ours shows, unless they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "ec_transfer_params": ({},),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
COMMON = {
    "chat/completions": frozenset(ChatRequest.model_fields) - {"tool_choice"},
    "completions": frozenset(CompletionRequest.model_fields),
}
"""Parameters that both engines understand, and check in the same way."""


@dataclass
class Call:
    """One request: what vLLM gets, and what its client sees of the answer."""

    route: Route
    payload: dict[str, Any]
    policy: str
    """The model that the answer names: the policy, or the base model's name."""
    temperature: float
    choices: int
    """How many choices there are for each prompt."""
    copies: int
    """How many choices vLLM makes for each prompt: greedy ones are all the same, so it makes
    one."""
    shows_logprobs: bool
    top: int
    """How many alternatives a chat shows for each token."""
    _sampled: dict[int, tuple[list[int], list[int], list[float]]] = field(default_factory=dict)
    """Prompt ids, completion ids and logprobs of a stream's choices so far."""
    _held: dict[int, str] = field(default_factory=dict)
    """Whitespace of each choice of a stream that is held back: if a tool call follows it is
    dropped, as the chat template puts its own there."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for choice in answer["choices"]:
            prompt_ids = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
            sample = self._sample(prompt_ids, choice["token_ids"], self._logprobs(choice))
            if self.route == "chat/completions":
                content: dict[str, Any] = {"message": _message(choice["message"])}
            else:
                content = {"text": choice["text"]}
            content |= self._common(choice) | {"sample": sample}
            choices += [{"index": index, **content} for index in self._indices(choice)]
        return self._envelope(answer, choices) | {"usage": self._usage(answer["usage"])}

    def chunks(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The client's chunks for a chunk of vLLM's: none where it only held token ids."""
        for choice in chunk["choices"]:
            index = choice["index"]
            if index not in self._sampled:
                self._sampled[index] = ([], [], [])
            prompt_ids, completion_ids, logprobs = self._sampled[index]
            prompt_ids += choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or []
            completion_ids += choice.get("token_ids") or []
            logprobs += self._logprobs(choice)
            content = self._common(choice)
            if self.route == "chat/completions":
                delta = self._delta(choice)
                said, content = bool(delta), {"delta": delta} | content
            else:
                said, content = bool(choice["text"]), {"text": choice["text"]} | content
            if content["finish_reason"] is not None:
                content["sample"] = self._sample(prompt_ids, completion_ids, logprobs)
            elif not said and not content["logprobs"]:
                continue
            for copy in self._indices(choice):
                yield self._envelope(chunk, [{"index": copy, **content}])
        if not chunk["choices"] and chunk.get("usage"):
            yield self._envelope(chunk, []) | {"usage": self._usage(chunk["usage"])}

    def _delta(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        delta = {name: value for name, value in choice["delta"].items() if value is not None}
        if "tools" not in self.payload:
            return delta
        said = self._held.pop(choice["index"], "") + delta.pop("content", "")
        kept = said.rstrip()
        if choice["finish_reason"] is None and not delta.get("tool_calls"):
            self._held[choice["index"]] = said[len(kept) :]
        elif choice["finish_reason"] in ("stop", "length") and not delta.get("tool_calls"):
            kept = said
        return {**delta, "content": kept} if kept or "role" in delta else delta

    def _indices(self, choice: Mapping[str, Any]) -> range:
        first = choice["index"] * self.copies
        return range(first, first + self.copies)

    def _common(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        common = {
            "logprobs": self._shown(choice["logprobs"]) if self.shows_logprobs else None,
            "finish_reason": choice["finish_reason"],
        }
        if choice.get("stop_reason") is not None:
            common["stop_reason"] = choice["stop_reason"]
        return common

    def _shown(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Cut each token's alternatives to as many as the client asked for: vLLM lists the sampled
        token among them, and was asked for one more."""
        if logprobs is not None and self.route == "chat/completions":
            for entry in logprobs["content"] or []:
                entry["top_logprobs"].sort(key=lambda one: one["logprob"], reverse=True)
                del entry["top_logprobs"][self.top :]
        return logprobs

    def _logprobs(self, choice: Mapping[str, Any]) -> list[float]:
        logprobs = choice["logprobs"]
        if logprobs is None:
            return []
        if self.route == "chat/completions":
            return [entry["logprob"] for entry in logprobs["content"] or []]
        return logprobs["token_logprobs"]

    def _sample(
        self, prompt_ids: list[int], completion_ids: list[int], logprobs: list[float]
    ) -> dict[str, Any]:
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "policy": self.policy,
            "temperature": self.temperature,
            "masked": False,
        }

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        completion_tokens = usage["completion_tokens"] * self.copies
        return {name: value for name, value in usage.items() if value is not None} | {
            "completion_tokens": completion_tokens,
            "total_tokens": usage["prompt_tokens"] + completion_tokens,
        }

    def _envelope(self, answer: Mapping[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": answer["id"],
            "object": answer["object"],
            "created": answer["created"],
            "model": self.policy,
            "choices": choices,
        }


def prepare(
    route: Route,
    body: Mapping[str, Any],
    policy: str,
    *,
    known: frozenset[str],
    context_length: int,
    stream: bool,
) -> Call:
    """Turn a client's body into a call. `known` are the parameters that this vLLM has for `route`:
    it ignores all others silently.

    Raises `InvalidRequestError` and `ContextLengthError`.
    """
    for name, value in body.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise InvalidRequestError(
                    f"{name}={value!r:.100} is not supported by this server. Leave {name} out."
                )
        elif name not in known:
            raise InvalidRequestError(
                f"{name} is not a parameter of {route} that this vLLM knows. Leave it out."
            )
    common = {name: value for name, value in body.items() if name in COMMON[route]}
    request: ChatRequest | CompletionRequest
    asked: dict[str, Any]
    if route == "chat/completions":
        chat = parse_chat(common)
        check_variables(chat.chat_template_kwargs)
        _check_forced_tool(body)
        request, asked = chat, _tools(chat, body)
        top, prompts = chat.top_logprobs, 1
        asked |= {"logprobs": True, "top_logprobs": top and top + 1}
    else:
        request = completion = parse_completion(common)
        asked = {"logprobs": completion.logprobs or 0}
        top, prompts = 0, _count(completion, context_length)
    copies = request.n if request.temperature == 0 else 1
    asked |= {"stream": stream, "return_token_ids": True, "n": request.n // copies}
    payload = {
        name: value
        for name, value in {**body, **asked}.items()
        if value is not None
        and value != []
        and name not in NEUTRAL
        and (name not in WITHOUT_EFFECT or name in asked)
    }
    return Call(
        route=route,
        payload=payload,
        policy=policy,
        temperature=request.temperature,
        choices=request.n * prompts,
        copies=copies,
        shows_logprobs=request.alternatives is not None,
        top=top,
    )


def _count(request: CompletionRequest, context_length: int) -> int:
    """How many prompts there are; those given as ids are checked for their length."""
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        return 1
    prompts = [prompt] if prompt and isinstance(prompt[0], int) else prompt
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt is empty. Give at least one token.")
    for one in prompts:
        if not isinstance(one, str):
            room(one, request.limit, context_length)
    return len(prompts)


def _tools(request: ChatRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """The tools as the prompt shows them elsewhere (`prompts.read_chat`, SFT). vLLM adds null
    fields to them, unless the chat template gets them as a variable."""
    if not request.tools or body.get("tool_choice") == "none":
        return {"tools": None, "tool_choice": None}
    tools = [tool.model_dump() for tool in request.tools]
    return {"chat_template_kwargs": {**request.chat_template_kwargs, "tools": tools}}


def _check_forced_tool(body: Mapping[str, Any]) -> None:
    if body.get("tool_choice") not in (None, "auto", "none") and not body.get("tools"):
        raise InvalidRequestError("tool_choice forces a call, but there are no tools.")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if value is not None}
    if kept.get("tool_calls"):
        kept["content"] = kept.get("content", "").rstrip() or None
    return {"role": "assistant", "content": None, "refusal": None} | kept


def known_parameters(schema: Mapping[str, Any], route: Route) -> frozenset[str]:
    """The names that vLLM's OpenAPI schema has for a route's body."""
    body = schema["paths"][f"/v1/{route}"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    return frozenset(schema["components"]["schemas"][name]["properties"])


async def events(parts: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The data of a stream of server-sent events, up to `[DONE]`."""
    pending = b""
    async for part in parts:
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def refused(status: int, error: Mapping[str, Any]) -> InvalidRequestError:
    """The error for the client that stands for an answer of vLLM's with status 4xx."""
    message = str(error.get("message", "no reason given")).removesuffix(".")
    if error.get("param") == "input_tokens":
        return ContextLengthError(f"{message}. Shorten the prompt.")
    return InvalidRequestError(f"vLLM refuses the request ({status}): {message}.")
