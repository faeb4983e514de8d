"""Trackers as training sees them: never waited for, never in the way."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud.clusters.attached import AttachedBackend
from art_cloud.clusters.registry import ClusterRecord
from art_cloud.clusters.spec import ClusterSpec, Offer
from art_cloud.links.endpoint import Endpoint
from art_cloud.shared.names import ModelName
from art_cloud.trackers import feeds as trackers
from art_cloud.trackers.feeds import Trackers, some_of, wanted
from art_cloud.trackers.tracker import Event, Run, run_id, tracked_name

NAME = ModelName("p", "m")
RUN = Run(id="m-1", project="p", name="m", config={}, history=[])


@dataclass
class Slow:
    """A tracker that opens at its `opens_at`-th try, and takes what it is sent when it may."""

    opens_at: int = 1
    may_send: threading.Event = field(default_factory=threading.Event)
    tries: int = 0
    sent: list[Event] = field(default_factory=list)
    title: str = "Slow"

    def open(self, run: Run) -> None:
        self.tries += 1
        if self.tries < self.opens_at:
            raise ConnectionError("nobody\n  is there")

    def send(self, event: Event) -> None:
        self.may_send.wait(30)
        self.sent.append(event)

    def close(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    tracker = Slow()
    monkeypatch.setattr(trackers, "_MAKERS", {"wandb": lambda: tracker})
    return tracker


def begin() -> Trackers:
    begun = Trackers()
    begun.open(NAME, RUN, ["wandb"])
    return begun


async def test_events_wait_for_a_tracker_that_opens_late(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.001)
    slow.opens_at = 4
    slow.may_send.set()
    begun = begin()
    for step in range(3):
        begun.tell(NAME, step, "train", {"loss": 0.5})
        begun.tell(ModelName("p", "other"), step, "train", {"loss": 0.5})
    async with asyncio.timeout(30):
        while len(slow.sent) < 3:
            await asyncio.sleep(0.001)
    await begun.close()
    assert [event.step for event in slow.sent] == [0, 1, 2]
    assert slow.sent[0].metrics == {"loss/loss": 0.5}
    said = capfd.readouterr().err
    assert "Slow: ConnectionError: nobody is there. Training goes on" in said
    assert said.count("Slow") == 1


async def test_one_that_is_stuck_is_not_waited_for(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What no longer fits is left out from there on: a later start finds no gap before it."""
    monkeypatch.setattr(trackers, "EVENTS", 5)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    begun = begin()
    for step in range(20):
        begun.tell(NAME, step, "train", {})
    await begun.close()
    assert slow.sent == []
    assert "Slow has not got all of m yet" in capfd.readouterr().err
    slow.may_send.set()
    async with asyncio.timeout(30):
        while len(slow.sent) < 5:
            await asyncio.sleep(0.001)
    steps = [event.step for event in slow.sent]
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("reward", "train/reward"),
        ("loss", "loss/loss"),
        ("train/loss", "loss/loss"),
        ("train/reward", "train/reward"),
        ("trajectory/turns", "train/turns"),
        ("train/trajectory/group_difficulty", "train/group_difficulty"),
        ("val/reward", "val/reward"),
        ("val/loss", "val/loss"),
        ("pipeline/seconds", "pipeline/seconds"),
        ("cost/usd", "cost/usd"),
        ("of_a_later_version", "train/of_a_later_version"),
    ],
)
def test_names(name: str, shown: str) -> None:
    assert tracked_name(name) == shown
    assert tracked_name(shown) == shown


def test_a_run_is_of_one_life_of_a_model() -> None:
    born = [{"step": 0, "created_at": "2026-11-20T12:00:00+00:00"}]
    later = [*born, {"step": 1, "created_at": "2026-11-20T13:00:00+00:00"}]
    anew = [{"step": 0, "created_at": "2026-11-21T12:00:00+00:00"}]
    ids = [run_id(NAME, rows, "file:///s") for rows in (born, later, anew, [])]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert all(id.startswith("m-") for id in ids)
    assert run_id(NAME, [], "file:///other") not in ids


def test_rollouts_are_of_all_groups() -> None:
    groups = [
        art.TrajectoryGroup(art.Trajectory(reward=10 * group + n) for n in range(size))
        for group, size in enumerate((3, 0, 1, 9))
    ]
    assert [t.reward for t in some_of(groups)] == [0, 20, 30, 1, 31, 2, 32, 33]
    assert some_of([]) == []


def model(report_metrics: Any = None) -> art.TrainableModel[None]:
    return art.TrainableModel(name="m", project="p", base_model="b", report_metrics=report_metrics)


def test_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wanted("agent", None) == ()
    assert wanted("agent", ["wandb", "wandb"]) == ("wandb",)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wanted("agent", None) == ("wandb",)
    assert wanted("agent", []) == ()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wanted("agent", None) == ()


def test_what_is_not_installed_is_an_error_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(art.ConfigError, match=r"pip install 'art-cloud\[wandb\]'"):
        wanted("agent", ["wandb"])
    assert wanted("agent", None) == ()
    assert "wandb is not installed" in " ".join(capfd.readouterr().err.split())


async def test_a_cluster_with_a_price_tells_its_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path))
    offer = Offer(provider="cloud", region="here", price_per_hour=3.0, machine="H100")
    launched_at = datetime.now(UTC) - timedelta(minutes=20)
    priced = ClusterSpec(provider="cloud", store="s3://b", offer=offer, launched_at=launched_at)
    for spec, rate in ((priced, 3.0), (ClusterSpec(provider="local", store="file:///s"), None)):
        record = ClusterRecord("one", spec, "running", datetime.now(UTC))
        backend = AttachedBackend(Endpoint(url="http://127.0.0.1:9"), "token", record)
        cost = backend.cost()
        await backend.close()
        if rate is None:
            assert cost == {}
        else:
            assert cost["cost/usd_per_hour"] == rate
            assert 1.0 <= cost["cost/usd"] < 1.5
