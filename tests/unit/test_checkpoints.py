"""Histories of steps on a real disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import pytest

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import (
    ConflictError,
    CorruptBlobError,
    NotFoundError,
    RivalError,
    StoreError,
    StoreFullError,
    UnreadableError,
)
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints, Manifest, best
from art_cloud.store.files import FileStore

NAME = ModelName("games", "agent")
FILES = {
    "adapter/adapter_model.safetensors": b"adapter",
    "adapter/adapter_config.json": b"{}",
    "optimizer.safetensors": b"moments",
    "trainer.json": b"{}",
}


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store", create=True)


@pytest.fixture
def steps(store: FileStore) -> Checkpoints:
    return Checkpoints(store, NAME)


def draft(step: int, **fields: Any) -> Manifest:
    return Manifest.model_validate(
        {
            "project": NAME.project,
            "model": NAME.model,
            "step": step,
            "kind": "train" if step else "init",
            "call_id": uuid4().hex,
            "parent": None,
            "base_model": "tiny",
            "lora": LoRAConfig(),
            "versions": {},
            **fields,
        }
    )


def folder_of(place: Path, step: int) -> Path:
    """A checkpoint's files; each step has another adapter and the same config."""
    folder = place / uuid4().hex
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(
            content + (b"" if path.endswith("json") else bytes([step % 256]))
        )
    return folder


def commit(steps: Checkpoints, place: Path, step: int, **fields: Any) -> Manifest:
    return steps.commit(draft(step, **fields), folder_of(place, step))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_step_comes_back_as_it_was(steps: Checkpoints, tmp_path: Path) -> None:
    assert (steps.steps(), steps.newest()) == ([], None)
    source = folder_of(tmp_path, 0)
    made = steps.commit(draft(0, metrics={"reward": 0.5}), source)
    assert steps.newest() == steps.read(0) == made
    assert contents(steps.fetch(made, tmp_path / "fetched")) == contents(source)
    assert set(contents(steps.fetch(made, tmp_path / "part", only="adapter/"))) == {
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
    }
    assert [path.name for path in tmp_path.glob("*.partial")] == []


@pytest.mark.parametrize("age", [timedelta(), timedelta(hours=2)])
def test_blobs_are_touched_before_the_manifest_only_if_their_upload_is_long_ago(
    steps: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: timedelta
) -> None:
    commit(steps, tmp_path, 0)
    folder, asked = folder_of(tmp_path, 1), list[str]()

    def noted(what: str) -> None:
        ask = getattr(FileStore, what)

        def note(self: FileStore, *arguments: Any) -> Any:
            asked.append(what)
            return ask(self, *arguments)

        monkeypatch.setattr(FileStore, what, note)

    files = steps.upload(folder)
    manifest = draft(1, files=files, created_at=datetime.now(UTC) - age)
    noted("touch_blob")
    noted("create")
    steps.create(manifest, folder)
    touches = ["touch_blob"] * len(files)
    assert asked == [*(touches if age else []), "create", *touches]


def test_the_newest_is_the_highest_number(steps: Checkpoints, tmp_path: Path) -> None:
    for step in (0, 9, 10, 1_000_000):
        commit(steps, tmp_path, step)
    assert steps.steps() == [0, 9, 10, 1_000_000]
    newest = steps.newest()
    assert newest is not None
    assert newest.policy == "games/agent@1000000"
    with pytest.raises(NotFoundError, match=r"no step 3\. It has steps 0, 9-10, 1000000\."):
        steps.read(3)
    with pytest.raises(NotFoundError, match="no steps at all"):
        Checkpoints(steps.store, ModelName("games", "other")).read(0)


def test_a_step_counts_for_the_call_that_made_it_first(steps: Checkpoints, tmp_path: Path) -> None:
    first = commit(steps, tmp_path, 1, call_id="a")
    assert commit(steps, tmp_path, 1, call_id="a", metrics={"reward": 9.0}) == first
    with pytest.raises(RivalError, match=r"Step 1 of games/agent was made by another call \(a,"):
        commit(steps, tmp_path, 1, call_id="b")
    assert steps.calls() == {"a": 1}
    assert steps.read(1) == first


