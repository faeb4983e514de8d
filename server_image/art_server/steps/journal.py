"""The journal: every call and what became of it, on disk before anybody is answered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic_core import to_json

from art_cloud.shared.errors import (
    ConfigError,
    ConflictError,
    JobError,
    NotFoundError,
    StoreFullError,
)
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import ErrorBody, JobEvent, JobInfo, JobKind, StepResult

log = logging.getLogger(__name__)


Body = bytes | bytearray
PRAGMAS = "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    project TEXT NOT NULL,
    model TEXT NOT NULL,
    digest TEXT NOT NULL,
    body TEXT,
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
LEFT = "left"
"""Marks the event by which a server in good order left a job to the next one."""
KILLED = "killed"
"""Marks the event by which a server notes that the one before it ended during a job."""
TRAINED = "trained"
"""Marks the event after which a job is through with training: what ends the server from then on is
not the call."""


class Totals(NamedTuple):
    steps: int
    tokens: int
    """That were trained on."""


class Journal:
    """SQLite, synced at every commit. Safe to use from several threads of one process; another
    process can't open it meanwhile: a journal belongs to one server (`ConfigError`).

    A call's body is a file in the folder `bodies` beside it, whose name stands in the column `body`
    until the job is settled: however large it is, nobody waits for it to be written or read.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        self._bodies = path.with_name("bodies")
        try:
            self._db = sqlite3.connect(path, timeout=2, check_same_thread=False)
            self._db.isolation_level = None
            self._db.executescript(f"{PRAGMAS} {SCHEMA}")
            self._bodies.mkdir(mode=0o700, exist_ok=True)
            self._move_bodies_out()
            rows = self._db.execute(
                "SELECT id, state, body FROM jobs WHERE body IS NOT NULL ORDER BY number"
            ).fetchall()
            self._totals = self._count()
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"The journal {path} can't be opened: {error}. If another server uses this folder, "
                "end it, or give this one a --state of its own."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"The folder {self._bodies} can't be used: {error.strerror}. Free some space, or "
                "give another --state."
            ) from error

        self._repeated = {job for job, state, _ in rows if state == "done"}
        self._unfinished = {job: None for job, _, _ in rows}  # in the order in which they came
        named = {body for _, _, body in rows}
        for file in self._bodies.iterdir():
            if file.name not in named:  # the server was killed in between
                file.unlink()
        try:
            self._note_the_end_of_the_last_server()
        except StoreFullError as error:
            log.error("%s", error)

    def close(self) -> None:
        self._db.close()

    def submit(self, job: str, kind: JobKind, name: ModelName, body: Body) -> JobInfo:
        """Write a call down and return its job: a repeat finds that of the first one.

        Raises `ConflictError` when the id was used for something else.
        """
        hashed = hashlib.sha256(f"{kind} {name} ".encode())
        hashed.update(body)
        digest = hashed.hexdigest()
        if not self.knows(job):
            file = self._write(body)
            try:
                with self._transaction():
                    self._db.execute(
                        "INSERT INTO jobs (id, kind, project, model, digest, body, state)"
                        " VALUES (?, ?, ?, ?, ?, ?, 'queued')",
                        (job, kind, name.project, name.model, digest, file.name),
                    )
                    self._insert_event(job, "queued", {})
                    self._unfinished[job] = None
            except sqlite3.IntegrityError:  # another thread was faster
                file.unlink()
            except BaseException:
                self._unfinished.pop(job, None)
                file.unlink()
                raise
        with self._lock:
            [there] = self._db.execute("SELECT digest FROM jobs WHERE id = ?", (job,)).fetchone()
        if there != digest:
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
            [file] = self._db.execute("SELECT body FROM jobs WHERE id = ?", (job,)).fetchone()
        return (self._bodies / file).read_bytes()

    def unfinished(self) -> list[str]:
        """Ids of the jobs to run, in the order in which they came: those that are not settled, and
        those that a server before this one did without making their step durable."""
        return list(self._unfinished)

    def repeated(self) -> set[ModelName]:
        """The models of which a step is made again."""
        return {self.get(job).name for job in self._repeated}

    def models(self) -> list[ModelName]:
        """The models that this server works for, in the order in which they came."""
        with self._lock:
            rows = self._db.execute(
                "SELECT project, model FROM jobs WHERE state != 'failed'"
                " GROUP BY project, model ORDER BY min(number)"
            ).fetchall()
        return [ModelName(project, model) for project, model in rows]

    def totals(self) -> Totals:
        """What all jobs made, those before a restart included."""
        return self._totals

    def _count(self) -> Totals:
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
        with self._settling(job, kept=kept):
            kind, before = self._db.execute(
                "SELECT kind, result FROM jobs WHERE id = ?", (job,)
            ).fetchone()
            self._db.execute(
                f"UPDATE jobs SET state = ?, {column} = ? WHERE id = ?",  # noqa: S608
                (state, outcome.model_dump_json(), job),
            )
            self._insert_event(job, state, outcome.model_dump())
        if isinstance(outcome, StepResult) and before is None and kind != "register":
            steps, tokens = self._totals
            self._totals = Totals(steps + 1, tokens + int(outcome.metrics.get("tokens", 0)))
        self._repeated.discard(job)
        self._unfinished.pop(job, None)

    def leave(self, job: str) -> None:
        """Note that the server ends in good order before the job does: its next start runs it."""
        self.add_event(job, "progress", {"phase": "left for the next start of the server", LEFT: 1})

    def _note_the_end_of_the_last_server(self) -> None:
        """Warn of the job that ran when it was killed, and fail the one that does that each time.

        What has been started since it was settled, left, trained or warned of has run then.
        """
        for job in self.unfinished():
            with self._lock:
                started, told, killed = self._db.execute(
                    "SELECT coalesce(max(iif(type = 'started', number, 0)), 0),"
                    " coalesce(max(iif(type IN ('done', 'failed') OR coalesce("
                    " json_extract(data, ?), json_extract(data, ?), json_extract(data, ?)),"
                    " number, 0)), 0), total(json_extract(data, ?))"
                    " FROM events WHERE job = ?",
                    (f"$.{LEFT}", f"$.{KILLED}", f"$.{TRAINED}", f"$.{KILLED}", job),
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
            self._unfinished.pop(job, None)
        else:
            self.end(job, body)

    def make_durable(self, job: str) -> None:
        """Note that the step of a job that is done is in the store now."""
        result = self.get(job).result
        if result is None:  # the end of the job could not be written yet: it will say so itself
            return
        whole = result.model_copy(update={"durable": True})
        with self._settling(job):
            self._db.execute(
                "UPDATE jobs SET result = ?, error = NULL WHERE id = ?",
                (whole.model_dump_json(), job),
            )

    def note_not_durable(self, job: str, error: ErrorBody, *, lost: bool) -> None:
        """Note why the step of a job that is done could not be stored; `lost`: it never will be."""
        with self._settling(job, kept=not lost):
            self._db.execute(
                "UPDATE jobs SET error = ? WHERE id = ?", (error.model_dump_json(), job)
            )

    def add_event(self, job: str, type_: str, data: dict[str, Any]) -> None:
        with self._transaction():
            self._insert_event(job, type_, data)

    def _insert_event(self, job: str, type_: str, data: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT INTO events SELECT ?, coalesce(max(number), 0) + 1, ?, ?, ?"
            " FROM events WHERE job = ?",
            (job, type_, datetime.now(UTC).isoformat(), _json(data), job),
        )

    def _move_bodies_out(self) -> None:
        """Of a journal that an older version wrote: there they stood in the table itself."""
        query = "SELECT id FROM jobs WHERE typeof(body) = 'blob'"
        for [job] in self._db.execute(query).fetchall():
            [body] = self._db.execute("SELECT body FROM jobs WHERE id = ?", (job,)).fetchone()
            name = self._write(body).name
            self._db.execute("UPDATE jobs SET body = ? WHERE id = ?", (name, job))

    def _write(self, body: Body) -> Path:
        """A new file with it, synced. Raises `StoreFullError`."""
        file = self._bodies / uuid4().hex
        try:
            with file.open("xb") as opened:
                opened.write(body)
                opened.flush()
                os.fsync(opened.fileno())
            folder = os.open(self._bodies, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            file.unlink(missing_ok=True)
            raise _not_written(error) from error
        return file

    @contextmanager
    def _settling(self, job: str, *, kept: bool = False) -> Iterator[None]:
        """A transaction after which the job's body is gone, unless it is `kept`."""
        with self._transaction():
            [file] = self._db.execute("SELECT body FROM jobs WHERE id = ?", (job,)).fetchone()
            yield
            if not kept:
                self._db.execute("UPDATE jobs SET body = NULL WHERE id = ?", (job,))
        if file is not None and not kept:
            (self._bodies / file).unlink(missing_ok=True)

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
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise _not_written(error) from error

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


def _json(data: dict[str, Any]) -> str:
    """As JSON has it: what is no finite number becomes null."""
    return to_json(data, inf_nan_mode="null").decode()


def _not_written(error: Exception) -> StoreFullError:
    return StoreFullError(
        f"The journal could not be written ({error}); nothing was done. Free some space on the "
        "server's disk and repeat the call."
    )
