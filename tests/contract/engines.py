"""Engines under the contract suite, over one tiny model and a few adapters of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from art_server.inference import Engine, TransformersEngine, VllmEngine, VllmSettings, render
from art_server.tiny_model import make_tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
BASE = "tiny"
CONTEXT = 512
EXACT = 1e-4
"""The largest difference of two float32 logprobs of one token."""
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "fox"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arg\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
ANSWERS = {"Look it up.": f"I look.\n{CALL}", "Break it.": BROKEN}
"""What the model of `make_caller` says, with `TOOLS`."""


def chat(content: str = "Hello there.", **parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "max_tokens": 12} | parameters


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_adapter(model_folder: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA with random weights, strong enough to change every logprob."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(load_model(model_folder), config).save_pretrained(folder)
    return folder


NO_THOUGHT = "<think>\n\n</think>\n\n"
"""What Qwen3's chat template writes for the model where `enable_thinking` is false."""


def make_caller(folder: Path) -> Path:
    """A model that answers as `ANSWERS` has it, and knows nothing else. Its chat template knows
    `enable_thinking`, as Qwen3's does."""
    make_tiny_model(folder, layers=1)
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += (
        "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    )
    tokenizer.save_pretrained(folder)
    rows = []
    for asked, answer in ANSWERS.items():
        prompt = tokenizer.encode(render(tokenizer, [{"role": "user", "content": asked}], TOOLS))
        completion = tokenizer.encode(answer + tokenizer.eos_token)
        rows.append((prompt + completion, [-100] * len(prompt) + completion))
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = model(ids_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.02:
            break
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """The model through Hugging Face and PEFT alone, one sequence at a time."""

    model: PeftModel
    names: dict[str, str]

    @classmethod
    def load(cls, model_folder: Path, adapters: dict[str, Path]) -> Reference:
        names = {policy: f"adapter{i}" for i, policy in enumerate(adapters)}
        first, *others = adapters
        model = PeftModel.from_pretrained(
            load_model(model_folder), adapters[first], adapter_name=names[first]
        )
        for policy in others:
            model.load_adapter(adapters[policy], names[policy])
        return cls(model.eval(), names)

    @torch.no_grad()
    def logits(self, policy: str | None, ids: list[int]) -> torch.Tensor:
        """T x V."""
        if policy is None:
            with self.model.disable_adapter():
                return self.model(torch.tensor([ids])).logits[0]
        self.model.set_adapter(self.names[policy])
        return self.model(torch.tensor([ids])).logits[0]

    def error(self, sample: dict[str, Any]) -> float:
        """The largest difference of the sample's logprobs from a fresh forward over its ids."""
        policy = None if sample["policy"] == BASE else sample["policy"]
        prompt, completion = sample["prompt_ids"], sample["completion_ids"]
        logits_CV = self.logits(policy, prompt + completion)[len(prompt) - 1 : -1]
        logprobs_CV = (logits_CV / (sample["temperature"] or 1.0)).log_softmax(-1)
        mine_C = logprobs_CV.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        return float((mine_C - torch.tensor(sample["logprobs"])).abs().max())


def make_transformers(folder: Path) -> Engine:
    return TransformersEngine(
        load_model(folder), AutoTokenizer.from_pretrained(folder), BASE, CONTEXT
    )


def vllm_python() -> Path:
    """The Python with vLLM that the tests use; skips where there is none."""
    python = Path(os.environ.get("ART_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        pytest.skip("vLLM is not installed: make .venv-vllm (Linux on x86-64, Python 3.11)")
    return python


def make_vllm(folder: Path) -> Engine:
    settings = VllmSettings(
        python=vllm_python(),
        model=str(folder),
        dtype="float32",
        context_length=CONTEXT,
        slots=8,
        max_rank=16,
        kv_cache_bytes=128 << 20,
        can_sleep=True,
    )
    return VllmEngine(settings, load_model(folder), BASE)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "transformers": make_transformers,
    "vllm": make_vllm,
}
PARAMS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ENGINES]
"""One of pytest's workers runs all tests of an engine that takes long to start."""
GUIDED = {"vllm"}
"""Engines that guide decoding: by a grammar, a forced tool, a bias or a penalty."""