def commit_in_a_child(steps: Checkpoints, draft: Manifest, folder: Path, kill_at: int) -> int:
    """Commit in a process of its own, killed at the `kill_at`-th line that it runs (0: at none).

    Returns how many lines it ran, when it was not killed.
    """
    result = folder.with_name("lines")
    pid = os.fork()
    if pid == 0:
        lines = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith(
                ("store/files.py", "store/checkpoints.py", "shutil.py")
            ):
                return None
            lines += event == "line"
            if kill_at and lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            steps.commit(draft, folder)
        finally:
            sys.settrace(None)
            result.write_text(str(lines))
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed == (kill_at > 0)
    return 0 if killed else int(result.read_text())


def test_killed_at_any_line_the_step_before_is_whole(
    store: FileStore, steps: Checkpoints, tmp_path: Path
) -> None:
    """The writer is killed between any two lines of its code: before, between and after the blobs,
    around the manifest."""
    before = commit(steps, tmp_path, 0)
    folder = folder_of(tmp_path, 1)
    after = draft(1)
    untouched = tmp_path / "untouched"
    shutil.copytree(store.root, untouched)
    total = commit_in_a_child(steps, after, folder, kill_at=0)
    outcomes = set()
    for line in range(1, total + 1, 3):
        shutil.rmtree(store.root)
        shutil.copytree(untouched, store.root)
        commit_in_a_child(steps, after, folder, kill_at=line)
        outcomes.add(tuple(steps.steps()))
        for step in steps.steps():
            steps.fetch(steps.read(step), tmp_path / f"fetched-{line}-{step}")
        assert steps.read(0) == before
        assert steps.commit(after, folder).call_id == after.call_id
    assert outcomes == {(0,), (0, 1)}


def test_damage_is_named_and_nothing_is_handed_out(steps: Checkpoints, tmp_path: Path) -> None:
    made = commit(steps, tmp_path, 0)
    blob = made.files["optimizer.safetensors"]
    damaged = tmp_path / "store" / "blobs" / blob.sha256
    damaged.write_bytes(b"m0ments\0")
    with pytest.raises(CorruptBlobError, match=blob.sha256):
        steps.fetch(made, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    assert list(tmp_path.glob("*.partial")) == []
    assert steps.fetch(made, tmp_path / "adapter-only", only="adapter/").is_dir()


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "adapter/../../escaped"])
def test_a_manifest_does_not_lead_out_of_its_folder(
    steps: Checkpoints, tmp_path: Path, path: str
) -> None:
    made = commit(steps, tmp_path, 0)
    text = made.model_dump_json().replace("trainer.json", path)
    (tmp_path / "store" / NAME.project / NAME.model / "steps" / "000001.json").write_text(text)
    with pytest.raises(UnreadableError, match="is damaged"):
        steps.read(1)


def test_what_another_version_wrote_is_no_guess(steps: Checkpoints, tmp_path: Path) -> None:
    made = commit(steps, tmp_path, 0)
    later = made.model_dump_json().replace('"format":1', '"format":2')
    steps.store.create(f"{NAME}/steps/000001.json", later.encode())
    with pytest.raises(StoreError, match="newer art-cloud"):
        steps.newest()


def test_a_fork_shares_the_content_and_goes_its_own_way(steps: Checkpoints, tmp_path: Path) -> None:
    commit(steps, tmp_path, 0)
    first = commit(steps, tmp_path, 1, metrics={"reward": 1.0})
    commit(steps, tmp_path, 2)
    blobs = set((tmp_path / "store" / "blobs").iterdir())

    copy = ModelName("games", "copy")
    forked = steps.fork(copy, 1)
    assert set((tmp_path / "store" / "blobs").iterdir()) == blobs
    assert (forked.policy, forked.kind, forked.files) == ("games/copy@1", "fork", first.files)
    assert forked.parent is not None
    assert forked.parent.model_dump() == {"project": "games", "model": "agent", "step": 1}
    assert forked.call_id != first.call_id

    assert steps.fork(ModelName("games", "newest")).step == 2
    with pytest.raises(ConflictError, match="games/copy exists already"):
        steps.fork(copy)
    with pytest.raises(NotFoundError, match=r"no step 7\. It has steps 0-2"):
        steps.fork(ModelName("games", "seventh"), 7)
    with pytest.raises(NotFoundError, match="has no steps"):
        Checkpoints(steps.store, ModelName("games", "none")).fork(ModelName("games", "x"))


