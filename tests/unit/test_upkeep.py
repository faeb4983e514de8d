"""A whole store: garbage, also while a step is made, and damage."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from art_cloud.shared.errors import StoreError, StoreUnavailableError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.files import FileStore
from art_cloud.store.garbage import Garbage, collect_garbage, find_garbage, models, verify

from .test_checkpoints import commit, contents, draft, folder_of

NAME, OTHER = ModelName("games", "agent"), ModelName("other", "one")
DAY = timedelta(hours=24)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store", create=True)


@pytest.fixture
def steps(store: FileStore, tmp_path: Path) -> Checkpoints:
    steps = Checkpoints(store, NAME)
    for step in range(3):
        commit(steps, tmp_path, step)
    return steps


def age(store: FileStore, hours: float) -> None:
    """Let all that is there have been stored so long ago."""
    for path in store.blob_folder.iterdir():
        then = path.stat().st_mtime - hours * 3600
        os.utime(path, (then, then))


def test_models_are_found_by_their_steps(store: FileStore, steps: Checkpoints) -> None:
    assert models(store) == [NAME]
    steps.fork(OTHER)
    store.create("games/prompted/metrics/000000-a.json", b"{}")
    assert models(store) == [NAME, OTHER]


def test_only_what_no_step_of_any_model_names_is_garbage(
    store: FileStore, steps: Checkpoints
) -> None:
    age(store, 48)
    assert find_garbage(store).blobs == []
    steps.fork(OTHER, 0)
    gone = steps.read(1).files
    steps.delete(0)
    steps.delete(1)
    garbage = find_garbage(store)
    assert {blob.sha256 for blob in garbage.blobs} == {
        gone[name].sha256 for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors")
    }
    assert collect_garbage(store, garbage) == garbage.blobs
    assert find_garbage(store).blobs == []
    assert verify(store, models(store))[1] == []


def test_what_is_young_stays(store: FileStore, steps: Checkpoints) -> None:
    steps.delete(0)
    age(store, 23)
    assert find_garbage(store).blobs == []
    assert len(find_garbage(store, timedelta(hours=22)).blobs) == 2


def test_a_step_in_progress_loses_nothing(
    store: FileStore, steps: Checkpoints, tmp_path: Path
) -> None:
    """Its blobs are there and its manifest is not: new ones, and old ones that it found there."""
    folder = folder_of(tmp_path, 0)  # the content of step 0, which is garbage by now
    (folder / "new.safetensors").write_bytes(b"new")
    steps.delete(0)
    age(store, 48)
    garbage = find_garbage(store)
    assert len(garbage.blobs) == 2
    files = steps.upload(folder)
    assert find_garbage(store).blobs == []
    assert collect_garbage(store, garbage) == []
    made = steps.create(draft(3).model_copy(update={"files": files}))
    assert contents(steps.fetch(made, tmp_path / "fetched")) == contents(folder)


def test_garbage_collection_races_with_uploads(
    store: FileStore, steps: Checkpoints, tmp_path: Path
) -> None:
    """Content is uploaded and collected by two threads at once, over and over: whatever the order,
    what was uploaded last is there."""
    steps.delete(0)
    folder = folder_of(tmp_path, 0)
    for _ in range(100):
        age(store, 48)
        garbage = find_garbage(store)
        start = threading.Barrier(2)

        def collect(garbage: Garbage = garbage, start: threading.Barrier = start) -> None:
            start.wait()
            collect_garbage(store, garbage)

        thread = threading.Thread(target=collect)
        thread.start()
        start.wait()
        files = steps.upload(folder)
        thread.join()
        for blob in files.values():
            store.get_blob(blob, tmp_path / "blob")


def test_a_manifest_that_is_not_understood_stops_the_collection(
    store: FileStore, steps: Checkpoints
) -> None:
    steps.delete(0)
    age(store, 48)
    store.create("games/later/steps/000000.json", b'{"format": 2}')
    with pytest.raises(StoreError, match="newer art-cloud"):
        find_garbage(store)


def test_damage_is_found_with_the_steps_that_it_hurts(store: FileStore, steps: Checkpoints) -> None:
    steps.fork(OTHER, 1)
    assert verify(store, [NAME, OTHER]) == (7, [])
    files = steps.read(1).files
    (store.blob_folder / files["optimizer.safetensors"].sha256).unlink()
    (store.blob_folder / files["trainer.json"].sha256).write_bytes(b"[]")
    told: list[tuple[int, int]] = []
    count, damage = verify(store, [NAME, OTHER], lambda done, total: told.append((done, total)))
    assert count == 7
    assert {one.what: list(one.hurt) for one in damage} == {
        "missing": ["games/agent@1 optimizer.safetensors", "other/one@1 optimizer.safetensors"],
        "corrupt": [
            "games/agent@0 adapter/adapter_config.json",
            "games/agent@0 trainer.json",
            "games/agent@1 adapter/adapter_config.json",
            "games/agent@1 trainer.json",
            "games/agent@2 adapter/adapter_config.json",
            "games/agent@2 trainer.json",
            "other/one@1 adapter/adapter_config.json",
            "other/one@1 trainer.json",
        ],
    }
    assert verify(store, [])[0] == 0


def test_a_store_that_is_away_is_not_called_damaged(
    store: FileStore, steps: Checkpoints, tmp_path: Path
) -> None:
    store.root.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailableError):
        verify(store, [NAME])
    with pytest.raises(StoreUnavailableError):
        find_garbage(store)
