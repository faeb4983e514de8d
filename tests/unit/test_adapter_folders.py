"""Adapters out of a store and into one, with PEFT itself at the other end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from art_server.steps.runtime import Runtime, Settings
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import ConfigError, ConflictError, CorruptBlobError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, RegisterRequest
from art_cloud.shared.wire import encode_batch
from art_cloud.store.adapters import FREE, pull, push
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.files import FileStore

from ..contract.engines import load_model, make_adapter
from ..rigs.synthetic import batch
from .test_checkpoints import commit, contents

NAME = ModelName("games", "agent")
CONFIG = "adapter_config.json"


@pytest.fixture
def steps(tmp_path: Path) -> Checkpoints:
    return Checkpoints(FileStore(tmp_path / "store", create=True), NAME)


@pytest.fixture(scope="module")
def lora(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA as PEFT saves it, of rank 4."""
    return make_adapter(tiny_model, tmp_path_factory.mktemp("peft") / "lora", seed=7)


@pytest.fixture
def folder(lora: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "folder"
    copy.mkdir()
    for path in lora.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_pulled_adapter_is_a_folder_of_its_own(steps: Checkpoints, tmp_path: Path) -> None:
    made = commit(steps, tmp_path, 0)
    target = tmp_path / "new" / "adapter"
    told: list[tuple[int, int]] = []
    assert pull(steps, made, target, watch=lambda done, total: told.append((done, total)))
    assert set(contents(target)) == {"adapter_model.safetensors", CONFIG}
    size = sum(path.stat().st_size for path in target.iterdir())
    assert told[-1] == (size, size)
    assert not pull(steps, made, target)
    assert [path.name for path in target.parent.iterdir()] == ["adapter"]


def test_pull_never_writes_over_something_else(steps: Checkpoints, tmp_path: Path) -> None:
    first, second = commit(steps, tmp_path, 0), commit(steps, tmp_path, 1)
    target = tmp_path / "target"
    pull(steps, first, target)
    before = contents(target)
    with pytest.raises(ConflictError, match="holds something else than games/agent@1"):
        pull(steps, second, target)
    with pytest.raises(ConflictError):
        pull(steps, first, target, everything=True)
    assert contents(target) == before
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError):
        pull(steps, first, target)


