"""Inference engines: one contract, several ways to meet it."""

from .engine import Engine, EngineStats, Route
from .prompts import render
from .transformers_engine import TransformersEngine

__all__ = ["Engine", "EngineStats", "Route", "TransformersEngine", "render"]
