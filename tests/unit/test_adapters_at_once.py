"""The trainer and an engine make adapters of one base model at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from art_server.inference.adapters import AdapterModel
from art_server.tiny_model import make_tiny_model
from art_server.training import Trainer, load_base
from torch import nn

from art_cloud.shared.config import LoRAConfig

TIMES = 30
IDS = list(range(20))


def test_what_is_loaded_is_right_while_another_thread_loads_too(tmp_path: Path) -> None:
    base = load_base(make_tiny_model(tmp_path / "base", hidden_size=64, layers=1))
    trainer = Trainer(base)
    trainer.create("a", LoRAConfig(rank=4))
    torch.manual_seed(1)
    for parameter in trainer._learner("a").parameters.values():
        parameter.data.normal_(0, 0.3)
    trainer.save_state("a", tmp_path / "state")
    expected = trainer.next_logprobs("a", IDS, 20)
    register = nn.Module.register_parameter
    served: list[dict[int, float]] = []

    def serve() -> None:
        engine = AdapterModel(base.model)
        for number in range(TIMES):
            engine.load(f"p/m@{number}", tmp_path / "state/adapter")
            with torch.inference_mode():
                logits_BV = engine.forward([f"p/m@{number}"], torch.tensor([IDS]))
            served.append(dict(enumerate(logits_BV.log_softmax(-1)[0].tolist())))
            engine.unload(f"p/m@{number}")

    serving = threading.Thread(target=serve)
    serving.start()
    trained = []
    while serving.is_alive():
        trainer.load_state("a", tmp_path / "state")
        trained.append(trainer.next_logprobs("a", IDS, 20))
    serving.join()
    assert nn.Module.register_parameter is register
    assert len(served) == TIMES
    assert trained
    for found in (*served, *trained):
        assert {token: found[token] for token in expected} == pytest.approx(expected, abs=1e-3)
