"""Who has the GPU's memory when: the trainer, vLLM, or both.

    resident   both fit side by side
    sleep      vLLM gives its memory up while a step trains, and takes it back afterwards
    separate   each on a GPU of its own

All sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformers import PreTrainedConfig

from art_cloud.shared.errors import ConfigError

Mode = Literal["resident", "sleep", "separate"]
MODES: tuple[Mode, ...] = ("resident", "sleep", "separate")

GIB = 2**30
RESERVED = 2 * GIB
"""Bytes kept free for two CUDA contexts and fragmentation."""
VLLM_OVERHEAD = 2 * GIB
"""Bytes for vLLM's own activations and CUDA graphs."""
CONCURRENT = 8
"""Placement makes room for the keys and values of so many sequences of full length: with fewer,
sampling is too slow."""
LEAST_KV_CPU, MOST_KV_CPU = 128 << 20, 4 * GIB
LEAST_FRACTION, MOST_FRACTION = 0.05, 0.92


class Needs(NamedTuple):
    base: int
    """Bytes of the base model's weights, which each side holds once."""
    adapters: int
    """Bytes of the trainer's LoRA with gradients and optimizer."""
    activations: int
    """Bytes of activations of one packed batch, forwards and backwards."""
    slots: int
    """Bytes of vLLM's adapters."""
    kv: int
    """Bytes that vLLM's keys and values take at least."""

    @property
    def training(self) -> int:
        return self.base + self.adapters + self.activations

    @property
    def sampling(self) -> int:
        return self.base + self.slots + self.kv + VLLM_OVERHEAD


@dataclass(frozen=True)
class Placement:
    mode: Mode
    reason: str
    gpu_fraction: float | None
    """The share of its GPU's memory that vLLM may take; None on a CPU."""
    gpu: int | None = None
    """The number of vLLM's GPU, where it is not the trainer's."""

    def __str__(self) -> str:
        return f"placement: {self.mode}: {self.reason}"


def place(needs: Needs, memory: int, gpus: int, forced: Mode | None = None) -> Placement:
    """Choose the placement. `memory` is that of each of `gpus` GPUs of one kind; with 0 GPUs all is
    on a CPU, whose memory is not divided.

    Raises `ConfigError` where it can't fit, with the sizes.
    """
    if gpus == 0:
        if forced == "separate":
            raise ConfigError("--placement separate needs two GPUs; this machine has none.")
        return Placement(forced or "resident", "there is no GPU to share", None)
    usable = memory - RESERVED
    side_by_side = needs.training + needs.sampling
    in_turns = needs.base + needs.adapters + max(needs.activations, needs.sampling)
    alone = max(needs.training, needs.sampling)
    have = f"a GPU has {_gib(memory)}"
    both = f"trainer ({_gib(needs.training)}) and vLLM ({_gib(needs.sampling)})"
    turns = f"vLLM beside idle training weights, or training beside sleeping vLLM {_gib(in_turns)}"
    fits: dict[Mode, bool] = {
        "separate": gpus > 1 and alone <= usable,
        "resident": side_by_side <= usable,
        "sleep": in_turns <= usable,
    }
    why: dict[Mode, str] = {
        "separate": f"{gpus} GPUs; {both} each have one ({_gib(memory)})",
        "resident": f"{both} fit side by side; {have}",
        "sleep": f"{both} do not fit side by side, but in turns ({turns}); {have}",
    }
    chosen = forced or next((mode for mode in why if fits[mode]), None)
    if chosen is None or not fits[chosen]:
        asked = f"--placement {forced} does not fit" if forced else "The base model does not fit"
        raise ConfigError(
            f"{asked}: {both} need {_gib(side_by_side)} side by side, {_gib(in_turns)} in turns, "
            f"and {have} ({gpus} GPU{'s' if gpus > 1 else ''}). Take a larger GPU or more of them, "
            "or a smaller base model."
        )
    reason = f"asked for; {why[chosen]}" if forced else why[chosen]
    if chosen == "separate":
        return Placement(chosen, reason, MOST_FRACTION, gpu=1)
    taken = needs.training if chosen == "resident" else needs.base + needs.adapters
    fraction = min(MOST_FRACTION, max(LEAST_FRACTION, (usable - taken) / memory))
    return Placement(chosen, reason, fraction)


def kv_bytes_per_token(config: PreTrainedConfig, element_bytes: int) -> int:
    """Bytes of the keys and values of one token, over all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head_dim * element_bytes)


def activation_bytes(config: PreTrainedConfig, tokens: int) -> int:
    """Bytes of the activations of a batch of `tokens` in 16 bits, layer by layer recomputed: 2
    bytes for each token and hidden unit of every layer's input, 34 within the layer at hand
    (Korthikanti et al., arXiv:2205.05198, section 4.1, without the attention scores, which are
    never whole here)."""
    text = config.get_text_config()
    return int(tokens * text.hidden_size * (2 * text.num_hidden_layers + 34))


def lora_parameters(shapes: list[tuple[int, ...]], rank: int) -> int:
    """The number of parameters of adapters on all matrices of these shapes."""
    return sum(rank * sum(shape) for shape in shapes if len(shape) == 2)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
