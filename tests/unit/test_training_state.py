"""The trainer's state: repeatable, resumable to the bit, and left alone when a step is refused."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from art_server.tiny_model import make_tiny_model
from art_server.training import AdamParams, BaseModel, Datum, Trainer, load_base
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from art_cloud.shared.config import LoRAConfig, TrainConfig
from art_cloud.shared.errors import (
    ConfigError,
    ContextLengthError,
    JobError,
    NotFoundError,
    UntrainableError,
)

from .training_data import random_batch

NAME = "project/model.v1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=2)
    return load_base(folder, device="cpu")


@pytest.fixture
def trainer(base: BaseModel) -> Trainer:
    trainer = Trainer(base, token_budget=100)
    trainer.create(NAME, LoRAConfig(rank=4))
    return trainer


def steps(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        trainer.forward_backward(NAME, random_batch(seed), TrainConfig(kl_coef=0.05))
        trainer.optim_step(NAME, AdamParams(3e-3, weight_decay=0.01))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def saved(trainer: Trainer, folder: Path) -> dict[str, str]:
    trainer.save_state(NAME, folder)
    return digests(folder)


GO_ON = """
import sys
from pathlib import Path
from tests.unit import test_training_state as here
trainer = here.Trainer(here.load_base(sys.argv[1], device="cpu"), token_budget=100)
trainer.load_state(here.NAME, Path(sys.argv[2]))
here.steps(trainer, range(3, 5))
trainer.save_state(here.NAME, Path(sys.argv[3]))
"""


def test_a_new_process_goes_on_to_the_same_bits(
    trainer: Trainer, base: BaseModel, tmp_path: Path
) -> None:
    steps(trainer, range(3))
    halfway = saved(trainer, tmp_path / "halfway")
    steps(trainer, range(3, 5))
    whole = saved(trainer, tmp_path / "whole")
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", GO_ON, base.name, tmp_path / "halfway", tmp_path / "resumed"],
        cwd=root,
        check=True,
        timeout=120,
        capture_output=True,
    )
    assert digests(tmp_path / "resumed") == whole
    assert halfway.keys() == whole.keys()
    assert all(halfway[name] != whole[name] for name in halfway if name.endswith("safetensors"))


def test_a_seed_gives_the_same_adapter_whatever_was_drawn_before(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.create("a", LoRAConfig(rank=4, seed=3))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    trainer.create("b", LoRAConfig(rank=4, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    trainer.create("c", LoRAConfig(rank=4, seed=4))
    for name in "abc":
        trainer.save_state(name, tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    weights = "adapter/adapter_model.safetensors"
    assert digests(tmp_path / "a")[weights] != digests(tmp_path / "c")[weights]


def test_adapters_do_not_touch_each_other_or_the_base(
    trainer: Trainer, base: BaseModel, tmp_path: Path
) -> None:
    data = random_batch(1)
    weights = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    trainer.create("other", LoRAConfig(rank=2))
    steps(trainer, range(2))
    assert trainer.logprobs("other", data) == trainer.logprobs(None, data)
    assert trainer.logprobs(NAME, data) != trainer.logprobs(None, data)
    trainer.unload("other")
    assert "other" not in trainer
    assert NAME in trainer
    with pytest.raises(NotFoundError, match="No adapter other"):
        trainer.logprobs("other", data)
    assert all(torch.equal(t, weights[name]) for name, t in base.model.state_dict().items())


def test_the_adapter_is_a_plain_peft_folder(
    trainer: Trainer, base: BaseModel, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    steps(trainer, range(2))
    trainer.save_state(NAME, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base.name, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base.name
    assert config["inference_mode"] is True
    datum = Datum([1, 2, 3], [4, 5, 6, 7])
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4, 5, 6, 7]])).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor([4, 5, 6, 7])[:, None])[:, 0]
    assert trainer.logprobs(NAME, [datum])[0] == pytest.approx(expected.tolist(), abs=1e-5)


def test_kl_pulls_towards_the_adapter_that_is_handed_in(trainer: Trainer, tmp_path: Path) -> None:
    data = random_batch(5)
    steps(trainer, range(2))
    trainer.save_state(NAME, tmp_path)
    config = TrainConfig(kl_coef=0.1, kl_reference_step=2)
    itself = trainer.forward_backward(NAME, data, config, reference=tmp_path / "adapter")
    assert itself["kl_reference"] == pytest.approx(0, abs=1e-9)
    trainer.optim_step(NAME, AdamParams(0.0))
    to_base = trainer.forward_backward(NAME, data, TrainConfig(kl_coef=0.1))
    assert to_base["kl_reference"] > 1e-6
    trainer.optim_step(NAME, AdamParams(0.0))
    with pytest.raises(ConfigError, match="step 2"):
        trainer.forward_backward(NAME, data, config)


def test_a_gradient_that_is_not_finite_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    steps(trainer, range(2))
    before = saved(trainer, tmp_path / "before")
    data = [replace(datum, advantage=math.inf) for datum in random_batch(0)]
    trainer.forward_backward(NAME, data, TrainConfig())
    with pytest.raises(JobError, match="not finite"):
        trainer.optim_step(NAME, AdamParams(1e-3))
    assert saved(trainer, tmp_path / "after") == before
    steps(trainer, range(2, 3))
    assert saved(trainer, tmp_path / "on") != before


def test_a_batch_without_signal_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    steps(trainer, range(2))
    before = saved(trainer, tmp_path / "before")
    data = [replace(datum, advantage=0.0) for datum in random_batch(0)]
    metrics = trainer.forward_backward(NAME, data, TrainConfig())
    assert metrics["tokens_computed"] == 0
    assert metrics["loss"] == 0
    assert trainer.optim_step(NAME, AdamParams(1e-3, weight_decay=0.1)) == {"grad_norm": 0.0}
    assert saved(trainer, tmp_path / "after") == before


def test_an_interrupted_call_leaves_no_gradient_behind(trainer: Trainer) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.forward_backward(NAME, random_batch(0), "cross_entropy", progress=stop)
    assert trainer.optim_step(NAME, AdamParams(1e-3)) == {"grad_norm": 0.0}


def test_gradients_are_clipped_and_moments_saved(trainer: Trainer, tmp_path: Path) -> None:
    data = random_batch(0)
    trainer.forward_backward(NAME, data, "cross_entropy")
    norm = trainer.optim_step(NAME, AdamParams(0.0))["grad_norm"]
    trainer.create(NAME, LoRAConfig(rank=4))
    trainer.forward_backward(NAME, data, "cross_entropy")
    trainer.optim_step(NAME, AdamParams(1e-3, betas=(0.5, 0.5), max_grad_norm=norm / 4))
    trainer.save_state(NAME, tmp_path)
    moments = load_file(tmp_path / "optimizer.safetensors")
    firsts = [m for name, m in moments.items() if name.endswith("exp_avg")]
    clipped = math.sqrt(sum(m.square().sum().item() for m in firsts)) / (1 - 0.5)
    assert clipped == pytest.approx(norm / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("datum", "error", "match"),
    [
        (Datum([1], list(range(3000)), [-1.0] * 3000), ContextLengthError, "1 \\+ 3000 tokens"),
        (Datum([], [1], [-1.0]), UntrainableError, "0 prompt"),
        (Datum([1], [], []), UntrainableError, "0 completion"),
        (Datum([1], [2, 3], [-1.0]), UntrainableError, "1 logprobs"),
        (Datum([1], [2], [-1.0], temperature=0.0), UntrainableError, "temperature 0.0"),
    ],
)
def test_samples_that_cannot_be_used(
    trainer: Trainer, datum: Datum, error: type[Exception], match: str
) -> None:
    good = Datum([1], [2], [-1.0], advantage=1.0)
    with pytest.raises(error, match=match):
        trainer.forward_backward(NAME, [good, datum], TrainConfig())
    assert trainer.optim_step(NAME, AdamParams(1e-3)) == {"grad_norm": 0.0}


def test_an_empty_batch(trainer: Trainer) -> None:
    with pytest.raises(UntrainableError, match="no samples"):
        trainer.forward_backward(NAME, [], TrainConfig())


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_base(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_base(tmp_path / "empty")


def test_without_a_way_to_the_hub_the_cure_is_that_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"couldn't connect to .* or give the model's folder\."):
        load_base(f"nobody/{tmp_path.name}")


def test_pickled_weights_are_not_loaded(base: BaseModel, tmp_path: Path) -> None:
    for path in Path(base.name).iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(base.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_base(tmp_path)


def test_states_and_targets_that_do_not_fit(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save_state(NAME, tmp_path / "state")
    wider = make_tiny_model(tmp_path / "wider", hidden_size=96, layers=2)
    other = Trainer(load_base(wider, device="cpu"))
    with pytest.raises(ConfigError, match="does not fit"):
        other.load_state(NAME, tmp_path / "state")
    assert NAME not in other
    with pytest.raises(ConfigError, match="nothing_like_it"):
        other.create(NAME, LoRAConfig(target_modules=("nothing_like_it",)))
    other.create(NAME, LoRAConfig(target_modules=("q_proj",)))
    for head in ("lm_head", "embed_tokens"):
        with pytest.raises(ConfigError, match=head):
            other.create(NAME, LoRAConfig(target_modules=("q_proj", head)))
    assert other.logprobs(NAME, random_batch(0))
