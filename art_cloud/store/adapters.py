"""Adapters as plain PEFT folders: from a store to a folder, and from a folder to a new model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from safetensors import SafetensorError, deserialize, serialize

from ..shared.config import LoRAConfig
from ..shared.errors import ConfigError, ConflictError
from ..shared.validation import complaint
from ..shared.version import __version__
from .base import sha256_of
from .checkpoints import Checkpoints, Manifest
from .transfer import Watch

ADAPTER = "adapter/"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MANIFEST = "manifest.json"
"""Of a whole checkpoint that was pulled."""
FREE = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("runtime_config", "target_modules", "task_type"),
}
"""What a `LoraConfig` may say as it likes: it is what our trainer has too, is checked elsewhere, or
means nothing by itself."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian"),  # not those that change the base model
}
NOTHING: tuple[Any, ...] = (None, False, [], {})
"""What it may say of any other option, those of later versions of PEFT included."""


def pull(
    steps: Checkpoints,
    manifest: Manifest,
    folder: Path,
    *,
    everything: bool = False,
    watch: Watch | None = None,
) -> bool:
    """Write a step's adapter to `folder`: a plain PEFT folder, checked against its hashes.

    Args:
        everything: also what training goes on from: `adapter/`, the optimizer, the manifest.

    Returns:
        False: `folder` holds just that already, and nothing was fetched.

    Raises:
        ConflictError: `folder` holds something else.
    """
    prefix = "" if everything else ADAPTER
    wanted = {
        path.removeprefix(prefix): blob
        for path, blob in manifest.files.items()
        if path.startswith(prefix)
    }
    if folder.exists():
        there = {
            path.relative_to(folder).as_posix(): sha256_of(path)
            for path in folder.rglob("*")
            if path.is_file() and path != folder / MANIFEST
        }
        if there != wanted:
            raise ConflictError(
                f"{folder} is there already and holds something else than {manifest.policy}. "
                "Nothing was written. Name another folder, or remove this one."
            )
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{uuid4().hex}.partial")
    try:
        steps.fetch(manifest, partial, only=prefix, watch=watch)
        if everything:
            (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        (partial / prefix).rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def push(
    steps: Checkpoints, folder: Path, *, base_model: str | None = None, watch: Watch | None = None
) -> Manifest:
    """Begin the model of `steps` with the LoRA in `folder`, as its step 0.

    Args:
        folder: a PEFT folder (the optimizer starts fresh), or what `pull` wrote with `everything`
            (training goes on where it was).
        base_model: name or path of the base model; None: what the folder says.

    Raises:
        ConfigError: `folder` is neither, or holds an adapter that can't be trained here.
        ConflictError: the model exists already.
    """
    if steps.steps():
        raise ConflictError(
            f"{steps.name} exists already, and its steps stay as they are. Push to a new name."
        )
    with _checkpoint(folder, base_model) as (content, source):
        draft: dict[str, Any] = {
            "project": steps.name.project,
            "model": steps.name.model,
            "step": 0,
            "kind": "push",
            "call_id": uuid4().hex,
            "parent": None,
            "versions": {"art-cloud": __version__},
            **source,
        }
        draft["files"] = steps.upload(content, watch)
        return steps.create(Manifest.model_validate(draft))


@contextmanager
def _checkpoint(folder: Path, base_model: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder as a whole checkpoint, and which base model and LoRA it is of."""
    whole = (folder / MANIFEST).is_file()
    adapter = folder / ADAPTER if whole else folder
    config = _read_config(adapter)
    config["base_model_name_or_path"] = base_model or config.get("base_model_name_or_path")
    if not config["base_model_name_or_path"]:
        raise ConfigError(
            f"{adapter / CONFIG} does not say which model it adapts. Give it with --base-model."
        )
    lora = _lora(adapter, config)
    _check_weights(adapter / WEIGHTS, lora.rank)
    if whole:
        lora = _read_manifest(folder / MANIFEST).lora
    source = {"base_model": config["base_model_name_or_path"], "lora": lora}
    with tempfile.TemporaryDirectory(prefix="art-cloud-") as place:
        content = Path(place)
        (content / ADAPTER).mkdir()
        shutil.copyfile(adapter / WEIGHTS, content / ADAPTER / WEIGHTS)
        text = json.dumps({**config, "lora_dropout": 0.0, "inference_mode": True}, indent=2)
        (content / ADAPTER / CONFIG).write_text(text + "\n")
        for name, fresh in (
            ("optimizer.safetensors", serialize({})),
            ("trainer.json", json.dumps({"optimizer_steps": 0, "seed": lora.seed}).encode()),
        ):
            (content / name).write_bytes((folder / name).read_bytes() if whole else fresh)
        yield content, source


def _read_config(adapter: Path) -> dict[str, Any]:
    missing = [name for name in (CONFIG, WEIGHTS) if not (adapter / name).is_file()]
    if missing:
        raise ConfigError(
            f"{adapter} is not a PEFT folder: it has no {' and no '.join(missing)}. Save one with "
            "peft's save_pretrained, which writes safetensors."
        )
    try:
        config = json.loads((adapter / CONFIG).read_text())
    except ValueError as error:
        raise ConfigError(f"{adapter / CONFIG} is not JSON: {error}.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{adapter / CONFIG} is not of a LoRA. Only a LoRA can be trained here.")
    return config


def _lora(adapter: Path, config: dict[str, Any]) -> LoRAConfig:
    for option, value in config.items():
        if option not in FREE and value not in NEUTRAL.get(option, NOTHING):
            raise ConfigError(
                f"{adapter / CONFIG} has {option}={value!r:.200}, which can't be trained here: a "
                "plain LoRA of one rank on linear layers can. Merge it into the base model instead."
            )
    targets = config.get("target_modules")
    try:
        return LoRAConfig.model_validate(
            {
                "rank": config.get("r"),
                "alpha": config.get("lora_alpha"),
                "target_modules": sorted(targets) if isinstance(targets, list) else targets,
            }
        )
    except ValidationError as error:
        value = error.errors(include_url=False)[0]["input"]
        what, _, why = complaint(error).partition(": ")
        raise ConfigError(
            f"{adapter / CONFIG}: {what} is {value!r}: {why}. target_modules has to be a list of "
            "names."
        ) from error


def _check_weights(path: Path, rank: int) -> None:
    """Raises `ConfigError` if these are not pairs of lora_A (rank x in) and lora_B (out x rank)."""
    try:
        tensors = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}.") from error
    pairs: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        axis = {"lora_A": 0, "lora_B": 1}.get(part)
        shape = tensor["shape"]
        if axis is None or len(shape) != 2 or shape[axis] != rank:
            raise ConfigError(f"{path}: {name} {shape} is no part of a LoRA of rank {rank}.")
        pairs.setdefault(module, set()).add(part)
    if not pairs or any(len(parts) != 2 for parts in pairs.values()):
        raise ConfigError(f"{path} does not hold pairs of lora_A and lora_B.")


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{path} is not what `pull --all` wrote: {complaint(error)}.") from error