def test_a_pull_that_breaks_leaves_nothing(steps: Checkpoints, tmp_path: Path) -> None:
    made = commit(steps, tmp_path, 0)
    blob = made.files["adapter/adapter_model.safetensors"]
    (tmp_path / "store" / "blobs" / blob.sha256).write_bytes(b"ad\0pter")
    with pytest.raises(CorruptBlobError):
        pull(steps, made, tmp_path / "out" / "target")
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_pushed_lora_is_served_and_trained_on(
    steps: Checkpoints, lora: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Step 0 answers as PEFT does with the folder; step 1 goes on from it."""
    made = push(steps, lora, base_model=str(tiny_model))
    assert (made.kind, made.step, made.lora.rank) == ("push", 0, 4)
    (tmp_path / "state").mkdir()
    runtime = Runtime(Settings(state=tmp_path / "state", store=str(tmp_path / "store")))
    programs = runtime.programs

    def job(kind: Any) -> JobInfo:
        return JobInfo(id=uuid4().hex, kind=kind, project="games", model="agent", state="running")

    try:
        request = RegisterRequest(base_model=str(tiny_model), lora=made.lora)
        await programs.run(job("register"), request.model_dump_json().encode(), print)
        chat = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 8}
        async with runtime.policies.asked_for(str(NAME)) as policy:
            assert policy == f"{NAME}@0"
            body = chat | {"model": policy, "temperature": 0}
            answer = await runtime.compute.engine.create("chat/completions", body, policy)
        sample = answer["choices"][0]["sample"]
        ids = sample["prompt_ids"] + sample["completion_ids"]
        peft = PeftModel.from_pretrained(load_model(tiny_model), lora).eval()
        with torch.no_grad():
            logprobs_TV = peft(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(sample["prompt_ids"]) - 1
        expected = [
            logprobs_TV[start + n, i].item() for n, i in enumerate(sample["completion_ids"])
        ]
        assert sample["logprobs"] == pytest.approx(expected, abs=1e-4)

        result = await programs.run(job("train"), encode_batch(batch(NAME, 1)), lambda data: None)
        assert (result.step, result.metrics["grad_norm"] > 0) == (1, True)
    finally:
        await runtime.close()
    before = load_file(lora / "adapter_model.safetensors")
    pull(steps, steps.read(1), tmp_path / "trained")
    after = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in before)
    assert 0 < moved < 0.01  # one small step away from what was pushed, not from nothing


def test_a_whole_checkpoint_is_copied_with_its_optimizer(
    steps: Checkpoints, lora: Path, tmp_path: Path
) -> None:
    origin = Checkpoints(steps.store, ModelName("games", "origin"))
    push(origin, lora, base_model="tiny")
    source = tmp_path / "source"
    origin.fetch(origin.read(0), source)
    (source / "optimizer.safetensors").write_bytes(b"moments")
    manifest = origin.read(0).model_copy(
        update={"step": 5, "call_id": "5", "kind": "train", "lora": LoRAConfig(rank=4, alpha=8)}
    )
    made = origin.commit(manifest, source)
    pull(origin, made, tmp_path / "whole", everything=True)
    copied = push(steps, tmp_path / "whole")
    assert (copied.step, copied.lora, copied.base_model) == (0, made.lora, "tiny")
    assert copied.files["optimizer.safetensors"] == made.files["optimizer.safetensors"]
    assert copied.files["trainer.json"] == made.files["trainer.json"]


def test_a_model_that_exists_is_left_alone(steps: Checkpoints, lora: Path, tmp_path: Path) -> None:
    commit(steps, tmp_path, 0)
    with pytest.raises(ConflictError, match="games/agent exists already"):
        push(steps, lora, base_model="tiny")


def edited(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return edit


def retensored(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "not a PEFT folder: it has no adapter_config"),
        (lambda folder: (folder / CONFIG).write_text("{"), "is not JSON"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "not of a LoRA"),
        (edited(peft_type="IA3"), "not of a LoRA"),
        (edited(use_dora=True), "use_dora=True, which can't be trained here"),
        (edited(modules_to_save=["lm_head"]), "modules_to_save"),
        (edited(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (edited(target_modules=".*proj"), "target_modules has to be a list of names"),
        (edited(r=0), "r is 0|rank is 0"),
        (edited(r=8), "is no part of a LoRA of rank 8"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"pickle"),
            "not a whole safetensors file",
        ),
        (retensored(lambda t: {k: v for k, v in t.items() if "lora_A" in k}), "pairs of lora_A"),
        (retensored(lambda t: t | {"x.lora_magnitude_vector": torch.ones(4)}), "no part of a LoRA"),
        (retensored(lambda t: {}), "does not hold pairs"),
    ],
)
def test_what_can_not_be_trained_is_refused(
    steps: Checkpoints, folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        push(steps, folder, base_model="tiny")
    assert steps.steps() == []
    assert list(steps.store.blobs()) == []


@pytest.mark.parametrize(
    "option",
    [*sorted({field.name for field in fields(LoraConfig)} - FREE), "an_option_of_a_later_peft"],
)
def test_every_option_that_the_trainer_does_not_have_is_refused(
    steps: Checkpoints, folder: Path, option: str
) -> None:
    edited(**{option: "pissa"})(folder)
    with pytest.raises(ConfigError, match=f"has {option}='pissa', which can't be trained here"):
        push(steps, folder, base_model="tiny")
    assert steps.steps() == []


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_what_peft_writes_for_a_plain_lora_is_taken(
    steps: Checkpoints, folder: Path, init: bool | str
) -> None:
    plain = LoraConfig(r=1, init_lora_weights=init, task_type="CAUSAL_LM").to_dict()
    kept = ("r", "lora_alpha", "target_modules", "base_model_name_or_path")
    edited(**{name: value for name, value in plain.items() if name not in kept})(folder)
    assert push(steps, folder, base_model="tiny").step == 0


def test_the_base_model_has_to_be_known(steps: Checkpoints, folder: Path) -> None:
    edited(base_model_name_or_path=None)(folder)
    with pytest.raises(ConfigError, match="--base-model"):
        push(steps, folder)
    assert push(steps, folder, base_model="tiny").base_model == "tiny"