def test_all_steps_but_the_newest_can_be_deleted(steps: Checkpoints, tmp_path: Path) -> None:
    for step in range(3):
        commit(steps, tmp_path, step)
    with pytest.raises(ConflictError, match=r"Step 2 is the newest .* Fork the step"):
        steps.delete(2)
    steps.delete(0)
    assert steps.steps() == [1, 2]
    with pytest.raises(NotFoundError, match="It has steps 1-2"):
        steps.delete(0)


def test_a_server_that_trains_a_deleted_model_makes_no_further_step(
    steps: Checkpoints, tmp_path: Path
) -> None:
    for step in range(3):
        commit(steps, tmp_path, step)
    steps.log("val", 1, {"reward": 0.5})
    end = steps.end()
    assert (end.step, end.kind, end.files) == (3, "end", {})
    assert steps.end() == end
    with pytest.raises(RivalError, match=r"not counted: games/agent was deleted at .* Choose"):
        commit(steps, tmp_path, 3)
    for begin in ("init", "push"):
        with pytest.raises(ConflictError, match="exists already"):
            commit(steps, tmp_path, 0, kind=begin)
    with pytest.raises(ConflictError, match="games/agent was deleted at"):
        steps.newest()
    assert (steps.infos(), steps.manifests(), steps.store.list("games/agent/metrics/")) == (
        *([], [], []),
    )
    assert [row["step"] for row in steps.history()] == [0, 1, 2]
    with pytest.raises(NotFoundError, match="has no steps"):
        Checkpoints(steps.store, ModelName("games", "none")).end()


