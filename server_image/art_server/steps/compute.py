"""What the server computes with: one base model, a trainer over it, and an engine beside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import ArtCloudError, ConflictError
from art_cloud.shared.protocol import EngineName

from ..inference import Engine, EngineStats, TransformersEngine, VllmEngine, VllmSettings
from ..inference.placement import (
    CONCURRENT,
    LEAST_KV_CPU,
    MOST_KV_CPU,
    Mode,
    Needs,
    activation_bytes,
    kv_bytes_per_token,
    lora_parameters,
    place,
)
from ..inference.vllm.process import find_python
from ..training import BaseModel, Trainer, load_base
from .canary import Canary

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MOVED_BYTES = 16 << 20
"""So much read or written means that a download or an upload gets on, and is not a log's line."""
POLL_SECONDS = 1.0
SLOTS = 8
TRAINED_BYTES = 16
"""Of each LoRA parameter in training: float32 weight, gradient and Adam's two moments."""


class Compute:
    """The first four are there once `open` was awaited, and `base_name` is not None."""

    base: BaseModel
    trainer: Trainer
    canary: Canary
    engine: Engine

    def __init__(
        self, engine: EngineName, vllm_python: str | None = None, placement: Mode | None = None
    ) -> None:
        self._vllm_python = find_python(vllm_python) if engine == "vllm" else None
        self._placement = placement
        self._engine: Engine | None = None
        """The engine, from before its start on."""
        self.base_name: str | None = None
        self.loading_seconds: float | None = None
        self._in_training_thread = 0
        self._training_thread = ThreadPoolExecutor(
            1, "training", torch.set_num_threads, (torch.get_num_threads(),)
        )

    async def open(self, name: str) -> None:
        """Load the base model, unless it is loaded. One server holds one."""
        if self.base_name not in (None, name):
            raise ConflictError(
                f"This server holds {self.base_name}, and {name} was asked for. One server holds "
                "one base model: start another server for it."
            )
        if self.base_name is None:
            log.info("loading %s", name)
            started = time.monotonic()
            await self.in_training_thread(self._load, name)
            self._engine = self.engine
            try:
                await self.engine.start()
            except BaseException:
                self._engine = None
                del self.base, self.trainer, self.canary, self.engine  # their memory
                raise
            self.base_name = name
            self.loading_seconds = time.monotonic() - started
            log.info("%s is loaded on %s", name, self.base.device)

    def _load(self, name: str) -> None:
        self.base = load_base(name)
        self.canary = Canary(self.base)
        self.trainer = Trainer(self.base)
        self.engine = make_engine(
            self.base, self.trainer.token_budget, self._vllm_python, self._placement
        )

    async def close(self) -> None:
        self._training_thread.shutdown(wait=True)
        if self._engine is not None:
            await self._engine.close()

    async def train(self, step: Callable[[], T]) -> T:
        """A step of the trainer, in its thread, the engine asleep where both do not fit."""

        def run() -> T:
            try:
                return step()
            finally:
                if self.base.device.type == "cuda":
                    torch.cuda.empty_cache()  # for the engine

        async with self.engine.asleep():
            return await self.in_training_thread(run)

    def in_training_thread(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Have it called there, after whatever was put there before."""
        loop = asyncio.get_running_loop()
        called = loop.run_in_executor(self._training_thread, lambda: function(*args, **kwargs))
        self._in_training_thread += 1
        called.add_done_callback(self._left_training_thread)
        return called

    def _left_training_thread(self, called: asyncio.Future[T]) -> None:
        self._in_training_thread -= 1

    @property
    def vocabulary(self) -> int:
        """The base model's number of token ids."""
        return int(self.base.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> str:
        return str(self.base.device) if self.base_name else "none yet"

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine else EngineStats()

    @property
    def sampling(self) -> bool:
        stats = self.stats()
        return stats.running + stats.waiting > 0

    @property
    def moved(self) -> int:
        """Another number whenever a job gets on: with what the trainer computes, with what is read
        and written, and, unless the trainer is at work, with what the engine does for it."""
        trained = self.trainer.computed if self.base_name else 0
        waited_for = 0 if self._in_training_thread else self.stats().moved
        return trained + waited_for + bytes_moved() // MOVED_BYTES

    async def engine_ended(self) -> ArtCloudError:
        """Wait until the engine has ended for good, and return why."""
        while True:
            if self._engine is not None and (error := self._engine.ended) is not None:
                return error
            await asyncio.sleep(POLL_SECONDS)


def bytes_moved() -> int:
    """What this process has read and written, sockets not counted; 0 where Linux is not there to
    tell."""
    try:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))


def make_engine(
    base: BaseModel, token_budget: int, vllm_python: Path | None, forced: Mode | None
) -> Engine:
    """vLLM where its Python is given, beside a trainer of `token_budget`; not started yet.

    Raises `ConfigError` if it does not fit.
    """
    if vllm_python is None:
        return TransformersEngine(base.model, base.tokenizer, base.name, base.context_length)
    needs = memory_needs(base, token_budget, LoRAConfig().rank)
    on_gpu = base.device.type == "cuda"
    memory = torch.cuda.get_device_properties(base.device).total_memory if on_gpu else 0
    gpus = torch.cuda.device_count() if on_gpu else 0
    placement = place(needs, memory, gpus, forced)
    log.info("%s", placement)
    return VllmEngine(
        VllmSettings(
            python=vllm_python,
            model=base.name,
            dtype=str(base.dtype).removeprefix("torch."),
            context_length=base.context_length,
            slots=SLOTS,
            kv_cache_bytes=None if on_gpu else min(max(needs.kv, LEAST_KV_CPU), MOST_KV_CPU),
            gpu_fraction=placement.gpu_fraction,
            gpu=placement.gpu,
            can_sleep=placement.mode == "sleep",
        ),
        base.model,
        base.name,
    )


def memory_needs(base: BaseModel, token_budget: int, rank: int) -> Needs:
    """What trainer and vLLM take for this base model, with adapters of this rank."""
    config, element_bytes = base.model.config, base.dtype.itemsize
    weights = list(base.model.parameters())
    lora = lora_parameters([tuple(weight.shape) for weight in weights], rank)
    return Needs(
        base=sum(weight.numel() * weight.element_size() for weight in weights),
        adapters=lora * TRAINED_BYTES,
        activations=activation_bytes(config, token_budget),
        slots=lora * element_bytes * SLOTS,
        kv=kv_bytes_per_token(config, element_bytes) * base.context_length * CONCURRENT,
    )
