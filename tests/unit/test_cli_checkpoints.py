"""`art-cloud checkpoints` and `art-cloud trajectories` as a user types them."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from pathlib import Path

import duckdb
import pytest
from art_server.steps.trajectory_log import write_logged
from typer.testing import CliRunner, Result

from art_cloud.cli.main import app
from art_cloud.clusters.registry import Registry, home
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.rollouts.batch import logged_trajectories
from art_cloud.shared.config import Retention
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import LogRequest
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.files import FileStore

from ..rigs.synthetic import as_groups, batch
from .test_checkpoints import commit, contents

MODEL = "games/agent"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def steps(tmp_path: Path) -> Checkpoints:
    """Five steps in the default store; the third one is best."""
    steps = Checkpoints(FileStore(home() / "store", create=True), ModelName.parse(MODEL))
    for step in range(5):
        commit(steps, tmp_path, step, metrics={"reward": step / 4, "entropy": 1.0})
        steps.log("val", step, {"reward": 1 - abs(step - 2) / 4})
    return steps


def run(line: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, shlex.split(line), input=answer)


def done(line: str, answer: str | None = None) -> str:
    result = run(line, answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(line: str) -> str:
    result = run(line)
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr


def test_models_are_listed_without_naming_one(steps: Checkpoints) -> None:
    steps.fork(ModelName("games", "other"), 1)
    table = done("checkpoints ls")
    assert "games/agent" in table
    assert "games/other" in table
    listed = json.loads(done("checkpoints ls --json"))
    assert [(m["model"], m["step"], m["kind"]) for m in listed] == [
        ("agent", 4, "train"),
        ("other", 1, "fork"),
    ]


def test_history_has_removed_steps_and_all_metrics(steps: Checkpoints) -> None:
    done(f"checkpoints rm {MODEL} 1 --yes")
    rows = list(csv.DictReader(io.StringIO(done(f"checkpoints history {MODEL} --csv"))))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[1]["entropy"] == "1.0"
    assert rows[2]["val/reward"] == "1.0"
    assert json.loads(done(f"checkpoints history {MODEL} --json")) == steps.history()
    table = done(f"checkpoints history {MODEL}")
    assert "val/reward" in table
    assert "1 more metrics with --json or --csv" in table
    assert "not both" in refused(f"checkpoints history {MODEL} --csv --json")


def test_a_model_is_deleted_whole(steps: Checkpoints) -> None:
    steps.fork(ModelName("games", "other"), 2)
    assert "numbers of steps, or --all" in refused(f"checkpoints rm {MODEL} --yes")
    assert run(f"checkpoints rm {MODEL} --all", "n").exit_code == 1
    assert steps.steps() == [0, 1, 2, 3, 4]

    assert "Removed all steps" in done(f"checkpoints rm {MODEL} --all --yes")
    assert "Removed all steps" in done(f"checkpoints rm {MODEL} --all", "y")
    assert [m["model"] for m in json.loads(done("checkpoints ls --json"))] == ["other"]
    assert f"{MODEL} has no steps there" in done(f"checkpoints ls {MODEL}")
    assert "was deleted at" in refused(f"checkpoints pull {MODEL}")
    assert "was deleted at" in refused(f"checkpoints fork {MODEL} games/third")
    assert "exists already" in refused(f"checkpoints fork games/other {MODEL}")
    assert "has no trajectories" in done(f"trajectories ls {MODEL}")

    assert "Removed" in done("checkpoints gc --older-than 0.001s --yes")
    assert "are whole" in done("checkpoints verify")
    assert "games/other@2 is in" in done("checkpoints pull games/other")


def test_pull_gives_the_step_that_was_asked_for(steps: Checkpoints) -> None:
    said = done(f"checkpoints pull {MODEL}")
    assert "games/agent@4 is in agent-step-4, a plain PEFT folder." in said
    assert "vllm serve tiny --enable-lora --lora-modules agent=agent-step-4" in said
    assert "games/agent@2 is in agent-step-2" in done(f"checkpoints pull {MODEL} --best val/reward")
    assert "already in agent-step-2" in done(f"checkpoints pull {MODEL} --step 2")
    assert set(contents(Path("agent-step-2"))) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert "holds something else" in refused(f"checkpoints pull {MODEL} --to agent-step-2")
    done(f"checkpoints pull {MODEL} --all --to whole")
    assert {"manifest.json", "optimizer.safetensors"} < set(contents(Path("whole")))
    assert "--step or --best" in refused(f"checkpoints pull {MODEL} --step 1 --best reward")
    assert "no step 9. It has steps 0-4" in refused(f"checkpoints pull {MODEL} --step 9")
    assert "has no steps" in refused("checkpoints pull games/none")
    assert "There are: " in refused(f"checkpoints pull {MODEL} --best val/score")


def test_what_is_pruned_is_shown_first_and_freed_by_gc(steps: Checkpoints) -> None:
    line = f"checkpoints prune {MODEL} --keep-best val/reward"
    assert done(f"{line} --dry-run") == "Would remove step 1, 3 of games/agent (2 steps).\n"
    assert run(line, answer="n\n").exit_code == 1
    assert steps.steps() == [0, 1, 2, 3, 4]
    assert "Removed step 1, 3 of games/agent (2 steps)." in done(line, answer="y\n")
    assert steps.steps() == [0, 2, 4]
    assert "Every step of games/agent is kept" in done(line)

    assert "has been unused for 24h" in done("checkpoints gc")
    for path in (home() / "store" / "blobs").iterdir():
        os.utime(path, (0, 0))
    assert "Would remove 4 blobs, 32 bytes" in done("checkpoints gc --dry-run")
    assert run("checkpoints gc", answer="n\n").exit_code == 1
    assert done("checkpoints gc --yes") == "Removed 4 blobs, 32 bytes.\n"
    assert "All 7 blobs are whole" in done("checkpoints verify")


def test_prune_takes_the_models_own_retention(steps: Checkpoints, tmp_path: Path) -> None:
    assert "registered without retention" in refused(f"checkpoints prune {MODEL}")
    commit(steps, tmp_path, 5, retention=Retention(keep_every=2))
    assert "step 1, 3 of" in done(f"checkpoints prune {MODEL} --dry-run")


def test_verify_names_the_steps_that_are_hurt(steps: Checkpoints) -> None:
    blob = steps.read(3).files["optimizer.safetensors"]
    (home() / "store" / "blobs" / blob.sha256).write_bytes(b"momentX\x03")
    result = run(f"checkpoints verify {MODEL}")
    assert result.exit_code == 1
    assert "corrupt" in result.stdout
    assert "games/agent@3 optimizer.safetensors" in result.stdout
    found = json.loads(run("checkpoints verify --json").stdout)
    assert found == {
        "blobs": 11,
        "damaged": [
            {
                "sha256": blob.sha256,
                "what": "corrupt",
                "hurt": ["games/agent@3 optimizer.safetensors"],
            }
        ],
    }
    assert "has no steps" in refused("checkpoints verify games/none")


def test_a_folder_has_no_urls(steps: Checkpoints) -> None:
    assert "is a folder, which has no URLs" in refused(f"checkpoints presign {MODEL}")


def test_a_cluster_means_its_store(tmp_path: Path) -> None:
    away = Checkpoints(FileStore(tmp_path / "away", create=True), ModelName.parse(MODEL))
    commit(away, tmp_path, 0)
    registry = Registry()
    registry.claim("here", ClusterSpec(provider="local", store=away.store.url))
    registry.claim("there", ClusterSpec(provider="moon", store="file:///data/store"))
    assert "games/agent@0" in done(f"checkpoints pull {MODEL} --name here")
    assert "is a folder on its machine" in refused(f"checkpoints pull {MODEL} --name there")
    assert "not both" in refused(f"checkpoints pull {MODEL} --name here --store x")


def test_trajectories_are_listed_and_pulled(steps: Checkpoints) -> None:
    assert "has no trajectories" in done(f"trajectories ls {MODEL}")
    for step, split in ((0, "val"), (1, "val"), (1, "test")):
        rows, samples = logged_trajectories(as_groups(batch(steps.name, step, groups=1)))
        entry = LogRequest(split=split, step=step, metrics={}, trajectories=rows, samples=samples)
        write_logged(steps, entry, None)
    listed = json.loads(done(f"trajectories ls {MODEL} --json"))
    assert [(file["split"], file["step"]) for file in listed] == [
        ("test", 1),
        ("val", 0),
        ("val", 1),
    ]
    assert "val" in done(f"trajectories ls {MODEL}")
    said = done(f"trajectories pull {MODEL} --split val")
    assert "2 files in agent-trajectories, 2 of them new" in said
    said = done(f"trajectories pull {MODEL}")
    assert "3 files in agent-trajectories, 1 of them new" in said
    [line] = [line for line in said.splitlines() if "duckdb -c" in line]
    assert duckdb.sql(shlex.split(line)[2]).fetchall() == [
        ("test", 1, 3, 0.5),
        ("val", 0, 3, 0.5),
        ("val", 1, 3, 0.5),
    ]
    assert "no trajectories" in refused(f"trajectories pull {MODEL} --split nope")
