"""The journal on a real disk, and the queue over programs that fail, hang and report."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from art_server.steps import jobs as jobs_module
from art_server.steps.jobs import Jobs, Report
from art_server.steps.journal import SCHEMA, TRAINED, Journal

from art_cloud.shared.errors import (
    ConfigError,
    ConflictError,
    JobError,
    NotFoundError,
    ServerStoppingError,
    StoreFullError,
)
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import ErrorBody, JobEvent, JobInfo, StepResult

NAME = ModelName("p", "m")
DONE = StepResult(step=1, policy="p/m@1", metrics={"loss": 0.5})


class Program:
    """Counts its runs; `behave` says what each does."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.bodies: list[bytes] = []
        self.behave: Any = None
        self.result = DONE

    async def __call__(self, job: JobInfo, body: bytes, report: Report) -> StepResult:
        self.ran.append(job.id)
        self.bodies.append(body)
        if self.behave is not None:
            await self.behave(job, report)
        return self.result


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    journal = Journal(path)
    yield journal
    journal.close()


@pytest.fixture
async def jobs(journal: Journal, program: Program) -> AsyncIterator[Jobs]:
    jobs = Jobs(journal)
    jobs.start(program)
    yield jobs
    await jobs.stop(0.0)


async def submit(jobs: Jobs, body: bytes = b"body", job: str | None = None) -> str:
    info = await jobs.submit(job or uuid4().hex, "train", NAME, body)
    return info.id


async def followed(jobs: Jobs, job: str, after: int = 0) -> list[JobEvent]:
    async with asyncio.timeout(30):
        return [event async for event in jobs.follow(job, after)]


async def until_running(program: Program, count: int = 1) -> None:
    async with asyncio.timeout(30):
        while len(program.ran) < count:
            await asyncio.sleep(0.001)


async def test_a_call_is_written_down_before_it_is_answered(journal: Journal, path: Path) -> None:
    job = uuid4().hex
    info = journal.submit(job, "train", NAME, b"body")
    assert (info.state, info.kind, info.project, info.model) == ("queued", "train", "p", "m")
    journal.close()  # as a killed process would, with nothing else written
    again = Journal(path)
    assert again.unfinished() == [job]
    assert again.body(job) == b"body"
    assert again.models() == [NAME]
    again.close()


async def test_a_repeat_finds_the_first_call(journal: Journal) -> None:
    job = uuid4().hex
    first = journal.submit(job, "train", NAME, b"body")
    assert journal.submit(job, "train", NAME, b"body") == first
    assert journal.unfinished() == [job]
    for other in (("train", NAME, b"another"), ("sft", NAME, b"body")):
        with pytest.raises(ConflictError, match="another content"):
            journal.submit(job, *other)  # type: ignore[arg-type]
    with pytest.raises(ConflictError):
        journal.submit(job, "train", ModelName("p", "other"), b"body")
    journal.end(job, DONE)
    assert journal.submit(job, "train", NAME, b"body").result == DONE
    assert journal.unfinished() == []


async def test_of_calls_at_once_with_one_id_one_counts(journal: Journal) -> None:
    job = uuid4().hex
    barrier = threading.Barrier(4)

    def call() -> JobInfo:
        barrier.wait()
        return journal.submit(job, "train", NAME, b"body")

    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(asyncio.to_thread(call)) for _ in range(4)]
    assert {call.result().id for call in calls} == {job}
    assert [event.type for event in journal.events(job, 0)] == ["queued"]


async def test_a_journal_belongs_to_one_server(journal: Journal, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another server uses this folder.*--state"):
        Journal(path)
    journal.submit(uuid4().hex, "train", NAME, b"the first one goes on")


def test_what_is_no_journal_is_said_to_be_none(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Journal(path)


async def test_events_are_numbered_and_can_be_read_from_any(jobs: Jobs, program: Program) -> None:
    async def behave(job: JobInfo, report: Report) -> None:
        await asyncio.to_thread(lambda: [report({"done": n, "total": 3}) for n in (1, 2, 3)])

    program.behave = behave
    job = await submit(jobs)
    events = await followed(jobs, job)
    assert [event.type for event in events] == ["queued", "started", *["progress"] * 3, "done"]
    assert [event.number for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.data["done"] for event in events[2:5]] == [1, 2, 3]
    assert events[-1].data == DONE.model_dump()
    for after in range(6):
        assert await followed(jobs, job, after) == events[after:]
    with pytest.raises(NotFoundError, match="no job nonsense"):
        await followed(jobs, "nonsense")


async def test_jobs_run_one_by_one_in_their_order(jobs: Jobs, program: Program) -> None:
    running = 0

    async def behave(job: JobInfo, report: Report) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1

    program.behave = behave
    order = [await submit(jobs, str(number).encode()) for number in range(20)]
    await followed(jobs, order[-1])
    assert program.ran == order
    assert program.bodies == [str(number).encode() for number in range(20)]
    assert (jobs.queued, jobs.current) == (0, None)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (JobError("The gradient is not finite."), "job_failed", "The gradient is not finite."),
        (StoreFullError("No space."), "store_full", "No space."),
        (ZeroDivisionError("oops"), "job_failed", "failed inside the server (ZeroDivisionError"),
    ],
)
async def test_a_job_that_fails_says_why_and_the_next_one_runs(
    jobs: Jobs, program: Program, error: Exception, code: str, words: str
) -> None:
    async def behave(job: JobInfo, report: Report) -> None:
        raise error

    program.behave = behave
    failed = await submit(jobs)
    events = await followed(jobs, failed)
    assert events[-1].type == "failed"
    info = jobs.journal.get(failed)
    assert (info.state, info.result) == ("failed", None)
    assert info.error is not None
    assert info.error.code == code
    assert words in info.error.message

    assert (await jobs.submit(failed, "train", NAME, b"body")).error == info.error
    program.behave = None
    assert (await followed(jobs, await submit(jobs)))[-1].type == "done"
    assert len(program.ran) == 2


