import math
from typing import Any

import pytest
from pydantic import ValidationError

from art_cloud.shared.config import PRESETS, LoRAConfig, SFTConfig, TrainConfig


def test_a_loss_brings_its_papers_choices() -> None:
    assert TrainConfig().options == PRESETS["grpo"]
    dapo = TrainConfig(loss="dapo").options
    assert (dapo.normalization, dapo.epsilon_low, dapo.epsilon_high) == ("token", 0.2, 0.28)
    assert TrainConfig(loss="gspo").options.ratio_level == "sequence"


def test_what_is_set_goes_before_the_papers_choice() -> None:
    options = TrainConfig(loss="dapo", epsilon_high=0.5, scale_rewards="none").options
    assert options == PRESETS["dapo"]._replace(epsilon_high=0.5, scale_rewards="none")
    assert TrainConfig(epsilon_low=0.0).options.epsilon_low == 0.0


def test_dr_grpo_needs_the_length_that_it_divides_by() -> None:
    with pytest.raises(ValidationError, match="fixed_length"):
        TrainConfig(loss="dr_grpo")
    assert TrainConfig(loss="dr_grpo", fixed_length=512).options.normalization == "fixed"
    assert TrainConfig(loss="dr_grpo", normalization="token").fixed_length is None


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": math.nan},
        {"learning_rate": -1e-6},
        {"epsilon_high": -0.1},
        {"kl_coef": math.inf},
        {"max_grad_norm": 0.0},
        {"loss": "gropo"},
        {"kl_reference_step": -1},
        {"lerning_rate": 1e-5},
    ],
)
def test_values_that_cannot_be_meant(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    "fields", [{"warmup_ratio": 1.5}, {"batch_size": 0}, {"epochs": 0}, {"schedule": "poly"}]
)
def test_values_that_sft_cannot_mean(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        SFTConfig(**fields)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(loss="cispo", kl_coef=0.1, betas=(0.8, 0.9)),
        TrainConfig(loss="importance_sampling"),
        SFTConfig(epochs=3),
        LoRAConfig(target_modules=("q_proj", "v_proj")),
    ],
)
def test_a_config_comes_back_from_json(config: TrainConfig | SFTConfig | LoRAConfig) -> None:
    assert type(config).model_validate_json(config.model_dump_json()) == config
