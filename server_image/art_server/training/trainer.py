"""forward_backward, optim_step, save_state, load_state: the core that training programs call.

One base model, many adapters, each with an optimizer of its own. A trainer belongs to one thread at
a time. It draws no random numbers after an adapter is created: on a CPU the same calls give the
same bits, in this process or in another that goes on from a saved state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from art_cloud.shared.config import LoRAConfig, TrainConfig
from art_cloud.shared.errors import ConfigError, JobError, NotFoundError

from . import attention
from .adapters import Adapters, Parameters, dump, fill
from .data import AdamParams, Datum, check
from .loading import BaseModel
from .logprobs import token_logprobs
from .losses import Loss, Sums, has_gradient, token_losses, token_weights
from .trie import Row, pack

TOKEN_BUDGET = {"cpu": 4096, "cuda": 16384}
ADAPTER, OPTIMIZER, STATE = "adapter", "optimizer.safetensors", "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_LEARNERS = 8
"""How many adapters with their moments are held at once, as many as an engine serves."""

Progress = Callable[[int, int], None]


@dataclass
class _Learner:
    """An adapter in training."""

    key: str
    seed: int
    parameters: Parameters
    optimizer: torch.optim.AdamW = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters.values(), fused=True)


class Trainer:
    """Trains LoRA adapters of `base`, by name. `token_budget`: trie tokens computed at once."""

    def __init__(self, base: BaseModel, *, token_budget: int | None = None) -> None:
        self.base = base
        self.token_budget = token_budget or TOKEN_BUDGET[base.device.type]
        self._adapters = Adapters(base)
        self._learners: dict[str, _Learner] = {}
        """The adapters in training by name, in the order of their last use."""
        self.computed = 0
        """How many rows were computed so far: the watchdog sees by it that a step gets on."""
        model = self._adapters.model
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        _check_head(self.base, self._head)
        self._share = attention.can_share(model.config)
        if self._share:
            model.set_attn_implementation(attention.NAME)
            self._share = model.config._attn_implementation == attention.NAME
        if base.device.type == "cuda":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()  # checkpointing needs it; what is sampled without dropout trains without
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0

    def __contains__(self, name: object) -> bool:
        return name in self._learners

    def create(self, name: str, lora: LoRAConfig) -> None:
        """Make a fresh adapter, the same for the same `lora`. Replaces one of that name, and, where
        there are `MOST_LEARNERS`, the one that was used longest ago."""
        key = self._adapters.create(lora)
        self._replace(name, _Learner(key, lora.seed, self._adapters.parameters(key)))

    def unload(self, name: str) -> None:
        self._adapters.delete(self._learner(name).key)
        del self._learners[name]

    def save_state(self, name: str, folder: Path) -> None:
        """Write all that `load_state` needs; the same state gives the same bytes.

        `adapter/` is a plain PEFT folder; `optimizer.safetensors` holds AdamW's moments by
        parameter, `trainer.json` the seed and the number of optimizer steps.
        """
        self.save_adapter(name, folder)
        self.save_optimizer(name, folder)

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write the adapter: the half of `save_state` that an engine needs."""
        self._adapters.save(self._learner(name).key, folder / ADAPTER)

    def save_optimizer(self, name: str, folder: Path) -> None:
        """Write the optimizer: the other half of `save_state`, for a folder that exists."""
        learner = self._learner(name)
        moments = _moments(learner) if learner.steps else {}
        (folder / OPTIMIZER).write_bytes(dump(moments))
        state = {"optimizer_steps": learner.steps, "seed": learner.seed}
        (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    def load_state(self, name: str, folder: Path) -> None:
        """Go on from what `save_state` wrote. Raises `ConfigError` if it is of another model."""
        state = json.loads((folder / STATE).read_text())
        key = self._adapters.load(folder / ADAPTER)
        learner = _Learner(key, state["seed"], self._adapters.parameters(key))
        learner.steps = state["optimizer_steps"]
        if learner.steps:
            for parameter in learner.parameters.values():
                learner.optimizer.state[parameter] = {
                    "step": torch.tensor(float(learner.steps), device=self.base.device),
                    **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
                }
            fill(_moments(learner), load_file(folder / OPTIMIZER))
        self._replace(name, learner)

    def forward_backward(
        self,
        name: str,
        data: Sequence[Datum],
        loss: Loss,
        *,
        reference: Path | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Add the gradient of the batch's loss to what is there; return metrics.

        `reference` is the PEFT folder that a KL penalty pulls towards; None: the base model.
        `progress` is called with the rows done and the rows in all.

        Metrics, means being over the completion tokens computed: loss, entropy (nats), kl_sampler
        (k3 estimate, sampler to trainer), kl_reference, clip_fraction, ratio_mean, ratio_max,
        tokens (completion tokens), tokens_computed (in the trie, prompts too), tokens_per_second
        (of those), trie_saved (share of the samples' tokens that the trie did not compute).
        Samples whose gradient is exactly 0 are not computed and have no part in the means.

        Raises `UntrainableError` or `ContextLengthError` before anything is computed.
        """
        learner = self._learner(name)
        check(data, self.base.context_length, with_logprobs=loss != "cross_entropy")
        weights = token_weights(data, loss)
        kept = [n for n, datum in enumerate(data) if has_gradient(datum, weights[n], loss)]
        started = time.perf_counter()
        rows = pack(data, kept, self.token_budget, share=self._share)
        references: list[Tensor] | None = None
        if isinstance(loss, TrainConfig) and loss.kl_coef:
            references = self._reference_logprobs(rows, loss, reference)
        sums = Sums()
        try:
            for number, row in enumerate(rows):
                data_B = [data[n] for n in row.members]
                logprobs_M, entropies_M = self._score(learner.key, row)
                weights_M = torch.tensor(
                    [weights[n] for n in row.members for _ in data[n].completion_ids],
                    dtype=logprobs_M.dtype,
                    device=logprobs_M.device,
                )
                reference_M = references[number] if references is not None else None
                token_losses(
                    logprobs_M, entropies_M, weights_M, data_B, loss, sums, reference_M
                ).backward()
                if progress is not None:
                    progress(number + 1, len(rows))
        except BaseException:
            learner.optimizer.zero_grad()
            raise
        computed = sum(len(row.tokens_T) for row in rows)
        alone = sum(len(data[n].prompt_ids) + len(data[n].completion_ids) - 1 for n in kept)
        return sums.metrics(loss) | {
            "tokens_computed": float(computed),
            "tokens_per_second": computed / (time.perf_counter() - started),
            "trie_saved": 1 - computed / alone if alone else 0.0,
        }

    def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Clip the gradient, take an AdamW step, clear the gradient; return `grad_norm`, unclipped.

        Without a gradient (no sample had any signal) nothing changes, moments and weight decay
        included. Raises `JobError` if the gradient is not finite: weights stay as they were.
        """
        learner = self._learner(name)
        gradients = [p.grad for p in learner.parameters.values() if p.grad is not None]
        if not gradients:
            return {"grad_norm": 0.0}
        norm = nn.utils.get_total_norm(gradients)
        grad_norm = norm.item()
        if not torch.isfinite(norm):
            learner.optimizer.zero_grad()
            raise JobError(
                f"The gradient of {name} is not finite (norm {grad_norm}): no step was taken and "
                "the weights are as before. Look for an extreme advantage or logprob in the batch, "
                "or lower the learning rate."
            )
        nn.utils.clip_grads_with_norm_(learner.parameters.values(), params.max_grad_norm, norm)
        for group in learner.optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, params.betas
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        learner.steps += 1
        return {"grad_norm": grad_norm}

    @torch.no_grad()
    def logprobs(self, name: str | None, data: Sequence[Datum]) -> list[list[float]]:
        """The logprob of each completion token (C for each sample); `name` None: the base model."""
        check(data, self.base.context_length, with_logprobs=False)
        key = None if name is None else self._learner(name).key
        found: list[list[float]] = [[] for _ in data]
        for row in pack(data, range(len(data)), self.token_budget, share=self._share):
            logprobs_M, _ = self._score(key, row)
            lengths = [len(data[n].completion_ids) for n in row.members]
            for n, part in zip(row.members, logprobs_M.split(lengths), strict=True):
                found[n] = part.tolist()
        return found

    @torch.no_grad()
    def next_logprobs(self, name: str, prompt_ids: list[int], count: int) -> dict[int, float]:
        """The `count` likeliest tokens after a prompt, the likeliest first, with their logprobs."""
        [row] = pack([Datum(prompt_ids, [0])], [0], self.token_budget)
        hidden_D = self._hidden(self._learner(name).key, row)[-1]
        logits_V = self._head(hidden_D)
        dtype = torch.promote_types(logits_V.dtype, torch.float32)
        likeliest = logits_V.to(dtype).log_softmax(-1).topk(count)
        return dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))

    def _score(self, key: str | None, row: Row) -> tuple[Tensor, Tensor]:
        """The logprob and the entropy of each completion token (M and M) under an adapter or the
        base model."""
        device = self.base.device
        logprobs_N, entropies_N = token_logprobs(
            self._hidden(key, row),
            self._head,
            row.predecessors_N.to(device),
            row.targets_N.to(device),
            row.temperatures_N.to(device),
        )
        sampled_M = row.sampled_M.to(device)
        return logprobs_N[sampled_M], entropies_N[sampled_M]

    def _hidden(self, key: str | None, row: Row) -> Tensor:
        """The hidden states that the output head gets (T x D), under an adapter or the base
        model."""
        self.computed += 1
        device = self.base.device
        extra = {}
        if self._share:
            layout = attention.Layout.of(row.positions_T, row.ends_T, device, self.base.dtype)
            extra["trie"] = layout
        low = self.base.dtype in (torch.bfloat16, torch.float16)
        autocast = torch.autocast(device.type, self.base.dtype) if low else nullcontext()
        with self._adapters.active(key), autocast:
            hidden_1TD = self._decoder(
                input_ids=row.tokens_T[None].to(device),
                position_ids=row.positions_T[None].to(device),
                use_cache=False,
                **extra,
            ).last_hidden_state
        return hidden_1TD[0].to(self._head.weight.dtype)

    @torch.no_grad()
    def _reference_logprobs(
        self, rows: Sequence[Row], config: TrainConfig, reference: Path | None
    ) -> list[Tensor]:
        if reference is None and config.kl_reference_step is not None:
            raise ConfigError(
                f"The KL penalty is to step {config.kl_reference_step}, and its adapter was not "
                "handed to the trainer."
            )
        key = None if reference is None else self._adapters.load(reference)
        try:
            return [self._score(key, row)[0] for row in rows]
        finally:
            if key is not None:
                self._adapters.delete(key)

    def _learner(self, name: str) -> _Learner:
        if name not in self._learners:
            loaded = ", ".join(sorted(self._learners)) or "none"
            raise NotFoundError(f"No adapter {name} is in training. Loaded: {loaded}.")
        self._learners[name] = self._learners.pop(name)
        return self._learners[name]

    def _replace(self, name: str, learner: _Learner) -> None:
        if name in self._learners:
            self.unload(name)
        self._learners[name] = learner
        while len(self._learners) > MOST_LEARNERS:
            self.unload(next(iter(self._learners)))


def _moments(learner: _Learner) -> dict[str, Tensor]:
    return {
        f"{name}.{moment}": learner.optimizer.state[parameter][moment]
        for name, parameter in learner.parameters.items()
        for moment in MOMENTS
    }


@torch.no_grad()
def _check_head(base: BaseModel, head: nn.Module) -> None:
    """Raise `ConfigError` if the model does more to its logits than a linear head."""
    probe_1T = torch.arange(4, device=base.device)[None]
    logits_1TV = base.model(probe_1T, use_cache=False).logits
    hidden_1TD = base.model.get_decoder()(probe_1T, use_cache=False).last_hidden_state
    if not torch.allclose(head(hidden_1TD), logits_1TV, rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"{base.name} scales or caps its logits after the output head; training it is not "
            "supported."
        )
