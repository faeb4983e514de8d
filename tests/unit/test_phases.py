from __future__ import annotations

from pathlib import Path

import pytest

from art_cloud.clusters import timeline as phases
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.clusters.timeline import phase, phases_of


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    return clock


def test_phases_add_up_and_are_kept_in_order(clock: Clock) -> None:
    record, _ = Registry().claim("a", ClusterSpec(provider="local", store="s"))
    with phases_of(record):
        with phase("provision"):
            clock.now += 2
            with phase("image"):  # a provider's own
                clock.now += 30
            clock.now += 1
        with phase("boot") as boot:
            clock.now += 10
            boot.had("model load", 4)
    kept = Registry().phases(record)
    assert kept == [("provision", 3), ("image", 30), ("boot", 6), ("model load", 4)]
    assert sum(seconds for _, seconds in kept) == clock.now


def test_one_that_failed_is_not_kept(clock: Clock) -> None:
    record, _ = Registry().claim("a", ClusterSpec(provider="local", store="s"))
    with phases_of(record), pytest.raises(ZeroDivisionError), phase("boot"):
        raise ZeroDivisionError
    assert Registry().phases(record) == []


def test_without_a_record_they_are_only_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_PROGRESS", "1")
    with phases_of("mine"), phase("found"):
        pass
    with phase("of nothing"):
        pass
    assert capfd.readouterr().err == "mine: found, 0.0 s\n"
