"""The training part of a GRPO step, against TRL's GRPOTrainer: same model, LoRA and tokens.

    python benchmarks/train_vs_trl.py                    # a Qwen3 of 3.8 M parameters on the CPU
    python benchmarks/train_vs_trl.py --model 0.6b       # bf16 on the GPU, sequences up to 16 k
    python benchmarks/train_vs_trl.py --model 4b

Both sides take turns in one run: loss, backward, clipping and AdamW step on given completions and
advantages. TRL's loop is its own; only its `_generate_and_score_completions` is replaced, by one
that hands out the given tokens, padded as TRL pads them. Before anything is timed, both sides start
from the same adapter and have to find the same gradient norm. Gradient checkpointing is off on a
CPU and on on a GPU, for both. A side's peak memory is that of a process of its own, above what it
held before its first step.

`shared`: 8 completions on one long prompt. `nothing_shared`: 8 short prompts, completions of very
different lengths. Tokens per second count every prompt and completion token of every sample,
however a side computes them. MFU = tokens/s * (6 * parameters + 6 * layers * heads * head size *
mean length) / peak FLOP/s: the usual count of a dense causal model trained whole (2 forward, 4
backward, half of the square of scores), applied to both sides alike although LoRA needs no gradient
of frozen weights.

The GPU cases have not been run yet: no result of theirs is in `results/`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import trl
from art_server.tiny_model import make_tokenizer
from art_server.training import AdamParams, BaseModel, Datum, Trainer, group_advantages
from datasets import Dataset
from harness import MACHINE, report
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from art_cloud.shared.config import LoRAConfig, TrainConfig

NAME = "bench"
LEARNING_RATE = 1e-5
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, NVIDIA's data sheets


@dataclass(frozen=True)
class Case:
    name: str
    prompt: int
    completions: tuple[int, ...]
    shared: bool


def cases(model: str) -> list[Case]:
    if model == "tiny":
        lengths = (32, 64, 96, 128, 192, 256, 384, 512)
        return [Case("shared", 1500, (64,) * 8, True), Case("nothing_shared", 64, lengths, False)]
    lengths = (512, 1024, 2048, 4096, 6144, 8192, 12288, 15872)
    return [
        Case("shared", 15360, (1024,) * 8, True),
        Case("nothing_shared", 512, lengths, False),
        Case("one_length", 512, (15872,) * 8, False),
    ]


def model_config(model: str) -> PretrainedConfig:
    hidden, layers, heads, kv_heads, head, inner, vocabulary = {
        "tiny": (256, 5, 8, 4, 32, 704, 512),
        "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
        "4b": (2560, 36, 32, 8, 128, 9728, 151936),
    }[model]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        intermediate_size=inner,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


def make_base(model: str) -> BaseModel:
    device = torch.device("cpu" if model == "tiny" else "cuda")
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    torch.manual_seed(0)
    with device:
        network = AutoModelForCausalLM.from_config(model_config(model), dtype=dtype)
    network.requires_grad_(False).eval()
    return BaseModel("random-qwen3", network, make_tokenizer(), device, dtype, 40960)


def make_data(case: Case) -> list[Datum]:
    rng = random.Random(case.name)

    def ids(length: int) -> list[int]:
        return [rng.randrange(5, 500) for _ in range(length)]

    prompts = [ids(case.prompt)] * 8 if case.shared else [ids(case.prompt) for _ in range(8)]
    [advantages] = group_advantages([[rng.random() for _ in range(8)]])
    return [
        Datum(prompt, ids(length), advantage=advantage, sequence=number)
        for number, (prompt, length, advantage) in enumerate(
            zip(prompts, case.completions, advantages, strict=True)
        )
    ]


class Ours:
    def __init__(self, base: BaseModel, case: Case) -> None:
        self.trainer = Trainer(base)
        self.trainer.create(NAME, LoRAConfig(rank=16, alpha=32))
        data = make_data(case)
        scores = self.trainer.logprobs(NAME, data)
        self.data = [replace(d, logprobs=s) for d, s in zip(data, scores, strict=True)]

    def step(self) -> float:
        """One step; returns the gradient norm."""
        self.trainer.forward_backward(NAME, self.data, TrainConfig(loss="grpo"))
        return self.trainer.optim_step(NAME, AdamParams(LEARNING_RATE))["grad_norm"]


class GivenCompletions(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer on tokens that are given instead of sampled."""

    data: list[Datum]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
            width = max(map(len, rows))
            ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
            for number, row in enumerate(rows):
                columns = slice(width - len(row), width) if left else slice(len(row))
                ids[number, columns], mask[number, columns] = torch.tensor(row), 1
            return ids.to(device), mask.to(device)

        device = self.accelerator.device
        prompt_ids, prompt_mask = padded([d.prompt_ids for d in self.data], left=True)
        completion_ids, completion_mask = padded([d.completion_ids for d in self.data], left=False)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([d.advantage for d in self.data], device=device),
            "num_items_in_batch": completion_mask.sum(),
        }


