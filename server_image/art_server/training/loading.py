"""The frozen base model: from a folder or the Hugging Face hub, safetensors only."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from art_cloud.shared.errors import ConfigError

NO_HUB = "couldn't connect to"
"""The beginning of the error of transformers where the Hugging Face hub can't be reached."""


@dataclass(frozen=True)
class BaseModel:
    """A causal language model without gradients, and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    context_length: int

    def replica(self) -> PreTrainedModel:
        """A module tree and config of its own over the same weights: no memory of note."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})


def load_base(
    name_or_path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> BaseModel:
    """Load a model on `device` (default: CUDA where there is one) in `dtype` (default: bfloat16 on
    CUDA, float32 on a CPU). Raises `ConfigError` if it is not there or not a causal LM."""
    name = str(name_or_path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    transformers_logging.disable_progress_bar()  # a log has no use for bars
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        cure = (
            "Mend the way to the hub (network, proxy, HF_ENDPOINT), or give the model's folder."
            if NO_HUB in why
            else "Give a folder with config.json, a tokenizer and *.safetensors of a causal "
            "language model, or its name on the Hugging Face hub."
        )
        raise ConfigError(f"The base model {name!r} could not be loaded: {why} {cure}") from error
    context_length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context_length is None:
        raise ConfigError(
            f"The base model {name!r} does not say how long its context is: its config.json has no "
            "max_position_embeddings."
        )
    model.requires_grad_(False).to(device).eval()
    return BaseModel(name, model, tokenizer, device, dtype, context_length)
