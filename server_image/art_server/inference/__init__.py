"""Inference engines: one contract, several ways to meet it."""

from .engine import Engine, EngineStats, Route
from .masking import is_masked
from .prompts import render
from .transformers_engine import TransformersEngine

__all__ = ["Engine", "EngineStats", "Route", "TransformersEngine", "is_masked", "render"]
