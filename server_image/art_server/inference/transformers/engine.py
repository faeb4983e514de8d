"""The engine `transformers`: in this process, beside the trainer, over the same base weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from art_cloud.shared.errors import (
    ArtCloudError,
    ConfigError,
    InvalidRequestError,
    ServerStoppingError,
)

from ..adapters import AdapterModel
from ..engine import EngineStats, Route, not_loaded
from ..openai.prompt_length import PromptLength, is_long
from ..openai.prompts import read_chat, read_prompts, room
from ..openai.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from .generation import Event, Generation, Piece
from .responses import Responder
from .sampling import SamplingParams
from .scheduler import Scheduler


class Lane:
    """A copy of the tokenizer that encodes in a thread of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


class TransformersEngine:
    """`art_server.inference.engine.Engine` on an unmodified Hugging Face model.

    `model` and `tokenizer` stay the caller's: the engine makes a module tree of its own over the
    same tensors, and copies of the tokenizer. `max_cache_tokens` bounds rows times columns of the
    running batch's keys and values.
    """

    name = "transformers"
    slots = 8

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        base_model_name: str,
        context_length: int,
        *,
        max_rows: int = 64,
        max_cache_tokens: int = 262_144,
    ) -> None:
        attention = set(getattr(model.config, "layer_types", None) or [])
        if attention - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"{base_model_name!r} has layers of types {sorted(attention)}. The transformers "
                "engine serves attention layers only; use --engine vllm for this model."
            )
        self._model = AdapterModel(model)
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._end_ids = _end_ids(model, tokenizer)
        # A fast tokenizer refuses to be read while another thread encodes: one copy encodes, in one
        # thread, another decodes, in any. Long requests have a copy and a thread of their own, so
        # that short ones need not wait for them.
        self._decoder = copy.deepcopy(tokenizer)
        self._lanes = {long: Lane(copy.deepcopy(tokenizer)) for long in (False, True)}
        self._length = PromptLength.of(tokenizer, context_length)
        self._base_model_name = base_model_name
        self._context_length = context_length
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._policies: set[str] = set()
        self._scheduler: Scheduler | None = None

    async def start(self) -> None:
        self._scheduler = Scheduler(
            self._model,
            self._decode,
            self._end_ids,
            asyncio.get_running_loop(),
            max_rows=self._max_rows,
            max_cache_tokens=self._max_cache_tokens,
        )
        self._scheduler.start()

    async def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
            await asyncio.to_thread(self._scheduler.join)
        for lane in self._lanes.values():
            lane.thread.shutdown(wait=False)

    async def load(self, policy: str, adapter: Path) -> None:
        scheduler = self._running()
        await asyncio.wrap_future(scheduler.call(lambda: scheduler.load(policy, adapter)))
        self._policies.add(policy)

    async def unload(self, policy: str) -> None:
        if policy not in self._policies:
            raise not_loaded(policy)
        scheduler = self._running()
        self._policies.discard(policy)
        await asyncio.wrap_future(scheduler.call(lambda: scheduler.retire(policy)))

    def policies(self) -> list[str]:
        return sorted(self._policies)

    def asleep(self) -> nullcontext[None]:
        return nullcontext()

    def stats(self) -> EngineStats:
        return self._scheduler.stats() if self._scheduler else EngineStats()

    @property
    def ended(self) -> ArtCloudError | None:
        return self._scheduler.ended if self._scheduler else None

    async def create(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> dict[str, Any]:
        generations, responder = await self._prepare(route, body, policy, streamed=False)
        pieces = [piece async for piece in self._pieces(generations)]
        return responder.whole(pieces, _prompt_tokens(generations))

    async def stream(
        self, route: Route, body: dict[str, Any], policy: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        generations, responder = await self._prepare(route, body, policy, streamed=True)
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        rows = []
        opened: set[int] = set()
        pieces = self._pieces(generations)
        try:
            async for piece in pieces:
                index = piece.row.index
                if route == "chat/completions" and index not in opened:
                    opened.add(index)
                    yield responder.opening(index)
                if (chunk := responder.chunk(piece)) is not None:
                    yield chunk
                if piece.finish_reason is not None:
                    rows.append(piece.row)
        finally:
            await pieces.aclose()
        if include_usage:
            yield responder.usage_chunk(_prompt_tokens(generations), rows)

    async def _prepare(
        self, route: Route, body: dict[str, Any], policy: str | None, *, streamed: bool
    ) -> tuple[list[Generation], Responder]:
        if policy is not None and policy not in self._policies:
            raise not_loaded(policy)
        self._running()
        lane = self._lanes[is_long(body)]
        loop = asyncio.get_running_loop()
        request, prompts = await loop.run_in_executor(
            lane.thread, self._read, route, body, lane.tokenizer
        )
        if request.n > self._max_rows:
            raise InvalidRequestError(
                f"n is {request.n}, but this server runs {self._max_rows} choices at once."
            )
        events: asyncio.Queue[Event] = asyncio.Queue()
        generations = [
            Generation(
                prompt_ids=prompt_ids,
                policy=policy,
                params=self._params(request, prompt_ids),
                choices=request.n,
                streamed=streamed,
                events=events,
                first_index=number * request.n,
            )
            for number, prompt_ids in enumerate(prompts)
        ]
        responder = Responder(
            "chat" if isinstance(request, ChatRequest) else "text",
            policy or self._base_model_name,
            self._decode,
            parse_tools=isinstance(request, ChatRequest)
            and bool(request.tools)
            and request.tool_choice == "auto",
            logprobs=request.alternatives is not None,
        )
        return generations, responder

    def _read(
        self, route: Route, body: dict[str, Any], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[ChatRequest | CompletionRequest, list[list[int]]]:
        if route == "chat/completions":
            chat = parse_chat(body)
            return chat, [read_chat(tokenizer, chat, self._length)]
        completion = parse_completion(body)
        return completion, read_prompts(tokenizer, completion, self._vocab_size, self._length)

    def _params(
        self, request: ChatRequest | CompletionRequest, prompt_ids: Sequence[int]
    ) -> SamplingParams:
        seed = {} if request.seed is None else {"seed": request.seed}
        return SamplingParams(
            max_tokens=room(prompt_ids, request.limit, self._context_length),
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stops,
            top_logprobs=request.alternatives,
            ignore_eos=request.ignore_eos,
            **seed,
        )

    async def _pieces(self, generations: list[Generation]) -> AsyncGenerator[Piece, None]:
        """Run the generations to their end; leaving early frees their rows."""
        events = generations[0].events
        left = sum(generation.choices for generation in generations)
        scheduler = self._running()
        scheduler.submit(generations)
        try:
            while left:
                event = await events.get()
                if isinstance(event, ArtCloudError):
                    raise event
                left -= event.finish_reason is not None
                yield event
        finally:
            if left:
                scheduler.cancel(generations)

    def _running(self) -> Scheduler:
        if self._scheduler is None:
            raise ServerStoppingError("The inference engine is not running. Call start() first.")
        self._scheduler.check()
        return self._scheduler

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _prompt_tokens(generations: list[Generation]) -> int:
    return sum(len(generation.prompt_ids) for generation in generations)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
