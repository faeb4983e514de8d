"""The history of one model in a store: numbered steps, each whole, each there once.

A step is a manifest that names its files by content. Its number can be taken once, for ever:
whoever comes second learns who was first, and either finds his own call (the step is counted
already) or a rival. What makes that hold, however long one of them was stopped in between:

- No key is ever deleted or written again. A step is removed by a key of its own under `removed/`.
- A model begins once: whoever registers, forks or pushes it creates `first.json`, which carries the
  whole first manifest. Who finds it without its step finishes it; who comes second goes on from it.
- The newest step is never removed. So `removed/` is listed before `steps/`: then the newest of what
  is listed is there, whatever is made and removed between the two listings.
- A model is deleted by its next step: one of kind "end", without files. A server that still trains
  the model finds the number taken, as by a rival, and stops. The name stays taken.
- A manifest's blobs are young when it is created: they were just uploaded, or are touched first.
  Afterwards they are looked at again. What garbage collection took away meanwhile is put there
  again by whoever has the files.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import Field, ValidationError, field_validator

from ..shared.config import Frozen, LoRAConfig, Retention
from ..shared.errors import ConflictError, NotFoundError, RivalError, StoreError, UnreadableError
from ..shared.names import ModelName
from ..shared.protocol import CheckpointInfo, Finite, Metrics
from .base import Blob, Store, missing_blob
from .transfer import Transfer, Watch

log = logging.getLogger(__name__)

Kind = Literal["init", "train", "sft", "fork", "push", "end"]
BEGINS = ("init", "fork", "push")
"""Kinds of a model's first step."""
STEP = re.compile(r"/(?:steps|removed)/(\d{6,})\.json$")
AT_ONCE = 8
"""Files that are read or written at once: in S3 each takes a round trip."""

FRESH = timedelta(hours=1)
"""Blobs that were uploaded since are young, and are not touched before their manifest is created.
Far below the grace of garbage collection."""

T = TypeVar("T")
R = TypeVar("R")
Kept = TypeVar("Kept", bound=Frozen)


class Parent(Frozen):
    project: str
    model: str
    step: int


class Writer(Frozen):
    """The server that made a step."""

    cluster: str
    host: str
    started_at: datetime

    def __str__(self) -> str:
        return f"{self.cluster} on {self.host}, started {self.started_at:%Y-%m-%d %H:%M:%S} UTC"


class Manifest(Frozen):
    """One step. `files` maps a path within the checkpoint to its content:

    adapter/adapter_model.safetensors, adapter/adapter_config.json    a plain PEFT folder
    optimizer.safetensors, trainer.json                               what training goes on from
    """

    format: Literal[1] = 1
    project: str
    model: str
    step: int
    kind: Kind
    call_id: str
    """Of the train call that made this step: the same call never makes another."""
    parent: Parent | None
    base_model: str
    lora: LoRAConfig
    files: dict[str, Blob] = {}
    metrics: Metrics = {}
    probe: Finite[int] = {}
    """Logprobs, by token, that an engine with these weights gives after the server's probe."""
    retention: Retention | None = None
    """Which steps of the model stay, by whoever registered it last."""
    versions: dict[str, str]
    """Of the packages that made it."""
    writer: Writer | None = None
    """None: it was not made by a server."""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @field_validator("files")
    @classmethod
    def _within_the_folder(cls, files: dict[str, Blob]) -> dict[str, Blob]:
        for path in map(PurePosixPath, files):
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{path} leads out of the checkpoint's folder")
        return files

    @property
    def name(self) -> ModelName:
        return ModelName(self.project, self.model)

    @property
    def policy(self) -> str:
        return str(self.name.at(self.step))


class LoggedMetrics(Frozen):
    """What somebody measured about a step after it was made."""

    split: str
    step: int
    metrics: Metrics
    logged_at: datetime


