"""The queue: a call is in the journal before it is answered, and is done once.

Jobs run one after another, in the journal's order. A job that was running when the server died runs
again from the newest step in the store; the programs (`programs.py`) make that repeatable. So does
one that was done while its step was still on the way to the store: its body is kept until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

from art_cloud.shared.errors import ArtCloudError, RivalError, ServerStoppingError, StoreFullError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import ErrorBody, JobEvent, JobInfo, JobKind, StepResult

from .journal import Body, Journal

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


RETRY_SECONDS = 5.0
"""After which a job is run again whose end could not be written down."""

Report = Callable[[dict[str, Any]], None]
"""Publishes progress; callable from any thread. Raises `ServerStoppingError` when time is up."""
Program = Callable[[JobInfo, bytes, Report], Awaitable[StepResult]]


class Jobs:
    """Runs the journal's jobs, one at a time, and tells whoever asks how far they are."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.current: JobInfo | None = None
        self.moved = 0
        """Goes up whenever the running job says how far it is."""
        self._call_came = asyncio.Event()
        self._news = asyncio.Condition()
        self._stopping = False
        self._abandon = False
        self._worker: asyncio.Task[None] | None = None
        self._disk = ThreadPoolExecutor(1, "journal")

    def start(self, program: Program) -> None:
        """Begin to run them, each by `program`."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = get_ident()
        self._program = program
        self._worker = asyncio.create_task(self._work())

    @property
    def queued(self) -> int:
        """How many jobs wait."""
        current = self.current.id if self.current else None
        return sum(job != current for job in self.journal.unfinished())

    async def ask(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a method of the journal answers, while other requests go on: it may wait for the
        disk. One thread keeps the order in which they were asked."""
        asked = self._disk.submit(question, *args, **kwargs)
        return await asyncio.wrap_future(asked)

    async def submit(self, job: str, kind: JobKind, name: ModelName, body: Body) -> JobInfo:
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
        while True:
            async with self._news:
                while True:
                    settled = (await self.ask(self.journal.get, job)).state in ("done", "failed")
                    if events := await self.ask(self.journal.events, job, after):
                        break
                    if settled or (self._stopping and self.current is None):
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
        self._tell(self.current.id, "warning", {"warning": message})

    def _tell(self, job: str, type_: str, data: dict[str, Any]) -> None:
        """Add an event; whoever calls from another thread than the event loop's waits for that.

        What can't be written is logged: no job depends on what is told of it.
        """
        adding = self._disk.submit(self.journal.add_event, job, type_, data)
        adding.add_done_callback(self._told)
        if get_ident() != self._loop_thread:
            with suppress(StoreFullError):
                adding.result()

    def _told(self, adding: Future[None]) -> None:
        if error := adding.exception():
            log.error("nobody could be told: %s", error)
        elif not self._loop.is_closed():
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
            if job is None or not await self._settle(await self.ask(self.journal.get, job)):
                await self._call_came.wait()
        await self._wake()

    async def _settle(self, info: JobInfo) -> bool:
        """Run a job to its end and write that down. False: it has to be run again later."""
        self.current = info
        try:
            await self.ask(self.journal.start, info.id)
            await self._wake()
            outcome = await self._run(info)
            if outcome is not None:
                await self.ask(self.journal.end, info.id, outcome)
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
            self._tell(info.id, "progress", data)

        what = f"{info.kind} of {info.project}/{info.model}"
        try:
            body = await asyncio.to_thread(self.journal.body, info.id)
            return await self._program(info, body, report)
        except ServerStoppingError:
            log.info("job %s (%s) is left for the next start", info.id, what)
            return None
        except ArtCloudError as error:
            return ErrorBody(message=str(error), type="job_error", code=error.code)
        except Exception as error:
            log.exception("job %s (%s)", info.id, what)
            made = "" if info.kind == "register" else "No step was made. "
            return ErrorBody(
                message=f"The {what} failed inside the server ({type(error).__name__}: {error}). "
                f"{made}See the server's log (`art-cloud logs`).",
                type="server_error",
                code="job_failed",
            )

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()
