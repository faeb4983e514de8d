"""Which inference engine serves a base model, and with how much memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from art_cloud.shared.config import LoRAConfig

from ..inference import Engine, TransformersEngine, VllmEngine, VllmSettings
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
from ..training import BaseModel

log = logging.getLogger(__name__)


SLOTS = 8
TRAINED_BYTES = 16
"""Of each LoRA parameter in training: float32 weight, gradient and Adam's two moments."""


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