def run_trl(
    base: BaseModel,
    case: Case,
    steps: int,
    batch: int,
    adapter: Path | None,
    after: Callable[[float, float], None],
) -> None:
    """TRL's own loop; `after` each step is told its seconds and its gradient norm."""

    class Clock(TrainerCallback):  # type: ignore[misc]
        started = 0.0
        seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now(base)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = now(base) - self.started

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "grad_norm" in logs:
                after(self.seconds, float(logs["grad_norm"]))

    cuda = base.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        trainer = GivenCompletions(
            model=copy.deepcopy(base.model),
            reward_funcs=lambda **_: [0.0],
            processing_class=base.tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
            peft_config=LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=8 // batch,
                num_generations=8,
                max_completion_length=max(case.completions),
                loss_type="grpo",
                beta=0.0,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                gradient_checkpointing=cuda,
                bf16=cuda,
                use_cpu=not cuda,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.data = make_data(case)
        if adapter is not None:
            set_peft_model_state_dict(trainer.model, load_file(adapter))
        trainer.train()


def now(base: BaseModel) -> float:
    if base.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def race(model: str, case: Case, rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds of each step of both sides, by turns, after one untimed turn that compares them."""
    base = make_base(model)
    ours = Ours(base, case)
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}

    def our_turn(trl_seconds: float, trl_norm: float) -> None:
        started = now(base)
        norm = ours.step()
        ended = now(base)
        if norms:
            seconds["trl"].append(trl_seconds)
            seconds["ours"].append(ended - started)
        elif abs(norm - trl_norm) > 0.02 * trl_norm:
            raise SystemExit(f"{case.name}: gradient norms differ: {norm} and TRL's {trl_norm}")
        norms.append(norm)

    norms: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ours.trainer.save_state(NAME, Path(folder))
        adapter = Path(folder) / "adapter" / "adapter_model.safetensors"
        run_trl(base, case, rounds + 1, batch, adapter, our_turn)
    return seconds


def peak_memory(model: str, case: Case, side: str, batch: int) -> float:
    """MiB above the start, of two steps in this process."""
    base = make_base(model)
    ours = Ours(base, case) if side == "ours" else None
    cuda = base.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else psutil.Process().memory_info().rss
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    if ours is not None:
        ours.step()
        ours.step()
    else:
        run_trl(base, case, 2, batch, None, lambda _seconds, _norm: None)
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        status = Path("/proc/self/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        peak = int(line.split()[1]) * 1024
    return (peak - before) / 2**20


def peak_memory_of_a_process(model: str, case: Case, side: str, batch: int) -> float:
    command = [sys.executable, __file__, "--model", model, "--batch", str(batch)]
    command += ["--memory", side, case.name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def utilization(model: str, case: Case, tokens_per_second: float) -> float | None:
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    config = model_config(model)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    length = case.prompt + statistics.fmean(case.completions)
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
    return peak and round(tokens_per_second * 6 * (parameters + attention) / peak, 4)


def measure(model: str, case: Case, rounds: int, batch: int) -> dict[str, Any]:
    seconds = race(model, case, rounds, batch)
    tokens = sum(len(d.prompt_ids) + len(d.completion_ids) for d in make_data(case))
    found: dict[str, Any] = asdict(case)
    for side, each in seconds.items():
        median = statistics.median(each)
        found[side] = {
            "seconds": round(median, 4),
            "fastest": round(min(each), 4),
            "tokens_per_second": round(tokens / median),
            "mfu": utilization(model, case, tokens / median),
            "peak_mib": round(peak_memory_of_a_process(model, case, side, batch)),
        }
    found["ratio"] = round(found["trl"]["seconds"] / found["ours"]["seconds"], 2)
    found["memory_ratio"] = round(found["trl"]["peak_mib"] / found["ours"]["peak_mib"], 2)
    print(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["tiny", "0.6b", "4b"], default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=None, help="TRL's per-device batch size")
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    batch = options.batch or (4 if options.model == "tiny" else 1)
    if options.memory:
        side, name = options.memory
        [case] = [case for case in cases(options.model) if case.name == name]
        print(peak_memory(options.model, case, side, batch))
        return
    found = [measure(options.model, case, options.rounds, batch) for case in cases(options.model)]
    first = found[0]
    report(
        "train_vs_trl" if options.model == "tiny" else f"train_vs_trl-{options.model}",
        first["ours"]["seconds"],
        first["trl"]["seconds"],
        "TRL GRPOTrainer",
        first["ratio"],
        "seconds per step",
        machine=torch.cuda.get_device_name() if options.model != "tiny" else MACHINE,
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__, "trl": trl.__version__},
        trl_batch=batch,
        cases=found,
    )


if __name__ == "__main__":
    main()