async def test_a_job_under_way_runs_again_after_a_restart(path: Path, program: Program) -> None:
    journal = Journal(path)
    first, second = uuid4().hex, uuid4().hex
    for job in (first, second):
        journal.submit(job, "train", NAME, b"body")
    journal.start(first)
    journal.add_event(first, "progress", {"done": 1})
    journal.close()

    journal = Journal(path)
    jobs = Jobs(journal)
    jobs.start(program)
    events = await followed(jobs, first, after=2)
    assert [event.type for event in events] == ["progress", "warning", "started", "done"]
    assert [event.number for event in events] == [3, 4, 5, 6]
    assert "during this call (1 of 3 times)" in events[1].data["warning"]
    await followed(jobs, second)
    assert program.ran == [first, second]
    await jobs.stop(10)
    journal.close()


async def test_a_call_that_kills_the_server_three_times_fails_and_the_others_go_on(
    path: Path, program: Program
) -> None:
    killer, other = uuid4().hex, uuid4().hex
    journal = Journal(path)
    for job in (killer, other):
        journal.submit(job, "train", NAME, b"body")
    for _ in range(3):
        assert journal.unfinished() == [killer, other]
        journal.start(killer)
        journal.add_event(killer, "progress", {"done": 1})
        journal.close()  # as a killed process would, with nothing else written
        journal = Journal(path)
    assert journal.unfinished() == [other]
    info = journal.get(killer)
    assert info.state == "failed"
    assert info.error is not None
    assert info.error.code == JobError.code
    assert "ended the server 3 times" in info.error.message
    jobs = Jobs(journal)
    jobs.start(program)
    assert (await followed(jobs, killer))[-1].type == "failed"
    assert (await followed(jobs, other))[-1].type == "done"
    assert program.ran == [other]
    await jobs.stop(10)
    journal.close()


async def test_a_server_that_is_killed_when_the_step_is_trained_was_not_killed_by_the_call(
    path: Path,
) -> None:
    job = uuid4().hex
    journal = Journal(path)
    journal.submit(job, "train", NAME, b"body")
    for _ in range(5):
        journal.start(job)
        journal.add_event(job, "progress", {"phase": "loading", TRAINED: 1})
        journal.close()
        journal = Journal(path)
    assert journal.unfinished() == [job]
    assert "warning" not in {event.type for event in journal.events(job, 0)}
    journal.close()


async def test_one_that_was_done_already_is_not_made_again_for_ever_either(path: Path) -> None:
    job = uuid4().hex
    journal = Journal(path)
    journal.submit(job, "train", NAME, b"body")
    journal.start(job)
    journal.end(job, DONE.model_copy(update={"durable": False}))
    journal.close()
    for _ in range(3):
        journal = Journal(path)
        assert journal.repeated() == {NAME}
        journal.start(job)
        journal.close()
    journal = Journal(path)
    assert (journal.unfinished(), journal.repeated()) == ([], set())
    info = journal.get(job)
    assert info.state == "done"
    assert info.error is not None
    assert "ended the server 3 times" in info.error.message
    journal.close()


