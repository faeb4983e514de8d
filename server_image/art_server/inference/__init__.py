"""Inference engines: one contract, several ways to meet it."""

from .engine import Engine, EngineStats, Route
from .openai.masking import is_masked
from .openai.prompt_length import PromptLength
from .openai.prompts import render
from .transformers.engine import TransformersEngine
from .vllm.engine import VllmEngine
from .vllm.process import VllmSettings

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