def test_a_deletion_that_broke_off_is_finished(
    steps: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        commit(steps, tmp_path, step)

    def die(step: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(steps, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            steps.end()
    with pytest.raises(ConflictError, match="was deleted"):
        steps.newest()
    assert steps.end().step == 3
    assert steps.steps() == [3]


def test_the_number_of_a_removed_step_is_not_given_again(
    steps: Checkpoints, tmp_path: Path
) -> None:
    """Somebody who was stopped before he made step 1 comes late: it was made, and removed."""
    late, folder = draft(1), folder_of(tmp_path, 7)
    for step in range(3):
        commit(steps, tmp_path, step, call_id=f"call-{step}")
    steps.delete(1)
    with pytest.raises(
        RivalError, match=r"Step 1 of games/agent was made by another call \(call-1"
    ):
        steps.commit(late, folder)
    assert steps.steps() == [0, 2]
    assert steps.calls() == {f"call-{step}": step for step in range(3)}
    assert commit(steps, tmp_path, 1, call_id="call-1").step == 1  # and still counts once
    assert steps.steps() == [0, 2]


def test_steps_that_earlier_versions_removed(steps: Checkpoints, tmp_path: Path) -> None:
    """They moved the manifest to removed/, and wrote no first.json."""
    for step in range(4):
        commit(steps, tmp_path, step, call_id=f"call-{step}")
    for step in (0, 2):
        steps.delete(step)
        (tmp_path / f"store/games/agent/steps/{step:06d}.json").unlink()
    (tmp_path / "store/games/agent/first.json").unlink()
    assert steps.steps() == [1, 3]
    assert steps.calls() == {f"call-{step}": step for step in range(4)}
    assert steps.record(2).call_id == "call-2"
    with pytest.raises(NotFoundError, match="It has steps 1, 3"):
        steps.read(2)
    with pytest.raises(RivalError, match="call-2"):
        commit(steps, tmp_path, 2)
    with pytest.raises(ConflictError, match=r"games/agent exists already: it began with step 0"):
        commit(steps, tmp_path, 0)
    assert commit(steps, tmp_path, 4).step == 4
    assert {blob for one in steps.manifests() for blob in one.files.values()} == {
        blob for step in (1, 3, 4) for blob in steps.read(step).files.values()
    }


def test_a_model_begins_once(steps: Checkpoints, tmp_path: Path) -> None:
    """Whoever takes the name and is killed before the step is there: the next one finishes it."""
    commit(steps, tmp_path, 0)
    commit(steps, tmp_path, 1)
    name = ModelName("games", "copy")
    copy = Checkpoints(steps.store, name)
    forked = steps.fork(name)
    (tmp_path / "store/games/copy/steps/000001.json").unlink()  # as if it had been killed
    assert (copy.steps(), copy.newest()) == ([], None)
    assert [copy.beginning()] == [forked]
    with pytest.raises(
        ConflictError, match=r"games/copy exists already: it began with step 1 \(fork"
    ):
        copy.commit(draft(0, model="copy"), folder_of(tmp_path, 0))
    assert copy.newest() == forked
    contents(copy.fetch(forked, tmp_path / "fetched"))


@pytest.mark.parametrize("other", [{"base_model": "another"}, {"lora": LoRAConfig(rank=3)}, {}])
def test_step_0_is_the_same_whoever_makes_it_if_it_is(
    steps: Checkpoints, tmp_path: Path, other: dict[str, Any]
) -> None:
    first = commit(steps, tmp_path, 0, call_id="init")
    assert commit(steps, tmp_path, 0, call_id="init") == first
    with pytest.raises(ConflictError, match="exists already"):
        steps.commit(draft(0, call_id="init", **other), folder_of(tmp_path, 0 if other else 1))
    assert steps.newest() == first


def test_what_was_collected_before_the_manifest_is_put_there_again(
    steps: Checkpoints, tmp_path: Path
) -> None:
    """A step whose making took longer than garbage collection waits."""
    commit(steps, tmp_path, 0)
    folder = folder_of(tmp_path, 1)
    made = draft(1).model_copy(update={"files": steps.upload(folder)})
    blobs = tmp_path / "store" / "blobs"
    (blobs / made.files["optimizer.safetensors"].sha256).unlink()
    with pytest.raises(NotFoundError, match="holds no blob"):
        steps.create(made)
    assert steps.steps() == [0]
    steps.create(made, folder)
    assert contents(steps.fetch(made, tmp_path / "fetched")) == contents(folder)
    (blobs / made.files["optimizer.safetensors"].sha256).unlink()
    with pytest.raises(NotFoundError, match=r"games/agent@1 can't be forked, its content is gone"):
        steps.fork(ModelName("games", "copy"))
    assert Checkpoints(steps.store, ModelName("games", "copy")).steps() == []


def test_the_best_step_is_found_by_what_was_logged_last(steps: Checkpoints, tmp_path: Path) -> None:
    for step in range(3):
        commit(steps, tmp_path, step, metrics={"loss": -float(step)})
    steps.log("val", 0, {"reward": 0.1})
    steps.log("val", 1, {"reward": 0.9, "length": 3.0})
    steps.log("val", 2, {"reward": 0.5})
    assert best(steps.infos(), "val/reward").step == 1
    steps.log("val", 1, {"reward": 0.5})
    infos = steps.infos()
    assert infos[1].metrics == {"loss": -1.0, "val/reward": 0.5, "val/length": 3.0}
    assert best(infos, "val/reward").step == 2  # of equals, the later one
    assert best(infos, "loss").step == 0
    assert [info.bytes for info in infos] == [8 + 2 + 8 + 2] * 3
    with pytest.raises(NotFoundError, match="There are: loss, val/length, val/reward"):
        best(infos, "val/rewards")
    with pytest.raises(NotFoundError, match="no step 3"):
        steps.log("val", 3, {"reward": 1.0})


def test_no_space_for_a_step(steps: Checkpoints, tmp_path: Path, small_disk: Path) -> None:
    """On a disk of its own that fills up: the step before is whole, and once there is space again
    the same commit goes through."""
    store = FileStore(small_disk / "store", create=True)
    full = Checkpoints(store, NAME)
    before = commit(full, tmp_path, 0)
    folder = folder_of(tmp_path, 1)
    (folder / "optimizer.safetensors").write_bytes(bytes(range(256)) * 4096)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(8 << 20))
    later = draft(1)
    with pytest.raises(StoreFullError, match="art-cloud checkpoints rm"):
        full.commit(later, folder)
    assert full.newest() == before
    full.fetch(before, tmp_path / "fetched")
    assert list(store.staging.glob("*")) == []
    ballast.unlink()
    assert full.commit(later, folder) == full.read(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 4 MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here; test_store.py limits the process instead")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
