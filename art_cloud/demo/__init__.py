"""The demo: an agent learns tic-tac-toe on this machine, from a model made on the spot."""

from .run import DemoResult, run_demo

__all__ = ["DemoResult", "run_demo"]
