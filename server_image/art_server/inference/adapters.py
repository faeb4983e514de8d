"""One base model with any number of LoRA adapters, each row of a batch under its own policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from safetensors import safe_open
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from art_cloud.shared.errors import ConfigError, ConflictError

from ..peft_lock import MAKING_ADAPTERS

BASE = "__base__"  # what PEFT calls rows without an adapter in a mixed batch


class AdapterModel:
    """A module tree of its own over the tensors of `model`, so that whoever else holds `model` may
    wrap, train and switch it at the same time. Not thread-safe: one thread uses it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if any(isinstance(module, LoraLayer) for module in model.modules()):
            raise ConfigError("The base model is wrapped by PEFT already. Pass the bare model.")
        shared = {id(p): p for p in model.parameters()}
        self._model = copy.deepcopy(model, shared).eval()
        self._peft: PeftModel | None = None
        self._adapters: dict[str, tuple[str, Path]] = {}
        self._loaded = 0
        self._routed: tuple[str, ...] = ()
        self._row_names: list[str] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def device(self) -> torch.device:
        return self._model.device

    def load(self, policy: str, folder: Path) -> None:
        folder = folder.resolve()
        if policy in self._adapters:
            if self._adapters[policy][1] == folder:
                return
            raise ConflictError(
                f"Policy {policy!r} is loaded from another folder. A name always means one set of "
                "weights: load this one under a new step."
            )
        check_adapter(folder)
        self._loaded += 1
        name = f"policy_{self._loaded}"  # a module's name may not contain a dot
        device = str(self.device)
        make: dict[str, Any] = {"torch_device": device, "low_cpu_mem_usage": True}
        try:
            with MAKING_ADAPTERS:
                if self._peft is None:
                    self._peft = PeftModel.from_pretrained(self._model, folder, name, **make)
                else:
                    self._peft.load_adapter(folder, name, **make)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            if self._peft is not None and name in self._peft.peft_config:
                self._peft.delete_adapter(name)
            raise ConfigError(
                f"{folder.name!r} is no adapter of this base model: {error}"
            ) from error
        finally:
            self._routed = ()
        self._adapters[policy] = (name, folder)

    def unload(self, policy: str) -> None:
        name, _ = self._adapters.pop(policy)
        assert self._peft is not None
        self._peft.delete_adapter(name)
        self._routed = ()

    def __contains__(self, policy: str) -> bool:
        return policy in self._adapters

    def forward(
        self, policies_B: Sequence[str | None], input_ids_BT: Tensor, **inputs: Any
    ) -> Tensor:
        """The logits of the last column (B x V), each row under its own policy."""
        self._route(policies_B)
        logits_B1V = self._model(
            input_ids=input_ids_BT, use_cache=True, logits_to_keep=1, **inputs
        ).logits
        return logits_B1V[:, -1]

    def _route(self, policies_B: Sequence[str | None]) -> None:
        """Choose the adapters of the rows. One policy for the whole batch is PEFT's active adapter;
        a mix goes row by row, as in PEFT's `adapter_names`, but its hooks stay on from step to
        step."""
        if self._peft is None:
            return
        names = [BASE if policy is None else self._adapters[policy][0] for policy in policies_B]
        unique = tuple(sorted(set(names)))
        self._row_names = names
        if unique == self._routed:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        tuner = self._peft.base_model
        if unique == (BASE,):
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            if len(unique) == 1:
                tuner.set_adapter(unique[0], inference_mode=True)
            else:
                self._hooks = [
                    module.register_forward_pre_hook(self._name_rows, with_kwargs=True)
                    for module in self._model.modules()
                    if isinstance(module, LoraLayer)
                ]
        self._routed = unique

    def _name_rows(
        self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "adapter_names": self._row_names}


def check_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> int:
    """The rank of the plain LoRA in `folder`. Raises `ConfigError` if there is none, or if it does
    not fit a base model of these `shapes` (out x in, by name)."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"There is no adapter_model.safetensors in {folder}.")
    try:
        config = PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder} has no adapter_config.json that PEFT reads: {error}"
        ) from error
    if not isinstance(config, LoraConfig) or config.use_dora or config.modules_to_save:
        raise ConfigError(
            f"The adapter in {folder} is not plain LoRA ({config.peft_type}). This server serves "
            "LoRA without DoRA and without modules_to_save."
        )
    if shapes is not None:
        _check_shapes(folder, shapes)
    return max([config.r, *(config.rank_pattern or {}).values()])


def _check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            name, kind = key.removeprefix("base_model.model.").rsplit(".lora_", 1)
            side = 1 if kind.startswith("A") else 0
            size = file.get_slice(key).get_shape()[side]
            expected = shapes.get(f"{name}.weight", (0, 0))[side]
            if size != expected:
                raise ConfigError(
                    f"{folder.name!r} is no adapter of this base model: {key} is for a layer of "
                    f"size {size}, and {name} has {expected or 'no weights here'}."
                )
