"""A bucket is looked after with the same commands as a folder."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow.fs
import pytest
from art_server.steps.trajectory_log import write_logged
from typer.testing import CliRunner

from art_cloud.cli.main import app
from art_cloud.rollouts.batch import logged_trajectories
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import LogRequest
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.garbage import collect_garbage, find_garbage, models, verify
from art_cloud.store.opening import open_store

from ..rigs.s3_servers import S3Server
from ..rigs.synthetic import as_groups, batch
from ..unit.test_checkpoints import commit, contents

NAME = ModelName("games", "agent")


@pytest.fixture
def steps(moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """Three steps in a bucket of the test's own."""
    moto.use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    steps = Checkpoints(open_store(f"s3://{moto.make_bucket()}/art", create=True), NAME)
    for step in range(3):
        commit(steps, tmp_path, step)
    return steps


def done(line: str) -> str:
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_presigned_urls_are_fetched_as_printed(
    steps: Checkpoints, moto: S3Server, tmp_path: Path
) -> None:
    said = done(f"checkpoints presign {NAME} --expires 5m --store {steps.store.url}")
    subprocess.run(
        ["bash", "-euc", said],
        check=True,
        env={"PATH": "/usr/bin:/bin", "CURL_CA_BUNDLE": str(moto.ca), "NO_PROXY": "*"},
    )
    done(f"checkpoints pull {NAME} --to pulled --store {steps.store.url}")
    assert contents(tmp_path / "agent-step-2") == contents(tmp_path / "pulled")
    assert moto.secret_key not in said


def test_what_no_step_needs_is_removed_from_a_bucket(
    steps: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models(steps.store) == [NAME]
    gone = steps.read(0).files["optimizer.safetensors"]
    steps.delete(0)
    soon = timedelta(seconds=-1)  # S3 tells whole seconds
    assert find_garbage(steps.store).blobs == []
    garbage = find_garbage(steps.store, soon)
    assert gone in garbage.blobs
    assert len(garbage.blobs) == 2
    day_ago = garbage.before - timedelta(days=1)
    assert collect_garbage(steps.store, replace(garbage, before=day_ago)) == []  # used since
    assert collect_garbage(steps.store, garbage) == garbage.blobs
    assert verify(steps.store, [NAME]) == (5, [])


def test_trajectories_in_a_bucket_are_read_there_and_pulled(
    steps: Checkpoints, moto: S3Server, tmp_path: Path
) -> None:
    for step in range(2):
        rows, samples = logged_trajectories(as_groups(batch(NAME, step, groups=1)))
        entry = LogRequest(split="val", step=step, metrics={}, trajectories=rows, samples=samples)
        write_logged(steps, entry, None)
    bucket = steps.store.url.removeprefix("s3://")
    there = pyarrow.fs.S3FileSystem(
        access_key=moto.access_key,
        secret_key=moto.secret_key,
        endpoint_override=moto.endpoint_url,
        tls_ca_file_path=str(moto.ca),
        region="us-east-1",
    )
    table = pd.read_parquet(f"{bucket}/{NAME}/trajectories", filesystem=there)
    assert table.groupby("step")["reward"].mean().to_dict() == {0: 0.5, 1: 0.5}
    assert len(json.loads(done(f"trajectories ls {NAME} --json --store {steps.store.url}"))) == 2
    done(f"trajectories pull {NAME} --to here --store {steps.store.url}")
    assert len(pd.read_parquet(tmp_path / "here")) == len(table)
