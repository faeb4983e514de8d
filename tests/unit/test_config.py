import math
from typing import Any

import pytest
from pydantic import ValidationError

from art_cloud.shared.config import PRESETS, LoRAConfig, Retention, SFTConfig, TrainConfig
from art_cloud.shared.errors import ConfigError


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
    with pytest.raises(ConfigError, match="fixed_length"):
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
    with pytest.raises(ConfigError, match=next(iter(fields))):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    "fields", [{"warmup_ratio": 1.5}, {"batch_size": 0}, {"epochs": 0}, {"schedule": "poly"}]
)
def test_values_that_sft_cannot_mean(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
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


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (TrainConfig, "lr", "learning_rate"),
        (TrainConfig, "lerning_rate", "learning_rate"),
        (TrainConfig, "kl_penalty_coef", "kl_coef"),
        (TrainConfig, "grad_norm", "max_grad_norm"),
        (SFTConfig, "epoch", "epochs"),
        (LoRAConfig, "r", "rank"),
        (LoRAConfig, "lora_alpha", "alpha"),
        (Retention, "last", "keep_last"),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_the_nearest(
    kind: type[TrainConfig], name: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(**{name: 1})
    assert str(raised.value) == (
        f"{kind.__name__}: {name}: not among its options (did you mean {meant}?). "
        f"Its options are: {', '.join(kind.model_fields)}."
    )


def test_nothing_like_it_is_said_to_be_nothing_like_it() -> None:
    with pytest.raises(ConfigError, match=r"^TrainConfig: zzz: not among its options\. Its opt"):
        TrainConfig(**{"zzz": 1})


def test_what_a_validator_of_ours_says_is_said_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^Retention: say what to keep: keep_last, keep_best"):
        Retention()


@pytest.mark.parametrize("text", ['{"lr": 1}', '{"learning_rate": "fast"}'])
def test_data_that_are_no_config_are_pydantics_to_refuse(text: str) -> None:
    """So that whoever reads them can say where they came from."""
    with pytest.raises(ValidationError):
        TrainConfig.model_validate_json(text)
