"""The journal and the queue: a call is on disk before it is answered, and is done once.

Jobs run one after another. A job that was running when the server died runs again from the newest
step in the store; the programs (`programs.py`) make that repeatable.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from art_cloud.errors import (
    ArtCloudError,
    ConflictError,
    NotFoundError,
    ServerStoppingError,
    StoreFullError,
)
from art_cloud.names import ModelName
from art_cloud.protocol import ErrorBody, JobEvent, JobInfo, JobKind, StepResult

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    project TEXT NOT NULL,
    model TEXT NOT NULL,
    digest TEXT NOT NULL,
    body BLOB,
    state TEXT NOT NULL,
    result TEXT,
    error TEXT
);
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL,
    number INTEGER NOT NULL,
    type TEXT NOT NULL,
    time TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, number)
);
"""


class Journal:
    """SQLite, synced at every commit. Safe to use from several threads of one process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {SCHEMA}")

    def close(self) -> None:
        self._db.close()

    def submit(self, job: str, kind: JobKind, name: ModelName, body: bytes) -> tuple[JobInfo, bool]:
        """Write a call down. Returns the job and whether it is new: a repeat finds the first one.

        Raises `ConflictError` when the id was used for something else.
        """
        digest = hashlib.sha256(f"{kind} {name} ".encode() + body).hexdigest()
        with self._transaction():
            row = self._db.execute("SELECT digest FROM jobs WHERE id = ?", (job,)).fetchone()
            if row is None:
                self._db.execute(
                    "INSERT INTO jobs (id, kind, project, model, digest, body, state)"
                    " VALUES (?, ?, ?, ?, ?, ?, 'queued')",
                    (job, kind, name.project, name.model, digest, body),
                )
                self._insert_event(job, "queued", {})
            elif row[0] != digest:
                raise ConflictError(
                    f"Call {job} was made before with another content. Nothing was done. "
                    "Use a new call id for a new call."
                )
        return self.get(job), row is None

    def get(self, job: str) -> JobInfo:
        with self._lock:
            row = self._db.execute(
                "SELECT kind, project, model, state, result, error FROM jobs WHERE id = ?", (job,)
            ).fetchone()
        if row is None:
            raise NotFoundError(f"There is no job {job} on this server. Send the call again.")
        kind, project, model, state, result, error = row
        return JobInfo(
            id=job,
            kind=kind,
            project=project,
            model=model,
            state=state,
            result=StepResult.model_validate_json(result) if result else None,
            error=ErrorBody.model_validate_json(error) if error else None,
        )

    def body(self, job: str) -> bytes:
        with self._lock:
            row = self._db.execute("SELECT body FROM jobs WHERE id = ?", (job,)).fetchone()
        return bytes(row[0])

    def unfinished(self) -> list[str]:
        """Ids of the jobs to run, in the order in which they came."""
        with self._lock:
            rows = self._db.execute(
                "SELECT id FROM jobs WHERE state IN ('queued', 'running') ORDER BY number"
            ).fetchall()
        return [row[0] for row in rows]

    def models(self) -> list[ModelName]:
        """The models that this server has worked for."""
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT project, model FROM jobs").fetchall()
        return [ModelName(project, model) for project, model in rows]

    def start(self, job: str) -> None:
        with self._transaction():
            self._db.execute("UPDATE jobs SET state = 'running' WHERE id = ?", (job,))
            self._insert_event(job, "started", {})

    def end(self, job: str, outcome: StepResult | ErrorBody) -> None:
        """Settle a job. Its body is not needed any more."""
        done = isinstance(outcome, StepResult)
        state, column = ("done", "result") if done else ("failed", "error")
        with self._transaction():
            self._db.execute(
                f"UPDATE jobs SET state = ?, {column} = ?, body = NULL WHERE id = ?",  # noqa: S608
                (state, outcome.model_dump_json(), job),
            )
            self._insert_event(job, state, outcome.model_dump())

    def add_event(self, job: str, type_: str, data: dict[str, Any]) -> None:
        with self._transaction():
            self._insert_event(job, type_, data)

    def _insert_event(self, job: str, type_: str, data: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT INTO events SELECT ?, coalesce(max(number), 0) + 1, ?, ?, ?"
            " FROM events WHERE job = ?",
            (job, type_, datetime.now(UTC).isoformat(), json.dumps(data), job),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it durable, or nothing."""
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    self._db.rollback()
                    raise
        except sqlite3.OperationalError as error:
            raise StoreFullError(
                f"The journal could not be written ({error}); nothing was done. Free some space "
                "on the server's disk and repeat the call."
            ) from error

    def events(self, job: str, after: int) -> list[JobEvent]:
        with self._lock:
            rows = self._db.execute(
                "SELECT number, type, time, data FROM events"
                " WHERE job = ? AND number > ? ORDER BY number",
                (job, after),
            ).fetchall()
        return [
            JobEvent(number=number, type=type_, time=time, data=json.loads(data))
            for number, type_, time, data in rows
        ]


