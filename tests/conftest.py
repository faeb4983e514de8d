"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from .rigs.s3_servers import S3Server
    from .rigs.slurm_rig import SlurmRig

# Workers and the servers they start share the cores: threads that wait for others burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has its background jobs ignore Ctrl-C, and they hand that on to the programs they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of a tiny Qwen3 with its tokenizer, made once for all workers of a run."""
    from art_server.tiny_model import make_tiny_model

    base = tmp_path_factory.getbasetemp()
    root = base if worker_id == "master" else base.parent
    folder, done = root / "tiny-model", root / "tiny-model.done"
    with FileLock(root / "tiny-model.lock"):
        if not done.exists():
            make_tiny_model(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server in memory, over https, for this worker."""
    from .rigs.s3_servers import moto_server

    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server on disk, over https. Tests that use it are of the xdist group "swift"."""
    from .rigs.s3_servers import swift_server

    with swift_server(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRig]:
    """SkyPilot with a Slurm cluster. Tests that use it are of the xdist group "skypilot"."""
    from .rigs.slurm_rig import SlurmRig

    with SlurmRig(tmp_path_factory.mktemp("slurm")) as rig:
        yield rig


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """With ART_REQUIRE_REAL=1 nothing is skipped: what can't run here fails, with its reason."""
    if report.skipped and os.environ.get("ART_REQUIRE_REAL") == "1":
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, and ART_REQUIRE_REAL=1: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: many tests wait for processes of theirs."""
    return (os.cpu_count() or 1) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sums of what tests recorded with `record_property` and a number."""
    sums: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if isinstance(value, int) and getattr(report, "when", "") == "call":
                    sums[name] += value
    for name, value in sums.items():
        terminalreporter.write_line(f"{name}: {value}")
