"""What rigs with a real SkyPilot share: namespaces of their own, of processes and of mounts.

So all of their processes end with them, and users and hosts there are not this machine's.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import psutil

from .waiting import wait_until

SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
START_SECONDS = 300.0


class Rig:
    """What the `init.sh` of a folder starts, until the block ends."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        """Of whoever uses SkyPilot."""
        self.log = folder / "rig.log"
        self.python = str(python)
        """One that has SkyPilot."""
        [self.port] = free_ports(1)
        self._init: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """For whoever uses SkyPilot here."""
        return {
            "HOME": str(self.home),
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "ART_SKYPILOT_PYTHON": self.python,
        }

    def _write_user(self) -> None:
        """Whoever uses SkyPilot: it is a part of names in /tmp, which rigs share."""
        write(self.home / ".sky" / "user_hash", secrets.token_hex(4))

    def _start(self, environment: Mapping[str, str], state: str) -> None:
        """And wait, see below."""
        with self.log.open("wb") as log:
            self._init = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", str(self.folder / "init.sh")),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait(state)

    def _wait(self, state: str) -> None:
        """Until `init.sh` has made a file of that name; all of it ends if that fails."""
        init = self._init
        assert init is not None

        def reached() -> bool:
            assert init.poll() is None, self.log.read_text()
            return (self.folder / state).exists()

        try:
            wait_until(reached, START_SECONDS)
        except BaseException:
            print(self.log.read_text())
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        assert self._init is not None
        inside = self._processes() if self._init.poll() is None else []
        for process in inside[:1]:  # PID 1 of the namespace: the others go with it
            process.send_signal(signal.SIGKILL)
        self._init.wait()
        psutil.wait_procs(inside, timeout=10)

    def _processes(self) -> list[psutil.Process]:
        assert self._init is not None
        return psutil.Process(self._init.pid).children(recursive=True)

    def _running(self, condition: Callable[[list[str]], bool]) -> list[psutil.Process]:
        """The processes in here whose arguments are such."""
        found = []
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):  # a zombie is none any more
                if condition(process.cmdline()):
                    found.append(process)
        return found

    def servers(self) -> list[psutil.Process]:
        """Those of clusters, without what limits their time."""
        return self._running(
            lambda arguments: "art_server" in arguments and Path(arguments[0]).name != "timeout"
        )


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip("\n"))


def missing(*tools: str) -> list[str]:
    return [tool for tool in tools if shutil.which(tool, path=SBIN) is None]
