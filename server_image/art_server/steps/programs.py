"""What a job does: register, train, sft. Each ends in one step in the store, or in none.

A program may be run again from its start at any time (the server was killed, the answer was lost):
it looks for a step that carries its call's id first, and everything else it does is a function of
the newest step and the call's body. So a step that is made again comes out the same.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from statistics import fmean

from art_cloud.shared.config import SFTConfig, TrainConfig
from art_cloud.shared.errors import (
    CanaryError,
    ConflictError,
    NotFoundError,
    RivalError,
    ServerStoppingError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import (
    JobInfo,
    Metrics,
    RegisterRequest,
    SFTRequest,
    StepResult,
    is_finite,
)
from art_cloud.shared.wire import decode_batch
from art_cloud.store.checkpoints import Manifest, Parent, superseded

from ..training import AdamParams, Trainer
from .batches import rl_data, sft_batches, sft_data, sft_learning_rate
from .compute import Compute
from .jobs import Report
from .models import Models, ModelState
from .policies import Policies
from .publishing import Keep, Publisher, ask_store, log_progress, nothing
from .trajectory_log import keeper

log = logging.getLogger(__name__)

INIT = "init"
"""The call id of every step 0: made from the same seed, it is the same step whoever makes it."""
OF_ANY_MODEL = (StoreUnavailableError, StoreAccessError, StoreFullError)
"""Errors that one model has no more than another."""


@dataclass(frozen=True)
class Programs:
    compute: Compute
    models: Models
    policies: Policies
    publisher: Publisher
    max_bytes: int
    """Of what a call holds, once it is read."""

    async def run(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Do what a job asks for; the result is that of the step that it made."""
        if job.kind == "register":
            return await self._register(job, body, report)
        model = self.models.get(job.name)
        program = self._train if job.kind == "train" else self._sft
        try:
            return await program(model, job, body, report)
        finally:
            if not isinstance(sys.exception(), ServerStoppingError):  # else the next server does it
                model.end_repeating()

    async def _register(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Load the base model if need be, and the model's newest step, or make its step 0."""
        request = RegisterRequest.model_validate_json(body)
        model = self.models.state(job.name)
        with suppress(RivalError):  # to register is to go on from what the rival made
            await model.until_durable()
        manifest = await self._in_store(model, request, report)
        report({"phase": f"loading {request.base_model}"})
        await self.compute.open(request.base_model)
        if manifest is None:
            report({"phase": "making step 0"})
            draft = await self.compute.in_training_thread(self._make_step_0, model, request)
            try:
                manifest = await self.publisher.publish(model, draft, report)
            except ConflictError:  # somebody else has begun the model: go on from there
                if (manifest := await self._in_store(model, request, report)) is None:
                    raise
        await self._serve(model, manifest, report)
        return _result(model, manifest)

    async def _in_store(
        self, model: ModelState, request: RegisterRequest, report: Report
    ) -> Manifest | None:
        """The newest step in the store, as it is registered now."""
        if (newest := await ask_store(report, model.checkpoints.newest)) is None:
            return None
        _check_same_model(model.name, newest, request)
        return newest.model_copy(update={"retention": request.retention})

    async def _train(
        self, model: ModelState, job: JobInfo, body: bytes, report: Report
    ) -> StepResult:
        """One step of a policy loss on a batch of groups."""
        done = await self._done_before(model, job, report)
        batch = await self.compute.in_training_thread(decode_batch, body, self.max_bytes)
        config, name = batch.config, str(model.name)

        def train() -> Metrics:
            started = time.perf_counter()
            data, metrics = rl_data(batch, self.compute.vocabulary)
            reference = None
            if config.kl_coef and config.kl_reference_step is not None:
                model.refer_to(config.kl_reference_step)
                reference = self.policies.fetch_reference(model.name, config.kl_reference_step)
            trainer = self._begin_training(model)
            metrics |= trainer.forward_backward(
                name,
                data,
                config,
                reference=reference,
                progress=lambda done, total: report(
                    {"phase": "training", "done": done, "total": total}
                ),
            )
            metrics |= trainer.optim_step(name, adam(config))
            metrics["seconds"] = time.perf_counter() - started
            return metrics | batch.metrics

        number = done.step if done else model.newest.step + 1
        keep = keeper(model.checkpoints, batch, number, job.id, self.compute.base, report)
        if done is None:
            return await self._step(model, job, train, report, keep)
        if done.durable:
            await keep()
        return done

    async def _sft(
        self, model: ModelState, job: JobInfo, body: bytes, report: Report
    ) -> StepResult:
        """Supervised fine-tuning over all examples; one step of the model when it is through."""
        if (done := await self._done_before(model, job, report)) is not None:
            return done
        request = await self.compute.in_training_thread(SFTRequest.model_validate_json, body)
        config, name = request.config, str(model.name)

        def train() -> Metrics:
            started = time.perf_counter()
            data = sft_data(request.examples, self.compute.base, self.max_bytes)
            trainer = self._begin_training(model)
            batches = sft_batches(data, config)
            losses, tokens, computed = [], 0.0, 0.0
            for number, batch in enumerate(batches):
                measured = trainer.forward_backward(name, batch, "cross_entropy")
                rate = sft_learning_rate(config, number, len(batches))
                measured |= trainer.optim_step(name, adam(config, rate))
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
            return {
                "loss": fmean(losses[-epoch:]),
                "loss_first": losses[0],
                "loss_last": losses[-1],
                "optimizer_steps": float(len(batches)),
                "examples": float(len(request.examples)),
                "tokens": tokens,
                "tokens_per_second": computed / seconds,
                "seconds": seconds,
            }

        return await self._step(model, job, train, report)

    async def _step(
        self,
        model: ModelState,
        job: JobInfo,
        train: Callable[[], Metrics],
        report: Report,
        keep: Keep = nothing,
    ) -> StepResult:
        """The step that `train`, called in the trainer's thread, makes of the newest one."""
        newest = model.newest
        looking = asyncio.create_task(self._look_elsewhere(model, job, newest, report))
        try:
            if model.store_again():
                await model.until_durable()
            if not self._is_resident(model):
                await ask_store(report, self.policies.fetch, newest)
            await self.policies.make_room()
            draft = await self.compute.train(lambda: _next(job, newest, train(), report))
            if (found := await looking) is not None:
                return _result(model, found)
            manifest = await self.publisher.publish(model, draft, report, keep)
        except BaseException as error:
            await asyncio.wait([looking])
            looking.exception()  # it, or what came before it, is raised
            if isinstance(error, RivalError):
                if model.is_unsure(error.call_id):
                    raise await self._counted_after_all(model, error.call_id, report) from error
                model.fence(error)
            raise
        return _result(model, manifest)

    async def _done_before(
        self, model: ModelState, job: JobInfo, report: Report
    ) -> StepResult | None:
        """The result of this very call, if its step is there already."""
        found = model.newest
        if found.call_id != job.id:
            if (step := model.step_of(job.id)) is None:
                return None
            found = await ask_store(report, model.checkpoints.record, step)
        return _result(model, found)

    async def _look_elsewhere(
        self, model: ModelState, job: JobInfo, newest: Manifest, report: Report
    ) -> Manifest | None:
        """This call's step, if another server made it; then this one goes on from there.

        Raises `RivalError` if another call made the step that this one would make.
        """
        checkpoints = model.checkpoints

        def look() -> tuple[Manifest, Manifest] | None:
            if (rival := checkpoints.find(newest.step + 1)) is None:
                return None
            if (step := checkpoints.calls().get(job.id)) is None:
                raise superseded(rival)
            return checkpoints.record(step), checkpoints.newest() or rival

        if (found := await ask_store(report, look)) is None:
            return None
        mine, there = found
        await self._serve(model, there, report)
        return mine

    async def _counted_after_all(
        self, model: ModelState, call_id: str, report: Report
    ) -> ConflictError:
        """Go on from a step of this server that it had given up, and what the next call is told."""
        there = await ask_store(report, model.checkpoints.newest)
        assert there is not None
        await self._serve(model, there, report)
        return ConflictError(
            f"{there.policy} is in the store: call {call_id} made it, which was answered with an "
            "error because the store did not answer. That call counts, and this one made no step. "
            "If it was a repeat of that one, nothing is left to do; if not, make it again."
        )

    async def reopen(self, names: Iterable[ModelName], repeated: set[ModelName]) -> None:
        """After a restart: serve the newest step of the models that this server had.

        Of those that are `repeated` a job makes a step again that was served already. A model that
        can't be served is left out, and whoever asks for it is told why.
        """
        for name in names:
            model = self.models.state(name)
            try:
                manifest = await asyncio.to_thread(model.checkpoints.newest)
                if manifest is None:
                    continue
                await self.compute.open(manifest.base_model)
                await self._serve(model, manifest, log_progress)
            except OF_ANY_MODEL:
                raise
            except (StoreError, CanaryError, ConflictError, NotFoundError) as error:
                model.leave_out(error)
            else:
                if name in repeated:
                    model.repeat()

    async def _serve(self, model: ModelState, newest: Manifest, report: Report) -> None:
        """Go on from the newest step in the store."""
        calls = await ask_store(report, model.checkpoints.calls)
        await ask_store(report, self.policies.fetch, newest)
        await self.policies.load(newest)
        model.register(newest, calls)

    def _make_step_0(self, model: ModelState, request: RegisterRequest) -> Manifest:
        model.train()
        self.compute.trainer.create(str(model.name), request.lora)
        return Manifest(
            project=model.name.project,
            model=model.name.model,
            step=0,
            kind="init",
            call_id=INIT,
            parent=None,
            base_model=request.base_model,
            lora=request.lora,
            retention=request.retention,
            versions=package_versions(),
        )

    def _is_resident(self, model: ModelState) -> bool:
        return model.is_resident and str(model.name) in self.compute.trainer

    def _begin_training(self, model: ModelState) -> Trainer:
        """The trainer, which holds the newest step and is about to change it."""
        trainer = self.compute.trainer
        if not self._is_resident(model):
            trainer.load_state(str(model.name), self.policies.fetch(model.known))
        model.train()
        return trainer


def _result(model: ModelState, manifest: Manifest) -> StepResult:
    return StepResult(
        step=manifest.step,
        policy=manifest.policy,
        metrics=manifest.metrics,
        durable=model.storing is None or model.storing.policy != manifest.policy,
    )


@cache
def package_versions() -> dict[str, str]:
    return {name: version(name) for name in ("art-cloud", "torch", "transformers", "peft")}


def _next(job: JobInfo, newest: Manifest, metrics: Metrics, report: Report) -> Manifest:
    """The step that `job` makes from `newest`, without its files."""
    if odd := [f"{name} ({value})" for name, value in metrics.items() if not is_finite(value)]:
        text = (
            f"Step {newest.step + 1} of {newest.name} is kept without these metrics, which are no "
            f"finite numbers: {', '.join(odd)}. Are logprobs of the batch those of its policy?"
        )
        log.warning(text)
        report({"phase": "training", "warning": text})
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
