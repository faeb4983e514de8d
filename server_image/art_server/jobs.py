"""The journal and the queue: a call is on disk before it is answered, and is done once.

Jobs run one after another, in the journal's order. A job that was running when the server died runs
again from the newest step in the store; the programs (`programs.py`) make that repeatable. So does
one that was done while its step was still on the way to the store: its body is kept until then.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from art_cloud.errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    JobError,
    NotFoundError,
    RivalError,
    ServerStoppingError,
    StoreFullError,
)
from art_cloud.names import ModelName
from art_cloud.protocol import ErrorBody, JobEvent, JobInfo, JobKind, StepResult

log = logging.getLogger(__name__)

PRAGMAS = "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
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
MOST_KILLED = 3
"""How often the server may be killed in the middle of a job."""
LEFT, KILLED = "left", "killed"
"""Marks in the events of a job that a server did not settle: it left it, or was killed."""


class Totals(NamedTuple):
    steps: int
    tokens: int
    """That were trained on."""


class Journal:
    """SQLite, synced at every commit. Safe to use from several threads of one process; another
    process can't open it meanwhile: a journal belongs to one server (`ConfigError`)."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        try:
            self._db = sqlite3.connect(path, timeout=2, check_same_thread=False)
            self._db.isolation_level = None
            self._db.executescript(f"{PRAGMAS} {SCHEMA}")
            rows = self._db.execute(
                "SELECT id FROM jobs WHERE state = 'done' AND body IS NOT NULL"
            ).fetchall()
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"The journal {path} can't be opened: {error}. If another server uses this folder, "
                "end it, or give this one a --state of its own."
            ) from error

        self._repeated = {row[0] for row in rows}
        try:
            self._note_the_end_of_the_last_server()
        except StoreFullError as error:
            log.error("%s", error)

    def close(self) -> None:
        self._db.close()

    def submit(self, job: str, kind: JobKind, name: ModelName, body: bytes) -> JobInfo:
        """Write a call down and return its job: a repeat finds that of the first one.

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
        return self.get(job)

    def knows(self, job: str) -> bool:
        with self._lock:
            found = self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job,)).fetchone()
        return found is not None

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
        """Ids of the jobs to run, in the order in which they came: those that are not settled, and
        those that a server before this one did without making their step durable."""
        with self._lock:
            rows = self._db.execute(
                "SELECT id, state FROM jobs"
                " WHERE state IN ('queued', 'running') OR state = 'done' AND body IS NOT NULL"
                " ORDER BY number"
            ).fetchall()
            return [job for job, state in rows if state != "done" or job in self._repeated]

    def repeated(self) -> set[ModelName]:
        """The models of which a step is made again."""
        return {self.get(job).name for job in self._repeated}

    def models(self) -> list[ModelName]:
        """The models that this server has worked for."""
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT project, model FROM jobs").fetchall()
        return [ModelName(project, model) for project, model in rows]

    def totals(self) -> Totals:
        """What all jobs made, those before a restart included."""
        with self._lock:
            steps, tokens = self._db.execute(
                "SELECT count(*), coalesce(sum(json_extract(result, '$.metrics.tokens')), 0)"
                " FROM jobs WHERE kind IN ('train', 'sft') AND result IS NOT NULL"
            ).fetchone()
        return Totals(steps, int(tokens))

    def start(self, job: str) -> None:
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET state = 'running' WHERE id = ? AND state != 'done'", (job,)
            )
            self._insert_event(job, "started", {})

    def end(self, job: str, outcome: StepResult | ErrorBody) -> None:
        """Settle a job. Its body is not needed any more, unless its step is not durable yet."""
        done = isinstance(outcome, StepResult)
        state, column = ("done", "result") if done else ("failed", "error")
        kept = isinstance(outcome, StepResult) and not outcome.durable
        with self._transaction():
            self._db.execute(
                f"UPDATE jobs SET state = ?, {column} = ?, body = iif(?, body, NULL)"  # noqa: S608
                " WHERE id = ?",
                (state, outcome.model_dump_json(), kept, job),
            )
            self._insert_event(job, state, outcome.model_dump())
        self._repeated.discard(job)

    def leave(self, job: str) -> None:
        """Note that the server ends in good order before the job does: its next start runs it."""
        self.add_event(job, "progress", {"phase": "left for the next start of the server", LEFT: 1})

    def _note_the_end_of_the_last_server(self) -> None:
        """Warn of the job that ran when it was killed, and fail the one that does that each time.

        What has been started since it was settled, left or warned of has run then.
        """
        for job in self.unfinished():
            with self._lock:
                started, told, killed = self._db.execute(
                    "SELECT max(iif(type = 'started', number, 0)),"
                    " max(iif(type IN ('done', 'failed') OR coalesce(json_extract(data, ?),"
                    " json_extract(data, ?)), number, 0)),"
                    " total(json_extract(data, ?))"
                    " FROM events WHERE job = ?",
                    (f"$.{LEFT}", f"$.{KILLED}", f"$.{KILLED}", job),
                ).fetchone()
            if started <= told:
                continue
            times = f"{killed + 1:.0f} of {MOST_KILLED} times"
            log.warning("the server before this one ended while it ran job %s (%s)", job, times)
            warning = f"The server was killed, or ended itself, during this call ({times})."
            self.add_event(job, "warning", {"warning": warning, KILLED: 1})
            if killed + 1 >= MOST_KILLED:
                self._fail_killer(job)

    def _fail_killer(self, job: str) -> None:
        error = JobError(
            f"This call has ended the server {MOST_KILLED} times: it was killed, or had to be, each"
            " time while the call ran, most likely for lack of memory. It is not tried again. Send "
            "a smaller batch, or take a larger machine. What the server wrote: `art-cloud logs`."
        )
        body = ErrorBody(message=str(error), type="job_error", code=error.code)
        if job in self._repeated:
            self.note_not_durable(job, body, lost=True)
            self._repeated.discard(job)
        else:
            self.end(job, body)

    def make_durable(self, job: str) -> None:
        """Note that the step of a job that is done is in the store now."""
        result = self.get(job).result
        assert result is not None
        whole = result.model_copy(update={"durable": True})
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET result = ?, error = NULL, body = NULL WHERE id = ?",
                (whole.model_dump_json(), job),
            )

    def note_not_durable(self, job: str, error: ErrorBody, *, lost: bool) -> None:
        """Note why the step of a job that is done could not be stored; `lost`: it never will be."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET error = ?, body = iif(?, NULL, body) WHERE id = ?",
                (error.model_dump_json(), lost, job),
            )

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
        except sqlite3.DatabaseError as error:
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


