"""What a job does: register, train, sft. Each ends in one step in the store, or in none.

A program may be run again from its start at any time (the server was killed, the answer was lost):
it looks for a step that carries its call's id first, and everything else it does is a function of
the newest step and the call's body. So a step that is made again comes out the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from statistics import fmean

from art_cloud.shared.config import SFTConfig, TrainConfig
from art_cloud.shared.errors import (
    CanaryError,
    ConflictError,
    NotFoundError,
    RivalError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import (
    JobInfo,
    JobKind,
    Metrics,
    RegisterRequest,
    SFTRequest,
    StepResult,
    is_finite,
)
from art_cloud.shared.wire import decode_batch
from art_cloud.store.checkpoints import Manifest, Parent, superseded

from ..training import AdamParams
from .batches import rl_data, sft_batches, sft_data, sft_learning_rate
from .commits import log_progress, until_answered
from .jobs import Program, Report
from .pruning import Pruner
from .publishing import Keep, Publisher, nothing
from .runtime import Runtime, package_versions
from .trajectory_log import keeper

log = logging.getLogger(__name__)

INIT = "init"
"""The call id of every step 0: made from the same seed, it is the same step whoever makes it."""
OF_ANY_MODEL = (StoreUnavailableError, StoreAccessError, StoreFullError)
"""Errors that one model has no more than another."""


class Programs:
    def __init__(self, runtime: Runtime, max_bytes: int) -> None:
        self.runtime = runtime
        self.max_bytes = max_bytes
        self._calls: dict[ModelName, dict[str, int]] = {}
        self._resident: dict[ModelName, tuple[int, str]] = {}
        """The step that the trainer holds of each model, and the call that made it."""
        self._pruner = Pruner(runtime)
        self.publisher = Publisher(runtime, self._pruner)

    def by_kind(self) -> dict[JobKind, Program]:
        return {"register": self.register, "train": self.train, "sft": self.sft}

    async def register(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Load the base model if need be, and the model's newest step, or make its step 0."""
        request = RegisterRequest.model_validate_json(body)
        name = job.name
        checkpoints = self.runtime.checkpoints(name)
        with suppress(RivalError):  # to register is to go on from what the rival made
            await self.publisher.commits.settled(name)
        manifest = await until_answered(partial(asyncio.to_thread, checkpoints.newest), report)
        if manifest is not None:
            _check_same_model(name, manifest, request)
            manifest = manifest.model_copy(update={"retention": request.retention})
        report({"phase": f"loading {request.base_model}"})
        await self.runtime.open_base(request.base_model)
        if manifest is None:
            report({"phase": "making step 0"})
            draft = await self.runtime.in_training_thread(self._make_step_0, name, request)
            try:
                manifest = await self.publisher.publish(draft, report)
            except ConflictError:  # somebody else has begun the model: go on from there
                self._resident.pop(name, None)
                manifest = await until_answered(
                    partial(asyncio.to_thread, checkpoints.newest), report
                )
                if manifest is None:
                    raise
                _check_same_model(name, manifest, request)
                manifest = manifest.model_copy(update={"retention": request.retention})
        await self._serve(manifest, report)
        return self.publisher.result(manifest)

    async def train(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """One step of a policy loss on a batch of groups."""
        name = job.name
        done = await self._done_before(job, report)
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
            return _next(job, newest, metrics | batch.metrics, report)

        number = done.step if done else newest.step + 1
        checkpoints = self.runtime.checkpoints(name)
        keep = keeper(checkpoints, batch, number, job.id, self.runtime.base, report)
        if done is None:
            return await self._step(job, step, report, keep)
        if done.durable:
            await keep()
        return done

    async def sft(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        """Supervised fine-tuning over all examples; one step of the model when it is through."""
        name = job.name
        if (done := await self._done_before(job, report)) is not None:
            return done
        request = await self.runtime.in_training_thread(SFTRequest.model_validate_json, body)
        newest = self.runtime.newest(name)
        config = request.config

        def step() -> Manifest:
            started = time.perf_counter()
            assert self.runtime.base is not None
            data = sft_data(request.examples, self.runtime.base, self.max_bytes)
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
            return _next(job, newest, metrics, report)

        return await self._step(job, step, report)

    async def _step(
        self, job: JobInfo, step: Callable[[], Manifest], report: Report, keep: Keep = nothing
    ) -> StepResult:
        runtime, name, newest = self.runtime, job.name, self.runtime.newest(job.name)
        looking = asyncio.create_task(self._look_elsewhere(job, newest, report))
        try:
            await self.publisher.commits.retried(name)
            if not self._is_resident(newest):
                await until_answered(partial(asyncio.to_thread, runtime.fetch, newest), report)
            await runtime.make_room()
            draft = await runtime.train(step)
            if (found := await looking) is not None:
                self._resident.pop(name, None)
                return self.publisher.result(found)
            manifest = await self.publisher.publish(draft, report, keep)
        except BaseException as error:
            # what the trainer holds may be half a step: the next job reads the newest one again
            self._resident.pop(name, None)
            await asyncio.wait([looking])
            looking.exception()  # it, or what came before it, is raised
            if isinstance(error, RivalError):
                if error.call_id in self.publisher.unsure:
                    raise await self._counted_after_all(name, error.call_id, report) from error
                runtime.models.fence(name, error)
            raise
        finally:
            runtime.models.repeated(name)
        self._resident[name] = (manifest.step, manifest.call_id)
        self._calls[name][manifest.call_id] = manifest.step
        return self.publisher.result(manifest)

    async def _done_before(self, job: JobInfo, report: Report) -> StepResult | None:
        """The result of this very call, if its step is there already."""
        name, newest = job.name, self.runtime.newest(job.name)
        if newest.call_id == job.id:
            found = newest
        elif (step := self._calls[name].get(job.id)) is not None:
            record = partial(asyncio.to_thread, self.runtime.checkpoints(name).record, step)
            found = await until_answered(record, report)
        else:
            return None
        self.runtime.models.repeated(name)
        return self.publisher.result(found)

    async def _look_elsewhere(
        self, job: JobInfo, newest: Manifest, report: Report
    ) -> Manifest | None:
        """This call's step, if another server made it; then this one goes on from there.

        Raises `RivalError` if another call made the step that this one would make.
        """
        checkpoints = self.runtime.checkpoints(job.name)

        def look() -> tuple[Manifest, Manifest] | None:
            if (rival := checkpoints.find(newest.step + 1)) is None:
                return None
            if (step := checkpoints.calls().get(job.id)) is None:
                raise superseded(rival)
            return checkpoints.record(step), checkpoints.newest() or rival

        found = await until_answered(partial(asyncio.to_thread, look), report)
        if found is None:
            return None
        mine, there = found
        await self._serve(there, report)
        return mine

    async def _counted_after_all(
        self, name: ModelName, call_id: str, report: Report
    ) -> ConflictError:
        """Go on from a step of this server that it had given up, and what the next call is told."""
        newest = partial(asyncio.to_thread, self.runtime.checkpoints(name).newest)
        there = await until_answered(newest, report)
        assert there is not None
        await self._serve(there, report)
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
            checkpoints = self.runtime.checkpoints(name)
            try:
                manifest = await self.runtime.in_training_thread(checkpoints.newest)
                if manifest is None:
                    continue
                await self.runtime.open_base(manifest.base_model)
                await self._serve(manifest, log_progress)
            except OF_ANY_MODEL:
                raise
            except (StoreError, CanaryError, ConflictError, NotFoundError) as error:
                self.runtime.models.leave_out(name, error)
            else:
                if name in repeated:
                    self.runtime.models.repeat(name)

    async def _serve(self, manifest: Manifest, report: Report) -> None:
        checkpoints = self.runtime.checkpoints(manifest.name)
        calls = partial(asyncio.to_thread, checkpoints.calls)
        self._calls[manifest.name] = await until_answered(calls, report)
        await until_answered(partial(self.runtime.load, manifest), report)
        self.runtime.models.set_newest(manifest)

    def _make_step_0(self, name: ModelName, request: RegisterRequest) -> Manifest:
        self.runtime.trainer.create(str(name), request.lora)
        self._resident[name] = (0, INIT)
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

    def _is_resident(self, newest: Manifest) -> bool:
        there = self._resident.get(newest.name) == (newest.step, newest.call_id)
        return there and str(newest.name) in self.runtime.trainer

    def _make_resident(self, newest: Manifest) -> None:
        if not self._is_resident(newest):
            self.runtime.trainer.load_state(str(newest.name), self.runtime.fetch(newest))


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
