"""Training: torch and PEFT. Knows tensors, never HTTP."""

from .advantages import group_advantages, has_signal
from .data import AdamParams, Datum
from .loading import BaseModel, load_base
from .losses import Loss
from .trainer import Trainer

__all__ = [
    "AdamParams",
    "BaseModel",
    "Datum",
    "Loss",
    "Trainer",
    "group_advantages",
    "has_signal",
    "load_base",
]
