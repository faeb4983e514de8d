"""Ends a server that hangs, from outside of it: a process of its own, which the server starts.

The server tells it each second, through a pipe, what is at work and a number that changes whenever
that moves. It ends the server when it hears nothing any more, when what is at work does not move,
and when the time is up that the server gave itself. So it does not matter what hangs: the event
loop, a thread, the whole process. It ends by itself when the server does.

Run as a program it needs psutil and nothing else of what is installed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__ if __name__ != "__main__" else "art_server.watchdog")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STALL_SECONDS = 1800.0
"""How long what is at work may not move: kernels are compiled, and weights loaded, in less."""
LOOP_SECONDS = 300.0
"""How long the event loop may not move, at most."""
BEAT_SECONDS = TICK_SECONDS = 1.0
TRACE_SECONDS = 1.0
"""How long the server's threads may take to say where they are, before it is killed."""


class Moves:
    """What is at work, by name, and since when each of it has not moved."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def see(self, work: Mapping[str, int], now: float) -> None:
        """`work` has a number for each that is at work, another one whenever it has moved."""
        seen = self._seen
        self._seen = {
            name: seen[name] if name in seen and seen[name][0] == moved else (moved, now)
            for name, moved in work.items()
        }

    def still(self, now: float) -> dict[str, float]:
        """For how many seconds each has not moved."""
        return {name: now - since for name, (_, since) in self._seen.items()}


class Watchdog:
    """The server's side: starts the process that watches it, and tells it how things are."""

    def __init__(self, stall: float = STALL_SECONDS) -> None:
        """`stall`: seconds that what is at work may not move."""
        self._stall = stall
        self._told: dict[str, Any] = {"until": math.inf, "why": ""}
        self._process: subprocess.Popen[bytes] | None = None

    def end_in(self, seconds: float, why: str) -> None:
        """Have the server ended in so many seconds, whatever it does, unless this is called again.

        Journal and store survive that as they survive a crash.
        """
        self._told |= {"until": time.monotonic() + seconds, "why": why}
        self._tell()

    def beat(self, work: Mapping[str, int]) -> None:
        """The event loop moves, and so does what is at `work` if its number changes. After the
        first of these calls a second without one counts against the server."""
        self._told["work"] = dict(work)
        self._tell()

    def _tell(self) -> None:
        line = json.dumps(self._told).encode() + b"\n"
        if self._process is None:
            self._start()
        try:
            self._write(line)
        except BrokenPipeError:
            self._start()
            self._write(line)
            log.error("the watchdog was gone, and is started again")

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BlockingIOError):  # it does not read: what is newer will do
            os.write(self._process.stdin.fileno(), line)

    def _start(self) -> None:
        if self._process is not None:
            self._process.wait()
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        command = [sys.executable, "-I", __file__, str(os.getpid()), str(self._stall)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)


def serve_in_a_child() -> None:
    """Where this is the first process of a container, go on in a child, and be its `init`.

    Nothing within a container can kill the first process, and that reaps what others left.
    """
    if os.getpid() != 1:
        return
    if (child := os.fork()) == 0:
        os.setsid()  # a terminal's Ctrl-C comes once, from the first process
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


class _Told:
    """What the server said, and when: `now` is a clock of which no second passes unnoticed."""

    def __init__(self, stall: float) -> None:
        self._stall = stall
        self._until, self._why = math.inf, ""
        self._heard = math.inf
        self._moves = Moves()

    def hear(self, line: bytes, now: float) -> None:
        said = json.loads(line)
        self._until, self._why = said["until"], said["why"]
        if (work := said.get("work")) is not None:
            self._heard = now
            self._moves.see(work, now)

    def verdict(self, now: float) -> str | None:
        """Why the server has to be ended."""
        if time.monotonic() > self._until:
            return self._why
        if now - self._heard > (limit := min(self._stall, LOOP_SECONDS)):
            return f"its event loop has not moved for {limit:.0f} s"
        for name, seconds in self._moves.still(now).items():
            if seconds > self._stall:
                return f"{name} has not moved for {seconds:.0f} s"
        return None


def watch(server: int, stall: float) -> None:
    """Return when the process `server`, which started this one, has ended; end it if need be."""
    told, rest, lived = _Told(stall), b"", 0.0
    while os.getppid() == server:
        before = time.monotonic()
        readable, _, _ = select.select([0], [], [], TICK_SECONDS)
        if readable:
            if not (said := os.read(0, 65536)):
                return
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                told.hear(line, lived)
        # a machine that slept, or a terminal's Ctrl-Z, has stopped the two of us
        lived += min(time.monotonic() - before, 2 * TICK_SECONDS)
        if (reason := told.verdict(lived)) is not None:
            return end(server, reason)


def end(server: int, reason: str) -> None:
    """Have it say where it hangs, and kill it and what it started."""
    import psutil

    process = psutil.Process(server)
    log.critical("%s: the process ends now (it was %s)", reason, process.status())
    os.kill(server, signal.SIGUSR1)
    time.sleep(TRACE_SECONDS)
    family = process.children(recursive=True)
    if os.getsid(server) == server:
        family += [one for one in psutil.process_iter() if _session(one.pid) == server]
    for one in [process, *family]:
        if one.pid != os.getpid():
            with suppress(psutil.Error):
                one.kill()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are for the server, and this ends after it
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    watch(int(sys.argv[1]), float(sys.argv[2]))
    os._exit(0)  # at once: whoever looks after the server must not find it half there


if __name__ == "__main__":
    main()
