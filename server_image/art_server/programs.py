"""What a job does: register, train, sft. Each ends in one step in the store, or in none.

A program may be run again from its start at any time (the server was killed, the answer was lost):
it looks for a step that carries its call's id first, and everything else it does is a function of
the newest step and the call's body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from art_cloud.checkpoints import Manifest, Parent
from art_cloud.config import SFTConfig, TrainConfig
from art_cloud.errors import (
    CanaryError,
    ConflictError,
    CorruptBlobError,
    NotFoundError,
)
from art_cloud.names import ModelName
from art_cloud.protocol import (
    JobInfo,
    JobKind,
    Metrics,
    RegisterRequest,
    SFTRequest,
    StepResult,
)
from art_cloud.store import Blob
from art_cloud.transfer import Rate
from art_cloud.wire import decode_batch

from .canary import EXPECTED
from .data import rl_data, sft_batches, sft_data, sft_learning_rate
from .jobs import Program, Report
from .pruning import Pruner
from .runtime import Runtime, package_versions
from .training import AdamParams
from .trajectory_log import kept

log = logging.getLogger(__name__)

INIT = "init"
"""The call id of every step 0: made from the same seed, it is the same step whoever makes it."""


class Programs:
    def __init__(self, runtime: Runtime, max_bytes: int) -> None:
        self.runtime = runtime
        self.max_bytes = max_bytes
        self._calls: dict[ModelName, dict[str, int]] = {}
        self._resident: dict[ModelName, int] = {}
        self._pruner = Pruner(runtime)

    def by_kind(self) -> dict[JobKind, Program]:
        return {"register": self.register, "train": self.train, "sft": self.sft}

    async def register(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Load the base model if need be, and the model's newest step, or make its step 0."""
        request = RegisterRequest.model_validate_json(body)
        name = ModelName(job.project, job.model)
        checkpoints = self.runtime.checkpoints(name)
        manifest = await self.runtime.in_training_thread(checkpoints.newest)
        if manifest is not None:
            _check_same_model(name, manifest, request)
            manifest = manifest.model_copy(update={"retention": request.retention})
        report({"phase": f"loading {request.base_model}"})
        await self.runtime.open_base(request.base_model)
        if manifest is None:
            report({"phase": "making step 0"})
            draft = await self.runtime.in_training_thread(self._make_step_0, name, request)
            manifest = await self._publish(draft, report)
        await self._serve(manifest)
        return _result(manifest)

    async def train(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """One step of a policy loss on a batch of groups."""
        name = ModelName(job.project, job.model)
        done = await self._done_before(job, name)
        batch = await self.runtime.in_training_thread(decode_batch, body, self.max_bytes)
        config = batch.config
        newest = self.runtime.newest(name)

        def step() -> Manifest:
            started = time.perf_counter()
            self._make_resident(newest)
            data, metrics = rl_data(batch, self.runtime.vocabulary)
            reference = None
            if config.kl_coef and config.kl_reference_step is not None:
                self._pruner.references[name] = config.kl_reference_step
                reference = self.runtime.fetch_reference(name, config.kl_reference_step)
            metrics |= self.runtime.trainer.forward_backward(
                str(name),
                data,
                config,
                reference=reference,
                progress=lambda done, total: report(
                    {"phase": "training", "done": done, "total": total}
                ),
            )
            metrics |= self.runtime.trainer.optim_step(str(name), adam(config))
            metrics["seconds"] = time.perf_counter() - started
            return _next(job, newest, metrics | batch.metrics)

        number = done.step if done else newest.step + 1
        checkpoints = self.runtime.checkpoints(name)
        async with kept(checkpoints, batch, number, job.id, self.runtime.base, report):
            return done or await self._step(name, step, report)

    async def sft(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Supervised fine-tuning over all examples; one step of the model when it is through."""
        name = ModelName(job.project, job.model)
        if (done := await self._done_before(job, name)) is not None:
            return done
        request = SFTRequest.model_validate_json(body)
        newest = self.runtime.newest(name)
        config = request.config

        def step() -> Manifest:
            started = time.perf_counter()
            assert self.runtime.base is not None
            data = sft_data(request.examples, self.runtime.base)
            self._make_resident(newest)
            batches = sft_batches(data, config)
            losses, tokens, computed = [], 0.0, 0.0
            for number, batch in enumerate(batches):
                measured = self.runtime.trainer.forward_backward(str(name), batch, "cross_entropy")
                measured |= self.runtime.trainer.optim_step(
                    str(name),
                    adam(config, sft_learning_rate(config, number, len(batches))),
                )
                losses.append(measured["loss"])
                tokens += measured["tokens"]
                computed += measured["tokens_computed"]
                report(
                    {
                        "phase": "fine-tuning",
                        "done": number + 1,
                        "total": len(batches),
                        "metrics": {"loss": measured["loss"]},
                    }
                )
            epoch = max(1, len(batches) // config.epochs)
            seconds = time.perf_counter() - started
            metrics = {
                "loss": fmean(losses[-epoch:]),
                "loss_first": losses[0],
                "loss_last": losses[-1],
                "optimizer_steps": float(len(batches)),
                "examples": float(len(request.examples)),
                "tokens": tokens,
                "tokens_per_second": computed / seconds,
                "seconds": seconds,
            }
            return _next(job, newest, metrics)

        return await self._step(name, step, report)

    async def _step(
        self, name: ModelName, step: Callable[[], Manifest], report: Report
    ) -> StepResult:
        try:
            await self.runtime.make_room()
            draft = await self.runtime.train(step)
            report({"phase": f"loading {draft.policy}"})
            manifest = await self._publish(draft, report)
        except BaseException:
            # what the trainer holds may be half a step: the next job reads the newest one again
            self._resident.pop(name, None)
            raise
        self._resident[name] = manifest.step
        self._calls[name][manifest.call_id] = manifest.step
        self._pruner.after(manifest)
        return _result(manifest)

    async def _publish(self, draft: Manifest, report: Report) -> Manifest:
        """Make what the trainer holds the step `draft`: served and compared first, then counted."""
        runtime, trainer, name = self.runtime, self.runtime.trainer, str(draft.name)
        checkpoints = runtime.checkpoints(draft.name)

        async def store(folder: Path) -> dict[str, Blob]:
            await runtime.in_training_thread(trainer.save_optimizer, name, folder)
            rate = Rate()

            def watch(done: int, total: int) -> None:
                report({"phase": f"storing {draft.policy}: {rate.words(done, total)}"})

            return await asyncio.to_thread(checkpoints.upload, folder, watch)

        async with runtime.new_step(draft) as folder:
            await runtime.in_training_thread(trainer.save_adapter, name, folder)
            expected = runtime.in_training_thread(
                trainer.next_logprobs, name, runtime.canary.prompt_ids, EXPECTED
            )
            storing = asyncio.create_task(store(folder))
            try:
                difference = await runtime.serve(draft, expected)
                found = {
                    "metrics": draft.metrics | {"canary": difference},
                    "probe": await expected,
                    "files": await asyncio.shield(storing),
                }
            finally:
                await asyncio.wait([storing])
                storing.exception()  # raised above, unless the canary was first
            manifest = await runtime.in_training_thread(
                checkpoints.create, draft.model_copy(update=found)
            )
            runtime.set_newest(manifest)
        return manifest

    async def _done_before(self, job: JobInfo, name: ModelName) -> StepResult | None:
        """The result of this very call, if its step is in the store already."""
        self.runtime.newest(name)
        step = self._calls[name].get(job.id)
        if step is None:
            return None
        return _result(
            await self.runtime.in_training_thread(self.runtime.checkpoints(name).record, step)
        )

    async def reopen(self, names: Iterable[ModelName]) -> None:
        """After a restart: serve the newest step of the models that this server had."""
        for name in names:
            checkpoints = self.runtime.checkpoints(name)
            manifest = await self.runtime.in_training_thread(checkpoints.newest)
            if manifest is not None:
                await self.runtime.open_base(manifest.base_model)
                try:
                    await self._serve(manifest)
                except (CanaryError, CorruptBlobError, NotFoundError) as error:
                    log.error("%s can't be served: %s", manifest.policy, error)

    async def _serve(self, manifest: Manifest) -> None:
        checkpoints = self.runtime.checkpoints(manifest.name)
        self._calls[manifest.name] = await self.runtime.in_training_thread(checkpoints.calls)
        await self.runtime.load(manifest)
        self.runtime.set_newest(manifest)

    def _make_step_0(self, name: ModelName, request: RegisterRequest) -> Manifest:
        self.runtime.trainer.create(str(name), request.lora)
        self._resident[name] = 0
        return Manifest(
            project=name.project,
            model=name.model,
            step=0,
            kind="init",
            call_id=INIT,
            parent=None,
            base_model=request.base_model,
            lora=request.lora,
            retention=request.retention,
            versions=package_versions(),
        )

    def _make_resident(self, newest: Manifest) -> None:
        if self._resident.get(newest.name) != newest.step:
            self.runtime.trainer.load_state(str(newest.name), self.runtime.fetch(newest))


def _next(job: JobInfo, newest: Manifest, metrics: Metrics) -> Manifest:
    """The step that `job` makes from `newest`, without its files."""
    return Manifest(
        project=newest.project,
        model=newest.model,
        step=newest.step + 1,
        kind="train" if job.kind == "train" else "sft",
        call_id=job.id,
        parent=Parent(project=newest.project, model=newest.model, step=newest.step),
        base_model=newest.base_model,
        lora=newest.lora,
        retention=newest.retention,
        metrics=metrics,
        versions=package_versions(),
    )


def adam(config: TrainConfig | SFTConfig, learning_rate: float | None = None) -> AdamParams:
    return AdamParams(
        learning_rate=config.learning_rate if learning_rate is None else learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def _result(manifest: Manifest) -> StepResult:
    return StepResult(step=manifest.step, policy=manifest.policy, metrics=manifest.metrics)


def _check_same_model(name: ModelName, there: Manifest, request: RegisterRequest) -> None:
    if there.base_model != request.base_model:
        raise ConflictError(
            f"{name} is in the store as an adapter of {there.base_model}, and was registered now "
            f"with {request.base_model}. Use that base model, or another name."
        )
    if there.lora != request.lora:
        raise ConflictError(
            f"{name} is in the store with {there.lora!r}, and was registered now with "
            f"{request.lora!r}. Use the same, or another name."
        )
