"""Modules of the examples, which are no package."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(path: str) -> ModuleType:
    """`load("temporal_clue/puzzles.py")`"""
    name = "example_" + path.removesuffix(".py").replace("/", "_")
    spec = spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
