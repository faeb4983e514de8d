"""Agents that learn on this machine, from a model made on the spot: the demo and the examples."""

from .example import run_example
from .experiment import Experiment, Result, run_experiment
from .report import plot, print_table
from .run import run_demo

__all__ = [
    "Experiment",
    "Result",
    "plot",
    "print_table",
    "run_demo",
    "run_example",
    "run_experiment",
]