RETRY_SECONDS = 5.0
"""After which a job is run again whose end could not be written down."""

Report = Callable[[dict[str, Any]], None]
"""Publishes progress; callable from any thread. Raises `ServerStoppingError` when time is up."""
Program = Callable[[JobInfo, bytes, Report], Awaitable[StepResult]]


class Jobs:
    """Runs the journal's jobs, one at a time, and tells whoever asks how far they are."""

    def __init__(self, journal: Journal, programs: dict[JobKind, Program]) -> None:
        self.journal = journal
        self.current: JobInfo | None = None
        self.moved = 0
        """Goes up whenever the running job says how far it is."""
        self._programs = programs
        self._call_came = asyncio.Event()
        self._news = asyncio.Condition()
        self._stopping = False
        self._abandon = False
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = asyncio.create_task(self._work())

    @property
    def queued(self) -> int:
        current = self.current.id if self.current else None
        return sum(job != current for job in self.journal.unfinished())

    async def submit(self, job: str, kind: JobKind, name: ModelName, body: bytes) -> JobInfo:
        if self._stopping:
            raise ServerStoppingError(
                "The server is stopping and takes no new work. Nothing was done; repeat the call "
                "when it is back."
            )
        info = await asyncio.to_thread(self.journal.submit, job, kind, name, body)
        self._call_came.set()
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

    def warn(self, message: str) -> None:
        """Tell whoever follows the running job; nobody else would hear it."""
        if self.current is None:
            return
        try:
            self.journal.add_event(self.current.id, "warning", {"warning": message})
        except StoreFullError as error:
            log.error("nobody could be told: %s", error)
        asyncio.run_coroutine_threadsafe(self._wake(), self._loop)

    async def note_stored(self, job: str, error: ArtCloudError | None) -> None:
        """Note that a job's step is in the store or why it is not, once the job is settled."""
        async with self._news:
            await self._news.wait_for(lambda: self.current is None or self.current.id != job)
        if error is None:
            await asyncio.to_thread(self.journal.make_durable, job)
        else:
            lost = isinstance(error, RivalError)
            body = ErrorBody(message=str(error), type="job_error", code=error.code)
            await asyncio.to_thread(self.journal.note_not_durable, job, body, lost=lost)

    async def stop(self, grace: float) -> None:
        """Let the running job finish for `grace` seconds, else leave it to the next server."""
        self._stopping = True
        if self._worker is None:
            return
        self._call_came.set()
        done, _ = await asyncio.wait([self._worker], timeout=grace)
        if not done:
            self._abandon = True
            if self.current is not None:
                with suppress(StoreFullError):
                    self.journal.leave(self.current.id)
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        while not self._stopping:
            self._call_came.clear()
            job = next(iter(self.journal.unfinished()), None)
            if job is None or not await self._settle(self.journal.get(job)):
                await self._call_came.wait()
        await self._wake()

    async def _settle(self, info: JobInfo) -> bool:
        """Run a job to its end and write that down. False: it has to be run again later."""
        self.current = info
        try:
            self.journal.start(info.id)
            await self._wake()
            outcome = await self._run(info)
            if outcome is not None:
                self.journal.end(info.id, outcome)
            return outcome is not None
        except StoreFullError as error:
            log.error("job %s runs again in %.0f s: %s", info.id, RETRY_SECONDS, error)
            self._loop.call_later(RETRY_SECONDS, self._call_came.set)
            return False
        finally:
            self.current = None
            await self._wake()

    async def _run(self, info: JobInfo) -> StepResult | ErrorBody | None:
        """What came of a job; None if it was abandoned."""

        def report(data: dict[str, Any]) -> None:
            if self._abandon:
                raise ServerStoppingError(
                    f"Job {info.id} was left for the next start of the server."
                )
            self.moved += 1
            self.journal.add_event(info.id, "progress", data)
            asyncio.run_coroutine_threadsafe(self._wake(), self._loop)

        what = f"{info.kind} of {info.project}/{info.model}"
        try:
            body = await asyncio.to_thread(self.journal.body, info.id)
            return await self._programs[info.kind](info, body, report)
        except ServerStoppingError:
            log.info("job %s (%s) is left for the next start", info.id, what)
            return None
        except ArtCloudError as error:
            return ErrorBody(message=str(error), type="job_error", code=error.code)
        except Exception as error:
            log.exception("job %s (%s)", info.id, what)
            return ErrorBody(
                message=f"The {what} failed inside the server ({type(error).__name__}: {error}). "
                "No step was made. See the server's log (`art-cloud logs`).",
                type="server_error",
                code="job_failed",
            )

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()
