"""LoRA adapters on one replica of the base model, through PEFT: many at once, one active."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save
from torch import Tensor, nn

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import ConfigError

from ..peft_lock import MAKING_ADAPTERS
from .loading import BaseModel

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

Parameters = dict[str, nn.Parameter]


class Adapters:
    """The adapters of one base model. Parameters carry the names that a PEFT folder gives them.

    Weights are float32, or the base model's own precision where that is higher.
    """

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self.model = base.replica()
        self._dtype = torch.promote_types(base.dtype, torch.float32)
        self._peft: PeftModel | None = None
        self._made = 0
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        self._frozen = {
            name.rpartition(".")[2] for name, module in self.model.named_modules() if module in ends
        }

    def create(self, lora: LoRAConfig) -> str:
        """Add an adapter that changes nothing yet: A uniform as in PEFT, from `lora.seed`; B zero.

        Returns the key it goes by here.
        """
        targets = lora.target_modules
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets if targets == "all-linear" else list(targets),
        )
        key = self._add(config)
        generator = torch.Generator().manual_seed(lora.seed)
        for name, parameter in self.parameters(key).items():
            start = torch.zeros(parameter.shape, dtype=self._dtype)
            if "lora_A" in name:
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(start)
        return key

    def load(self, folder: Path) -> str:
        """Add the adapter of a PEFT folder; returns its key here."""
        weights = load_file(folder / WEIGHTS)
        key = self._add(LoraConfig.from_pretrained(str(folder)))
        parameters = self.parameters(key)
        try:
            fill(parameters, weights)
        except ConfigError as error:
            self.delete(key)
            raise ConfigError(f"The adapter does not fit {self.base.name}: {error}") from error
        return key

    def save(self, key: str, folder: Path) -> None:
        """Write a PEFT folder; the same weights give the same bytes."""
        assert self._peft is not None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS).write_bytes(dump(self.parameters(key)))
        config = self._peft.peft_config[key].to_dict()
        config["target_modules"] = sorted(config["target_modules"])
        config["inference_mode"] = True
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted)
        (folder / CONFIG).write_text(text + "\n")

    def parameters(self, key: str) -> Parameters:
        assert self._peft is not None
        mark = f".{key}."
        return {
            name.replace(mark, "."): parameter
            for name, parameter in self._peft.named_parameters()
            if mark in name
        }

    def delete(self, key: str) -> None:
        assert self._peft is not None
        remaining = [other for other in self._peft.peft_config if other != key]
        if remaining:
            self._peft.set_adapter(remaining[0])
        self._peft.delete_adapter(key)

    @contextmanager
    def active(self, key: str | None) -> Iterator[None]:
        """Run the model with this adapter, or with none."""
        if self._peft is None:
            yield
        elif key is None:
            with self._peft.disable_adapter():
                yield
        else:
            if self._peft.active_adapters != [key]:  # to set it walks through all modules
                self._peft.set_adapter(key)
            yield

    def _add(self, config: LoraConfig) -> str:
        self._made += 1
        key = f"adapter_{self._made}"
        config.inference_mode = False
        config.base_model_name_or_path = self.base.name
        for target in config.target_modules:
            if target in self._frozen:
                raise ConfigError(
                    f"{target} can't be a target of LoRA: embeddings and the output head stay "
                    "frozen. Leave it out of target_modules."
                )
        try:
            # On the meta device first: PEFT would draw first weights from the global generator.
            with MAKING_ADAPTERS:
                if self._peft is None:
                    self._peft = get_peft_model(
                        self.model, config, adapter_name=key, low_cpu_mem_usage=True
                    )
                else:
                    self._peft.add_adapter(key, config, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(f"No such LoRA on {self.base.name}: {error}") from error
        for module in self._peft.modules():
            if isinstance(module, LoraLayer) and key in module.lora_A:
                for part in (module.lora_A[key], module.lora_B[key]):
                    part.to_empty(device=self.base.device).to(self._dtype)
        return key


def fill(parameters: dict[str, Tensor] | Parameters, values: dict[str, Tensor]) -> None:
    """Copy `values` into `parameters`; names and shapes must be the same."""
    wanted = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    given = {name: tuple(tensor.shape) for name, tensor in values.items()}
    if wanted != given:
        name = min(name for name, _ in wanted.items() ^ given.items())
        raise ConfigError(f"{name} is {given.get(name)} and should be {wanted.get(name)}.")
    for name, parameter in parameters.items():
        parameter.data.copy_(values[name])


def dump(tensors: dict[str, Tensor] | Parameters) -> bytes:
    """Safetensors bytes; the same tensors give the same bytes."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={"format": "pt"})
