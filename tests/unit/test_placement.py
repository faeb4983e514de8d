"""Who gets the GPU's memory, on given sizes."""

import pytest
from art_server.inference.placement import (
    GIB,
    MOST_FRACTION,
    Needs,
    Placement,
    activation_bytes,
    kv_bytes_per_token,
    lora_parameters,
    place,
)
from transformers import Qwen3Config

from art_cloud.shared.errors import ConfigError


def needs(billions: float, activations: float = 4, kv: float = 4) -> Needs:
    """Of a model in bfloat16, with a LoRA of 1 % of its parameters."""
    return Needs(
        base=int(2e9 * billions),
        adapters=int(16e7 * billions),
        activations=int(activations * GIB),
        slots=int(16e7 * billions),
        kv=int(kv * GIB),
    )


@pytest.mark.parametrize(
    ("billions", "memory", "gpus", "mode"),
    [
        (0.6, 24, 1, "resident"),
        (4, 80, 1, "resident"),
        (3, 24, 1, "sleep"),
        (8, 48, 1, "sleep"),
        (8, 80, 1, "resident"),
        (4, 24, 2, "separate"),
        (30, 80, 2, "separate"),
    ],
)
def test_what_fits_decides(billions: float, memory: int, gpus: int, mode: str) -> None:
    wanted = needs(billions)
    if mode == "sleep":
        wanted = needs(billions, activations=8)
    placement = place(wanted, memory * GIB, gpus)
    assert placement.mode == mode
    assert placement.gpu == (1 if mode == "separate" else None)
    assert f"{memory}.0 GiB" in str(placement)


@pytest.mark.parametrize("billions", [0.6, 1.7, 4, 8])
@pytest.mark.parametrize("memory", [24, 40, 48, 80, 141])
def test_nothing_ever_takes_more_than_there_is(billions: float, memory: int) -> None:
    wanted = needs(billions, activations=6)
    if wanted.base + wanted.adapters + wanted.sampling > (memory - 2) * GIB:
        with pytest.raises(ConfigError, match="larger GPU"):
            place(wanted, memory * GIB, 1)
        return
    placement = place(wanted, memory * GIB, 1)
    assert placement.gpu_fraction is not None
    vllm = placement.gpu_fraction * memory * GIB
    assert vllm >= wanted.sampling or placement.gpu_fraction == MOST_FRACTION
    beside = wanted.training if placement.mode == "resident" else wanted.base + wanted.adapters
    assert vllm + beside <= memory * GIB


def test_a_forced_placement_is_taken_or_refused_with_the_sizes() -> None:
    assert place(needs(0.6), 80 * GIB, 1, "sleep").mode == "sleep"
    assert place(needs(0.6), 80 * GIB, 2, "resident").mode == "resident"
    with pytest.raises(ConfigError, match=r"separate does not fit.* 80\.0 GiB \(1 GPU\)"):
        place(needs(0.6), 80 * GIB, 1, "separate")
    with pytest.raises(ConfigError, match="resident does not fit"):
        place(needs(30), 80 * GIB, 1, "resident")
    with pytest.raises(ConfigError, match="base model does not fit"):
        place(needs(70), 80 * GIB, 1)


def test_without_a_gpu_nothing_is_divided() -> None:
    resident = Placement("resident", "there is no GPU to share", None)
    assert place(needs(70), 0, 0) == resident
    assert place(needs(70), 0, 0, "sleep").mode == "sleep"
    with pytest.raises(ConfigError, match="two GPUs"):
        place(needs(1), 0, 0, "separate")


def test_sizes_are_those_of_the_architecture() -> None:
    config = Qwen3Config(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
    )
    assert kv_bytes_per_token(config, 2) == 2 * 3 * 2 * 16 * 2
    assert activation_bytes(config, 10) == 10 * 64 * (34 + 6)
    assert lora_parameters([(4, 6), (7,), (3, 2)], 5) == 5 * (10 + 5)
