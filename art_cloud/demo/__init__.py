"""The demo: an agent learns tic-tac-toe on this machine, from a model made on the spot."""

from .report import plot, print_table
from .run import DemoResult, run_demo

__all__ = ["DemoResult", "plot", "print_table", "run_demo"]
