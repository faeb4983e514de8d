"""Agents that learn on this machine, from a model made on the spot: the demo and the examples."""

from .example import Place, auto_settings, example_parser, experiment_parser, prepare, run_example
from .experiment import NO_THINKING, Experiment, Result, run_experiment
from .report import plot, print_table
from .run import run_demo

__all__ = [
    "NO_THINKING",
    "Experiment",
    "Place",
    "Result",
    "auto_settings",
    "example_parser",
    "experiment_parser",
    "plot",
    "prepare",
    "print_table",
    "run_demo",
    "run_example",
    "run_experiment",
]
