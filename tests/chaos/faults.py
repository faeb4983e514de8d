"""`kill -9` of a server at a named point of a train job, from within: it does it to itself.

`kill_at` is called in the server's process before the server is imported there, and wraps the
functions at which the points lie. The product has no hooks for this.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

POINTS = (
    "before the journal",
    "after the journal",
    "in backward",
    "after the optimizer step",
    "during the blobs",
    "after the blobs",
    "after the manifest",
    "before the answer",
)
"""Of any train job."""
AT_THE_STORE = POINTS[4:]
DONE_BEFORE_BLOBS = "done, before the blobs"
"""Only where a job need not wait for the store."""


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def never_fail_a_killer() -> None:
    """A call may end the server as often as it likes: here it is not the call that does it."""
    from art_server.steps import journal

    journal.MOST_KILLED = 10**9


def kill_at(point: str) -> None:
    never_fail_a_killer()
    from art_server.steps.journal import Journal
    from art_server.training import Trainer

    from art_cloud.shared.protocol import StepResult
    from art_cloud.store.checkpoints import Checkpoints, Manifest
    from art_cloud.store.files import FileStore
    from art_cloud.store.s3 import S3Store

    trained = threading.Event()
    settled = threading.Event()
    blobs: list[object] = []

    def before(kind: type, name: str, act: Callable[..., None]) -> None:
        function = getattr(kind, name)

        @wraps(function)
        def wrapped(self: object, *args: Any, **kwargs: Any) -> Any:
            act(*args, **kwargs)
            return function(self, *args, **kwargs)

        setattr(kind, name, wrapped)

    def after(kind: type, name: str, act: Callable[..., None]) -> None:
        function = getattr(kind, name)

        @wraps(function)
        def wrapped(self: object, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            act(*args, **kwargs)
            return result

        setattr(kind, name, wrapped)

    def if_train(job: str, kind: str, *_: object) -> None:
        if kind == "train":
            die()

    def if_trained(*_: object, **__: object) -> None:
        if trained.is_set():
            die()

    def if_second_blob(*_: object, **__: object) -> None:
        if trained.is_set():
            blobs.append(None)
            if len(blobs) == 2:
                die()

    def if_step(manifest: Manifest, *_: object) -> None:
        if manifest.kind == "train":
            die()

    def if_settled(job: str, outcome: object) -> None:
        if isinstance(outcome, StepResult) and trained.is_set():
            settled.set()
            if point == "before the answer":
                die()

    def once_settled(*_: object, **__: object) -> None:
        if trained.is_set():
            settled.wait()
            die()

    after(Trainer, "forward_backward", lambda *_, **__: trained.set())
    after(Journal, "end", if_settled)
    if point == "before the journal":
        before(Journal, "submit", if_train)
    elif point == "after the journal":
        after(Journal, "submit", if_train)
    elif point == "in backward":
        _die_in_backward(Trainer)
    elif point == "after the optimizer step":
        after(Trainer, "optim_step", die)
    elif point == "during the blobs":
        for store in (FileStore, S3Store):
            after(store, "put_blob", if_second_blob)
    elif point == "after the blobs":
        after(Checkpoints, "upload", if_trained)
    elif point == "after the manifest":
        after(Checkpoints, "create", if_step)
    elif point == DONE_BEFORE_BLOBS:
        before(Checkpoints, "upload", once_settled)
    else:
        assert point == "before the answer", point


def _die_in_backward(trainer: type) -> None:
    """When the first of the batch's rows is through."""
    function = trainer.forward_backward  # type: ignore[attr-defined]

    def wrapped(self: object, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs | {"progress": die})

    trainer.forward_backward = wrapped  # type: ignore[attr-defined]


def stop_before_the_manifest(step: int) -> None:
    """Have the process stopped (SIGSTOP), once, right before it makes this step's manifest."""
    from art_cloud.store.files import FileStore

    create = FileStore.create
    stopped = threading.Event()

    def stop(self: FileStore, key: str, data: bytes) -> bool:
        if key.endswith(f"/steps/{step:06d}.json") and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGSTOP)
        return create(self, key, data)

    FileStore.create = stop  # type: ignore[method-assign]
