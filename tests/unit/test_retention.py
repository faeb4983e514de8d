"""Which steps stay: by the rules, by hand and by itself after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from art_server.steps.runtime import Runtime, Settings

from art_cloud.shared.config import LoRAConfig, Retention
from art_cloud.shared.errors import ConfigError, NotFoundError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import CheckpointInfo, JobInfo, JobKind, RegisterRequest, StepResult
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.files import FileStore
from art_cloud.store.retention import prune, to_remove

from ..rigs.synthetic import batch
from ..rigs.waiting import until
from .test_checkpoints import commit

NAME = ModelName("games", "agent")


def infos(count: int, rewards: dict[int, float]) -> list[CheckpointInfo]:
    return [
        CheckpointInfo(
            project="games",
            model="agent",
            step=step,
            kind="train",
            created_at=datetime.now(UTC),
            bytes=1,
            metrics={"val/reward": rewards[step]} if step in rewards else {},
        )
        for step in range(count)
    ]


@pytest.mark.parametrize(
    ("retention", "rewards", "left"),
    [
        (Retention(keep_last=3), {}, [0, 7, 8, 9]),
        (Retention(keep_last=1), {}, [0, 9]),
        (Retention(keep_last=99), {}, list(range(10))),
        (Retention(keep_every=4), {}, [0, 4, 8, 9]),
        (Retention(keep_best="val/reward"), {2: 0.9, 5: 0.8, 9: 0.1}, [0, 2, 9]),
        (Retention(keep_best="val/reward"), {2: 0.9, 5: 0.9, 9: 0.1}, [0, 5, 9]),
        # 8 and 9 may be under evaluation
        (Retention(keep_best="val/reward"), {2: 0.9, 7: 0.1}, [0, 2, 8, 9]),
        (
            Retention(keep_last=2, keep_every=5, keep_best="val/reward"),
            {3: 0.9, 9: 0.1},
            [0, 3, 5, 8, 9],
        ),
    ],
)
def test_a_step_stays_if_any_rule_keeps_it(
    retention: Retention, rewards: dict[int, float], left: list[int]
) -> None:
    gone = to_remove(retention, infos(10, rewards))
    assert [step for step in range(10) if step not in gone] == left


def test_what_is_in_use_stays() -> None:
    assert to_remove(Retention(keep_last=1), infos(6, {}), keep={2, 4}) == [1, 3]
    assert to_remove(Retention(keep_last=1), []) == []


def test_without_the_metric_nothing_is_removed() -> None:
    with pytest.raises(NotFoundError, match=r"No step has the metric 'val/score'.*val/reward"):
        to_remove(Retention(keep_best="val/score"), infos(5, {1: 1.0}))


def test_a_retention_keeps_something() -> None:
    with pytest.raises(ConfigError, match="keep_last, keep_best or keep_every"):
        Retention()
    with pytest.raises(ConfigError, match="greater than 0"):
        Retention(keep_last=0)


def test_pruning_leaves_forked_steps_and_what_was_measured(tmp_path: Path) -> None:
    steps = Checkpoints(FileStore(tmp_path / "store", create=True), NAME)
    for step in range(6):
        commit(steps, tmp_path, step, call_id=f"call-{step}", metrics={"loss": float(step)})
    steps.log("val", 1, {"reward": 0.5})
    steps.fork(ModelName("games", "fork"), 3)
    shown = prune(steps, Retention(keep_last=1), dry_run=True)
    assert [info.step for info in shown] == [1, 2, 4]
    assert steps.steps() == [0, 1, 2, 3, 4, 5]
    assert prune(steps, Retention(keep_last=1)) == shown
    assert steps.steps() == [0, 3, 5]
    assert prune(steps, Retention(keep_last=1)) == []

    history = steps.history()
    assert [row["step"] for row in history] == [0, 1, 2, 3, 4, 5]
    assert [row["loss"] for row in history] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert history[1]["val/reward"] == 0.5
    assert steps.calls() == {f"call-{step}": step for step in range(6)}
    assert steps.record(2).policy == "games/agent@2"
    with pytest.raises(NotFoundError, match=r"no step 2\. It has steps 0, 3, 5"):
        steps.read(2)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    (tmp_path / "state").mkdir()
    runtime = Runtime(Settings(state=tmp_path / "state", store=str(tmp_path / "store")))
    yield runtime
    await runtime.close()


async def test_a_server_keeps_what_the_model_was_registered_with(
    runtime: Runtime, tiny_model: Path
) -> None:
    programs = runtime.programs
    steps = runtime.models.checkpoints(NAME)

    async def run(kind: JobKind, body: bytes, job: str = "") -> StepResult:
        info = JobInfo(
            id=job or uuid4().hex, kind=kind, project="games", model="agent", state="running"
        )
        return await programs.run(info, body, lambda data: None)

    async def register(retention: Retention | None) -> None:
        request = RegisterRequest(
            base_model=str(tiny_model), lora=LoRAConfig(rank=2), retention=retention
        )
        await run("register", request.model_dump_json().encode())

    body, first = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex
    await register(Retention(keep_last=1))
    made = await run("train", body, first)
    async with runtime.policies.asked_for(f"{NAME}@1"):  # a request that goes on
        await run("train", body)
        await run("train", body)
        await until(lambda: steps.steps() == [0, 1, 3])
    async with runtime.policies.asked_for(f"{NAME}@1") as policy:
        await run("train", body)
        await until(lambda: steps.steps() == [0, 1, 4])
        assert policy == f"{NAME}@1"
    await run("train", body)
    await until(lambda: steps.steps() == [0, 5])
    async with runtime.policies.asked_for(
        f"{NAME}@1"
    ) as policy:  # removed, and loaded as long as there is room
        assert policy == f"{NAME}@1"

    assert await run("train", body, first) == made  # a call that is repeated late counts once
    await register(None)
    for _ in range(2):
        await run("train", body)
    assert steps.steps() == [0, 5, 6, 7]
    assert steps.read(7).retention is None


@pytest.mark.parametrize("read", [Checkpoints.records, Checkpoints.manifests])
def test_steps_are_read_while_they_are_removed(
    tmp_path: Path, read: Callable[[Checkpoints], list[Manifest]]
) -> None:
    """Between a listing and the reading of what it listed, a server removes steps."""
    steps = Checkpoints(FileStore(tmp_path / "store", create=True), NAME)
    for step in range(20):
        commit(steps, tmp_path, step)
    list_keys = steps.store.list

    def list_then_prune(prefix: str) -> list[str]:
        keys = list_keys(prefix)
        if prefix.endswith("/steps/"):
            steps.store.list = list_keys  # type: ignore[method-assign]
            prune(Checkpoints(steps.store, NAME), Retention(keep_last=1))
        return keys

    steps.store.list = list_then_prune  # type: ignore[method-assign]
    assert [manifest.step for manifest in read(steps)] == list(range(20))
    assert steps.steps() == [0, 19]


@dataclass
class Counted:
    """A store that counts what is read of it, by the folder of the key."""

    store: FileStore
    read_of: Counter[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, key: str) -> bytes:
        self.read_of[key.split("/")[2]] += 1
        return self.store.read(key)


@pytest.mark.parametrize("keep_best", [None, "val/reward"])
def test_what_was_logged_is_read_once_and_only_if_it_matters(
    tmp_path: Path, keep_best: str | None
) -> None:
    """As the server does it: after each step, with what it read before."""
    store = Counted(FileStore(tmp_path / "store", create=True), Counter())
    steps = Checkpoints(store, NAME)
    retention = Retention(keep_last=2, keep_best=keep_best)
    removed: list[CheckpointInfo] = []
    for step in range(20):
        commit(steps, tmp_path, step)
        Checkpoints(store.store, NAME).log("val", step, {"reward": -float(step)})
        removed += prune(steps, retention)
    assert [info.step for info in removed] == list(range(1, 18))
    assert all(info.metrics == {"val/reward": -float(info.step)} for info in removed)
    assert store.read_of["metrics"] == (20 if keep_best else 17)


async def test_a_server_remembers_what_it_read_of_a_model(runtime: Runtime) -> None:
    models = runtime.models
    assert models.state(NAME).checkpoints is models.state(NAME).checkpoints