class Checkpoints:
    """The steps of `name` in `store`."""

    def __init__(self, store: Store, name: ModelName) -> None:
        self.store = store
        self.name = name
        self._entries: dict[str, LoggedMetrics] = {}
        """What was read of what was logged, by key."""

    def steps(self) -> list[int]:
        """The numbers of all steps, in order; empty for a model that was never registered."""
        removed = set(self._numbers("removed"))
        return [step for step in self._numbers("steps") if step not in removed]

    def read(self, step: int) -> Manifest:
        manifest = self.find(step)
        if manifest is None or self._is_removed(step):
            steps = self.steps()
            there = f"It has steps {ranges(steps)}." if steps else "It has no steps at all."
            raise NotFoundError(f"{self.name} has no step {step}. {there}")
        return manifest

    def record(self, step: int) -> Manifest:
        """The step's manifest, also of a step that was removed: then its files may be gone.

        Raises `NotFoundError` if there never was such a step.
        """
        return self.find(step) or self.read(step)

    def find(self, step: int) -> Manifest | None:
        """The step, removed or not, if there ever was one."""
        for folder in ("steps", "removed"):  # earlier versions left nothing else of a removed step
            with suppress(NotFoundError):
                return self._parse(self._key(step, folder))
        return None

    def records(self) -> list[Manifest]:
        """Of all steps that ever were, in order."""
        return [found for found in each(self.find, self._ever()) if found and found.kind != "end"]

    def manifests(self) -> list[Manifest]:
        """Of all steps that are there, in order; without those that are removed meanwhile."""

        def parse(step: int) -> Manifest | None:
            with suppress(NotFoundError):
                return self._parse(self._key(step))
            return None

        return [found for found in each(parse, self.steps()) if found and found.kind != "end"]

    def beginning(self) -> Manifest:
        """What a model begins with, or is about to begin with: its blobs are no garbage.

        Raises `NotFoundError` if there is no such model, or if an earlier version made it.
        """
        return self._parse(self._first)

    def newest(self) -> Manifest | None:
        """The newest step; None of a model that was never registered.

        Raises `ConflictError` if the model was deleted.
        """
        last = self._last()
        if last is not None and last.kind == "end":
            raise ConflictError(_deleted(last))
        return last

    def _last(self) -> Manifest | None:
        """The step with the highest number, be it the model's end."""
        steps = self._numbers("steps")  # the newest is never removed
        return self._parse(self._key(steps[-1])) if steps else None

    def calls(self) -> dict[str, int]:
        """Which call made which step, be it removed since."""
        return {manifest.call_id: manifest.step for manifest in self.records()}

    def commit(self, draft: Manifest, folder: Path) -> Manifest:
        """Make `folder` the content of the step that `draft` describes, durably.

        Blobs go first, the manifest last. Returns the manifest that stands; raises `RivalError` if
        another call took the step's number.
        """
        return self.create(draft.model_copy(update={"files": self.upload(folder)}), folder)

    def upload(self, folder: Path, watch: Watch | None = None) -> dict[str, Blob]:
        """The first half of `commit`: the blobs, by their paths in `folder`."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        transfer = Transfer(sum(path.stat().st_size for path in paths), watch)
        blobs = each(lambda path: self.store.put_blob(path, transfer.moved), paths)
        names = (path.relative_to(folder).as_posix() for path in paths)
        return dict(zip(names, blobs, strict=True))

    def fetch(
        self, manifest: Manifest, folder: Path, *, only: str = "", watch: Watch | None = None
    ) -> Path:
        """Write the step's files (those whose path starts with `only`) to a folder of its own.

        The folder appears when all of them are there and checked; one that is there is kept.
        """
        if folder.exists():
            return folder
        partial = folder.with_name(f"{folder.name}.{uuid4().hex}.partial")
        files = {path: blob for path, blob in manifest.files.items() if path.startswith(only)}
        transfer = Transfer(sum(blob.size for blob in files.values()), watch)

        def get(path: str) -> None:
            target = partial / path
            target.parent.mkdir(parents=True, exist_ok=True)
            self.store.get_blob(files[path], target, transfer.moved)

        try:
            partial.mkdir(parents=True)
            each(get, files)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # another thread fetched the same step meanwhile
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def delete(self, step: int) -> None:
        """Remove a step; its metrics and its call's id are kept. Its blobs go with the next `gc`.

        The newest stays: the next one builds on it.
        """
        steps = self._numbers("steps")
        left = self.read(step).model_copy(update={"files": {}})
        if not steps or step >= steps[-1]:  # it may have been made after the listing
            raise ConflictError(
                f"Step {step} is the newest of {self.name} and stays: the next one builds on it. "
                "Fork the step that you want to go on from, and go on with the fork."
            )
        self.store.create(self._key(step, "removed"), _json(left))

    def end(self) -> Manifest:
        """Delete the model for good: all steps, logged metrics and trajectories. Safe to repeat.

        Its name stays taken. Its blobs go with the next `gc`, but for those of forks. A server that
        still trains it makes no further step.

        Raises:
            NotFoundError: there is no such model.
        """
        last = self._last()
        if last is None:
            raise NotFoundError(f"{self.name} has no steps in {self.store.url}.")
        while last.kind != "end":
            end = Manifest(
                project=self.name.project,
                model=self.name.model,
                step=last.step + 1,
                kind="end",
                call_id=uuid4().hex,
                parent=Parent(project=last.project, model=last.model, step=last.step),
                base_model=last.base_model,
                lora=last.lora,
                versions={},
            )
            with suppress(RivalError):  # a server made this step meanwhile: the next one is the end
                self.create(end)
            last = self._last() or end
        for step in self.steps():
            if step < last.step:
                self.delete(step)
        for folder in ("metrics", "trajectories"):
            for key in self.store.list(f"{self.name}/{folder}/"):
                with suppress(NotFoundError):  # somebody else deletes too
                    self.store.delete(key)
        return last

    def fork(self, to: ModelName, step: int | None = None) -> Manifest:
        """Start `to` with the content of a step (the newest by default). No content is copied.

        Raises `ConflictError` if `to` exists, `NotFoundError` if the step or its content is gone.
        """
        source = self.newest() if step is None else self.read(step)
        if source is None:
            raise NotFoundError(f"{self.name} has no steps in {self.store.url}.")
        target = Checkpoints(self.store, to)
        if target.steps():
            raise ConflictError(f"{to} exists already. Fork to a name that is free.")
        mark = f"{self.name}/forks/{source.step:06d}-{uuid4().hex}.json"
        self.store.create(mark, json.dumps({"to": str(to)}).encode())
        first = source.model_copy(
            update={
                "project": to.project,
                "model": to.model,
                "kind": "fork",
                "call_id": uuid4().hex,
                "parent": Parent(
                    project=self.name.project, model=self.name.model, step=source.step
                ),
                "created_at": datetime.now(UTC),
            }
        )
        try:
            return target.create(first)
        except NotFoundError as error:
            raise NotFoundError(
                f"{source.policy} can't be forked, its content is gone: was the step removed "
                f"meanwhile? There is no {to}. Fork another step. {error}"
            ) from error

    def forked(self) -> set[int]:
        """The steps that a model was forked from."""
        keys = self.store.list(f"{self.name}/forks/")
        return {_step_of(key) for key in keys}

    def log(self, split: str, step: int, metrics: Metrics) -> None:
        """Keep what was measured about a step; `infos` shows it as `split/metric`.

        A model that is only prompted has no steps: what is logged of it is kept under step 0.
        """
        if self._numbers("steps"):
            self.read(step)
        entry = LoggedMetrics(split=split, step=step, metrics=metrics, logged_at=datetime.now(UTC))
        key = f"{self.name}/metrics/{step:06d}-{uuid4().hex}.json"
        self.store.create(key, entry.model_dump_json().encode())

    def infos(self, *, logged: bool = True) -> list[CheckpointInfo]:
        """All steps with their metrics, in order. What was logged last for a name counts.

        Args:
            logged: False: only with the metrics that they were made with.
        """
        later = self._logged() if logged else {}
        return [
            CheckpointInfo(
                project=self.name.project,
                model=self.name.model,
                step=manifest.step,
                kind=manifest.kind,
                created_at=manifest.created_at,
                bytes=sum(blob.size for blob in manifest.files.values()),
                call_id=manifest.call_id,
                metrics=manifest.metrics | later.get(manifest.step, {}),
            )
            for manifest in self.manifests()
        ]

    def with_logged(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """These steps, with what was logged for them."""
        later = self._logged({info.step for info in infos})
        return [
            info.model_copy(update={"metrics": info.metrics | later.get(info.step, {})})
            for info in infos
        ]

    def history(self) -> list[dict[str, Any]]:
        """A row for each step that ever was, removed ones too: `step`, `kind`, `created_at`, and
        its metrics under their own names, with the split before those that were logged."""
        logged = self._logged()
        return [
            {
                "step": record.step,
                "kind": record.kind,
                "created_at": record.created_at.isoformat(),
                **record.metrics,
                **logged.get(record.step, {}),
            }
            for record in self.records()
        ]

    def _logged(self, steps: Collection[int] | None = None) -> dict[int, Metrics]:
        """What was logged for each step (of these), as `split/metric`; of several values the last.

        What was read once is not read again.
        """

        def parse(key: str) -> LoggedMetrics:
            if key not in self._entries:
                self._entries[key] = self._read_as(LoggedMetrics, key)
            return self._entries[key]

        logged: dict[int, Metrics] = {}
        keys = self.store.list(f"{self.name}/metrics/")
        entries = each(parse, [key for key in keys if steps is None or _step_of(key) in steps])
        for entry in sorted(entries, key=lambda entry: entry.logged_at):
            found = logged.setdefault(entry.step, {})
            found |= {f"{entry.split}/{name}": value for name, value in entry.metrics.items()}
        return logged

    def _ever(self) -> list[int]:
        """The numbers of all steps that ever were."""
        return sorted({*self._numbers("steps"), *self._numbers("removed")})

    def _is_removed(self, step: int) -> bool:
        try:
            self.store.read(self._key(step, "removed"))
        except NotFoundError:
            return False
        return True

    def _numbers(self, folder: Literal["steps", "removed"]) -> list[int]:
        keys = self.store.list(f"{self.name}/{folder}/")
        return sorted(int(found[1]) for key in keys if (found := STEP.search(key)))

    def _parse(self, key: str) -> Manifest:
        return self._read_as(Manifest, key)

    def _read_as(self, kind: type[Kept], key: str) -> Kept:
        data = self.store.read(key)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise UnreadableError(
                f"{key} in {self.store.url} is not what this version of art-cloud writes there: it "
                f"is damaged, or a newer art-cloud wrote it ({error.error_count()} problems). Only "
                f"{self.name} is hurt. Restore the file from a copy, upgrade, or go on with a fork "
                "of a step that can be read: art-cloud checkpoints fork --step"
            ) from error

    def _key(self, step: int, folder: Literal["steps", "removed"] = "steps") -> str:
        return f"{self.name}/{folder}/{step:06d}.json"

    @property
    def _first(self) -> str:
        return f"{self.name}/first.json"

    def create(self, manifest: Manifest, folder: Path | None = None) -> Manifest:
        """The second half of `commit`: the manifest, whose files are in the store.

        Args:
            folder: what was uploaded after the manifest was drafted (`created_at`). What of it is
                no longer in the store is put there again.

        Raises:
            RivalError: another call took the step's number.
            ConflictError: it would be a model's first step, and another call has begun the model.
            NotFoundError: a file is in the store no more, and there is no `folder`.
        """
        if folder is None or datetime.now(UTC) - manifest.created_at > FRESH:
            self._secure(manifest, folder)
        if manifest.kind in BEGINS:
            return self._begin(manifest, folder)
        there = manifest
        if self._is_removed(manifest.step) or not self.store.create(
            self._key(manifest.step), _json(manifest)
        ):
            there = self.record(manifest.step)
        if there.call_id != manifest.call_id:
            raise superseded(there)
        if there.files == manifest.files:
            try:
                self._secure(there, folder)
            except (StoreError, NotFoundError) as error:  # the step counts all the same
                log.error("%s is in the store, but perhaps not whole: %s", there.policy, error)
        return there

    def _begin(self, manifest: Manifest, folder: Path | None) -> Manifest:
        """Make a model's first step, or finish what another call has begun.

        Garbage collection spares what `first.json` names: its blobs are looked at from then on.
        """
        if steps := self._ever():
            first = self.record(steps[0])
        else:
            self.store.create(self._first, _json(manifest))
            first = self._parse(self._first)
            try:
                self._secure(first, folder if first.files == manifest.files else None)
            except NotFoundError as error:
                raise ConflictError(
                    f"{self.name} can't begin: {first.call_id} ({first.kind}) took the name for "
                    f"content that was removed meanwhile. Choose another name. {error}"
                ) from error
            self.store.create(self._key(first.step), self.store.read(self._first))
        if not _same_beginning(first, manifest):
            raise ConflictError(
                f"{self.name} exists already: it began with step {first.step} ({first.kind}, "
                f"{first.created_at:%Y-%m-%d %H:%M:%S} UTC). Go on from there, or choose another "
                "name."
            )
        return first

    def _secure(self, manifest: Manifest, folder: Path | None = None) -> None:
        """See to it that all of the manifest's blobs are in the store, as young as new ones."""

        def secure(path: str) -> None:
            blob = manifest.files[path]
            if self.store.touch_blob(blob):
                return
            if folder is None or self.store.put_blob(folder / path) != blob:
                raise missing_blob(self.store.url, blob.sha256)

        each(secure, manifest.files)