async def test_a_call_that_is_left_in_good_order_or_meets_a_full_disk_has_killed_nobody(
    path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(report: Report) -> None:
        while True:
            report({})

    async def leave(job: JobInfo, report: Report) -> None:
        await asyncio.to_thread(work, report)

    job = uuid4().hex
    journal = Journal(path)
    journal.submit(job, "train", NAME, b"body")
    program.behave = leave
    for start in range(1, 6):
        jobs = Jobs(journal)
        jobs.start(program)
        await until_running(program, start)
        async with asyncio.timeout(30):
            await jobs.stop(0.01)
        journal.close()
        journal = Journal(path)
    monkeypatch.setattr(jobs_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(journal, "end", _full_at_first(journal.end))
    program.behave = None
    jobs = Jobs(journal)
    jobs.start(program)
    events = await followed(jobs, job)
    assert events[-1].type == "done"
    assert [event.type for event in events].count("started") == 10
    assert "warning" not in {event.type for event in events}
    await jobs.stop(10)
    journal.close()


def _full_at_first(end: Callable[..., None]) -> Callable[..., None]:
    """The end of a job, which can be written down at the fifth try."""
    tries = itertools.count(1)

    def try_to_end(*outcome: object) -> None:
        if next(tries) < 5:
            raise StoreFullError("No space left.")
        end(*outcome)

    return try_to_end


async def test_stopping_lets_the_running_job_finish(jobs: Jobs, program: Program) -> None:
    release = asyncio.Event()

    async def behave(job: JobInfo, report: Report) -> None:
        await release.wait()

    program.behave = behave
    running, waiting = await submit(jobs), await submit(jobs)
    following = asyncio.create_task(followed(jobs, running))
    other = asyncio.create_task(followed(jobs, waiting))
    await until_running(program)
    stopping = asyncio.create_task(jobs.stop(30))
    await asyncio.sleep(0)
    with pytest.raises(ServerStoppingError, match="Nothing was done"):
        await submit(jobs)
    release.set()
    await stopping
    assert (await following)[-1].type == "done"
    assert [event.type for event in await other] == ["queued"]
    assert jobs.journal.unfinished() == [waiting]
    assert program.ran == [running]


async def test_stopping_leaves_a_long_job_to_the_next_server(jobs: Jobs, program: Program) -> None:
    def work(report: Report) -> None:
        while True:
            report({})

    async def behave(job: JobInfo, report: Report) -> None:
        await asyncio.to_thread(work, report)

    program.behave = behave
    job = await submit(jobs)
    await until_running(program)
    async with asyncio.timeout(30):
        await jobs.stop(0.05)
    assert jobs.journal.unfinished() == [job]
    assert jobs.journal.get(job).state == "running"


def fill(journal: Journal) -> None:
    """Let SQLite find its disk full."""
    [pages] = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")


def make_room(journal: Journal) -> None:
    journal._db.execute("PRAGMA max_page_count = 1000000")


async def test_a_call_that_cannot_be_written_down_is_refused(journal: Journal, path: Path) -> None:
    fill(journal)
    kept: list[str] = []

    def submit_all(jobs: Iterator[str]) -> None:
        for job in jobs:  # the pages that are there have some room
            kept.append(journal.submit(job, "train", NAME, bytes(100)).id)

    with pytest.raises(StoreFullError, match=r"database or disk is full.*nothing was done"):
        submit_all(f"{number:032x}" for number in count())
    check_refused(journal, path, f"{len(kept):032x}", kept)


async def test_a_body_that_cannot_be_written_down_is_refused(journal: Journal, path: Path) -> None:
    job = uuid4().hex
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreFullError, match=r"File too large.*nothing was done"):
            journal.submit(job, "train", NAME, bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_refused(journal, path, job, [])


def check_refused(journal: Journal, path: Path, job: str, kept: list[str]) -> None:
    assert journal.unfinished() == kept
    assert len(list(path.with_name("bodies").iterdir())) == len(kept)
    with pytest.raises(NotFoundError):
        journal.get(job)
    make_room(journal)
    assert journal.submit(job, "train", NAME, bytes(200_000)).state == "queued"
    assert journal.body(job) == bytes(200_000)


async def test_nobody_waits_for_a_large_body(journal: Journal, path: Path) -> None:
    """The locked table has no part in it: it is written, read and dropped beside it."""
    job, body = uuid4().hex, bytes(50 << 20)
    with journal._lock:
        assert journal.unfinished() == []
        assert journal.totals() == (0, 0)
    journal.submit(job, "train", NAME, body)
    statements: list[str] = []
    journal._db.set_trace_callback(statements.append)
    assert journal.body(job) == body
    journal.end(job, DONE)
    assert max(map(len, statements)) < 10_000
    assert list(path.with_name("bodies").iterdir()) == []
    journal.close()
    assert os.path.getsize(path) < 1 << 20  # noqa: ASYNC240


async def test_an_older_journal_is_taken_over(path: Path) -> None:
    """One whose table has the bodies in it: what waits there is run, what is done stays done."""
    waiting, done = uuid4().hex, uuid4().hex
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA.replace("body TEXT", "body BLOB"))
        for job, body, state, result in (
            (waiting, b"body" * 1000, "queued", None),
            (done, None, "done", DONE.model_dump_json()),
        ):
            db.execute(
                "INSERT INTO jobs (id, kind, project, model, digest, body, state, result)"
                " VALUES (?, 'train', 'p', 'm', 'digest', ?, ?, ?)",
                (job, body, state, result),
            )
    db.close()
    (path.with_name("bodies")).mkdir()
    (path.with_name("bodies") / "left-by-one-that-was-killed").touch()
    for _ in range(2):
        journal = Journal(path)
        assert journal.unfinished() == [waiting]
        assert journal.body(waiting) == b"body" * 1000
        assert journal.get(done).result == DONE
        assert journal.totals() == (1, 0)
        assert len(list(path.with_name("bodies").iterdir())) == 1
        journal.close()


async def test_totals_count_a_step_that_is_made_again_once(path: Path) -> None:
    journal = Journal(path)
    for metrics, durable in (({"tokens": 5.0}, True), ({"tokens": 7.0}, False)):
        job = uuid4().hex
        journal.submit(job, "train", NAME, b"body")
        journal.end(job, StepResult(step=1, policy="p/m@1", metrics=metrics, durable=durable))
    assert journal.totals() == (2, 12)
    journal.close()
    journal = Journal(path)
    assert journal.unfinished() == [job]
    journal.end(job, DONE)
    assert journal.totals() == (2, 12)
    journal.close()


async def test_events_beyond_the_last_of_a_job_that_is_over(jobs: Jobs) -> None:
    job = await submit(jobs)
    last = (await followed(jobs, job))[-1].number
    for after in (last, last + 1, 999_999_999):
        assert await followed(jobs, job, after) == []


async def test_an_end_that_cannot_be_written_down_is_tried_again(
    jobs: Jobs, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up during a job: nothing hangs, the job is run again until its end is kept."""
    monkeypatch.setattr(jobs_module, "RETRY_SECONDS", 0.01)
    big = "x" * 100_000

    async def behave(job: JobInfo, report: Report) -> None:
        if len(program.ran) == 1:
            fill(jobs.journal)
        elif len(program.ran) == 3:
            make_room(jobs.journal)

    program.behave = behave
    end = jobs.journal.end

    def end_with_much_to_write(job: str, outcome: StepResult | ErrorBody) -> None:
        if len(program.ran) < 3:
            jobs.journal.add_event(job, "progress", {"padding": big})
        end(job, outcome)

    monkeypatch.setattr(jobs.journal, "end", end_with_much_to_write)
    job = await submit(jobs)
    after = await submit(jobs, b"the next one waits its turn")
    assert (await followed(jobs, after))[-1].type == "done"
    assert program.ran == [job, job, job, after]
    assert jobs.journal.get(job).result == DONE


async def test_the_body_goes_when_the_job_is_settled(journal: Journal, path: Path) -> None:
    job = uuid4().hex
    journal.submit(job, "train", NAME, b"body")
    journal.end(job, DONE)
    journal.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT body FROM jobs").fetchall() == [(None,)]
    assert list(path.with_name("bodies").iterdir()) == []
    db.close()


async def test_a_job_whose_step_is_not_durable_is_done_again_after_a_restart(
    path: Path, program: Program
) -> None:
    """It stays done for whoever asks, and its body is kept until its step is in the store."""
    pending = DONE.model_copy(update={"durable": False})
    journal = Journal(path)
    first, second = uuid4().hex, uuid4().hex
    for job in (first, second):
        journal.submit(job, "train", NAME, b"body")
    journal.start(first)
    journal.end(first, pending)
    assert journal.unfinished() == [second]
    assert not journal.get(first).durable
    journal.close()

    journal = Journal(path)
    assert journal.repeated() == {NAME}
    assert journal.unfinished() == [first, second]
    assert journal.get(first).state == "done"
    program.result = pending
    jobs = Jobs(journal)
    jobs.start(program)
    await followed(jobs, second)
    assert program.ran == [first, second]
    assert journal.repeated() == set()
    await jobs.note_stored(first, None)
    assert journal.get(first).durable
    await jobs.stop(10)
    journal.close()

    journal = Journal(path)
    assert journal.unfinished() == [second]
    journal.close()


async def test_a_step_that_is_durable_before_its_job_is_settled(
    jobs: Jobs, program: Program
) -> None:
    program.result = DONE.model_copy(update={"durable": False})
    marking: list[asyncio.Task[None]] = []

    async def behave(job: JobInfo, report: Report) -> None:
        marking.append(asyncio.create_task(jobs.note_stored(job.id, None)))
        await asyncio.sleep(0.01)

    program.behave = behave
    job = await submit(jobs)
    await followed(jobs, job)
    await marking[0]
    assert jobs.journal.get(job).durable
    with pytest.raises(TypeError):
        jobs.journal.body(job)