Report = Callable[[dict[str, Any]], None]
"""Publishes progress; callable from any thread. Raises `ServerStoppingError` when time is up."""
Program = Callable[[JobInfo, bytes, Report], Awaitable[StepResult]]


class Jobs:
    """Runs the journal's jobs, one at a time, and tells whoever asks how far they are."""

    def __init__(self, journal: Journal, programs: dict[JobKind, Program]) -> None:
        self.journal = journal
        self.current: JobInfo | None = None
        self._programs = programs
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._news = asyncio.Condition()
        self._stopping = False
        self._abandon = False
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for job in self.journal.unfinished():
            self._queue.put_nowait(job)
        self._worker = asyncio.create_task(self._work())

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    async def submit(self, job: str, kind: JobKind, name: ModelName, body: bytes) -> JobInfo:
        if self._stopping:
            raise ServerStoppingError(
                "The server is stopping and takes no new work. Nothing was done; repeat the call "
                "when it is back."
            )
        info, new = await asyncio.to_thread(self.journal.submit, job, kind, name, body)
        if new:
            self._queue.put_nowait(job)
        return info

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """The job's events after number `after`, to its end; ends early when the server stops."""
        self.journal.get(job)
        while True:
            async with self._news:
                while not (events := self.journal.events(job, after)):
                    if self._stopping and self.current is None:
                        return
                    await self._news.wait()
            for event in events:
                yield event
                after = event.number
                if event.type in ("done", "failed"):
                    return

    async def stop(self, grace: float) -> None:
        """Let the running job finish for `grace` seconds, else leave it to the next server."""
        self._stopping = True
        if self._worker is None:
            return
        self._queue.put_nowait("")
        done, _ = await asyncio.wait([self._worker], timeout=grace)
        if not done:
            self._abandon = True
            await asyncio.wait([self._worker])
        await self._wake()

    async def _work(self) -> None:
        while not self._stopping:
            job = await self._queue.get()
            if job and not self._stopping:
                self.current = self.journal.get(job)
                try:
                    await self._run(self.current)
                finally:
                    self.current = None
        await self._wake()

    async def _run(self, info: JobInfo) -> None:
        job = info.id

        def report(data: dict[str, Any]) -> None:
            if self._abandon:
                raise ServerStoppingError(f"Job {job} was left for the next start of the server.")
            asyncio.run_coroutine_threadsafe(self._progress(job, data), self._loop)

        self.journal.start(job)
        await self._wake()
        failure: ErrorBody | None
        try:
            result = await self._programs[info.kind](info, self.journal.body(job), report)
        except ServerStoppingError:
            log.info("job %s (%s of %s/%s) abandoned", job, info.kind, info.project, info.model)
            return
        except ArtCloudError as error:
            failure = ErrorBody(message=str(error), type="job_error", code=error.code)
        except Exception as error:
            log.exception("job %s (%s of %s/%s)", job, info.kind, info.project, info.model)
            failure = ErrorBody(
                message=f"The {info.kind} job of {info.project}/{info.model} failed inside the "
                f"server ({type(error).__name__}: {error}). No step was made. See the server's "
                "log (`art-cloud logs`).",
                type="server_error",
                code="job_failed",
            )
        else:
            failure = None
        self.journal.end(job, failure or result)
        await self._wake()

    async def _progress(self, job: str, data: dict[str, Any]) -> None:
        self.journal.add_event(job, "progress", data)
        await self._wake()

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()