def _same_beginning(first: Manifest, other: Manifest) -> bool:
    """Step 0 is the same whoever makes it, if it is of one base model and came out the same."""
    return (first.call_id, first.base_model, first.lora, first.files) == (
        *(other.call_id, other.base_model, other.lora, other.files),
    )


def _deleted(end: Manifest) -> str:
    return (
        f"{end.name} was deleted at {end.created_at:%Y-%m-%d %H:%M:%S} UTC, and its name stays "
        "taken. Choose another name."
    )


def superseded(there: Manifest) -> RivalError:
    """The error for a server that wanted to make the step `there` too."""
    if there.kind == "end":
        return RivalError(f"This step was not counted: {_deleted(there)}")
    error = RivalError(
        f"Step {there.step} of {there.name} was made by another call ({there.call_id}, "
        f"{there.created_at:%Y-%m-%d %H:%M:%S} UTC) on another server"
        + (f" ({there.writer})" if there.writer else "")
        + f": two servers train {there.name}. This step was not counted, and this server does no "
        "more for the model until it is registered here again. Stop one of the two, or train a "
        "fork."
    )
    error.call_id = there.call_id
    return error


def best(infos: Sequence[CheckpointInfo], metric: str) -> CheckpointInfo:
    """The step with the highest `metric`; of equals, the later one. Raises `NotFoundError`."""
    having = [info for info in infos if metric in info.metrics]
    if not having:
        known = sorted({name for info in infos for name in info.metrics})
        raise NotFoundError(
            f"No step has the metric {metric!r}. "
            + (f"There are: {', '.join(known)}." if known else "No metrics were logged.")
        )
    return max(having, key=lambda info: (info.metrics[metric], info.step))


def each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What `work` makes of each item, in order, several at once; the first error ends it."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, items))


def _step_of(key: str) -> int:
    """Of a key whose last part begins with the step."""
    return int(key.rpartition("/")[2].partition("-")[0])


def _json(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=1).encode()


def ranges(steps: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
