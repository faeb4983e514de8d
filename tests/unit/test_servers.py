"""The program that runs servers on a machine, where no server has to run for what is looked at."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from art_cloud.clusters.providers import get_provider, local
from art_cloud.clusters.providers.local import _program
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import ConfigError

program: Any = _program()


@pytest.fixture
def marked() -> Iterator[tuple[int, str]]:
    """A process in a session of its own, and the mark in its environment."""
    mark = uuid4().hex
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command,
        env=os.environ | {program.MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from then on it shows its own arguments
        yield process.pid, mark
        process.communicate(b"\n")


def look(pid: int) -> Any:
    [found] = [process for process in program.processes() if process.pid == pid]
    return found


def test_without_proc_the_same_is_seen(
    marked: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where psutil tells."""
    pid, mark = marked
    by_proc = look(pid)
    assert (by_proc.session, program._mark(by_proc)) == (pid, mark)
    monkeypatch.setattr(program, "PROC", Path("/there/is/no/proc"))
    by_psutil = look(pid)
    assert by_psutil._replace(started_at=by_proc.started_at) == by_proc
    assert abs(by_psutil.started_at - by_proc.started_at) < 1
    assert program._mark(by_psutil) == mark
    assert program._mark(look(os.getpid())) != mark


def test_a_name_that_is_being_started_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the lock shows no arguments of a server yet; something else never will."""
    monkeypatch.setattr(program, "LOCK_SECONDS", 0.2)
    here = program.Servers(tmp_path)
    folder = tmp_path / "clusters" / "one"
    folder.mkdir(parents=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert here.endpoint("one", 0.0) == {"state": "starting"}
        for ask in (lambda: here.stop("one"), lambda: here.start("one", ["/no/python"], {})):
            with pytest.raises(program.ServersError, match="held, but not by a server of one"):
                ask()
    assert here.stop("one") == {"ended": False}
    assert here.endpoint("one", 0.0) == {"state": "ended", "code": None, "log": []}
    with pytest.raises(FileNotFoundError):
        here.start("one", ["/no/python"], {})


async def test_where_no_server_can_run_a_local_cluster_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Windows there is no fcntl."""
    monkeypatch.setattr(local, "find_spec", lambda name: None if name == "fcntl" else ModuleSpec)
    _program.cache_clear()
    provider, spec = get_provider("local"), ClusterSpec(provider="local", store="file:///one")
    assert await provider.list() == []
    with pytest.raises(ConfigError, match="needs Linux or macOS"):
        await provider.launch(spec, "one")
