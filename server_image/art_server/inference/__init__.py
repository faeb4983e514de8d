"""Inference engines: one contract, several ways to meet it."""

from .engine import Engine, EngineStats, Route
from .masking import is_masked
from .prompt_length import PromptLength
from .prompts import render
from .transformers_engine import TransformersEngine
from .vllm_engine import VllmEngine
from .vllm_process import VllmSettings

__all__ = [
    "Engine",
    "EngineStats",
    "PromptLength",
    "Route",
    "TransformersEngine",
    "VllmEngine",
    "VllmSettings",
    "is_masked",
    "render",
]
