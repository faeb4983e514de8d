"""What SkyPilot runs on the machine: the shell script of its task, with the real server."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from art_cloud.clusters.providers.skypilot.provider import Options, _server
from art_cloud.clusters.spec import CAP_SECONDS, ClusterSpec

from ..rigs.waiting import until

TASK = Path(__file__).parents[2] / "launch" / "skypilot" / "server.yaml"


def task_of(**limits: Any) -> dict[str, str]:
    spec = ClusterSpec(provider="skypilot", store="s3://bucket", **limits)
    envs: dict[str, str] = _server(spec, Options(gpu="H100", python=sys.executable), "one")["envs"]
    return envs


def test_the_job_ends_from_outside_soon_after_its_deadline() -> None:
    assert task_of(deadline=300)["ART_CLOUD_SECONDS"] == f"{300 + CAP_SECONDS:.0f}"
    assert task_of()["ART_CLOUD_SECONDS"] == "0"  # never


async def test_a_server_that_is_suspended_for_good_lets_the_job_end(tmp_path: Path) -> None:
    """Also before it watches itself."""
    envs = task_of() | {
        "ART_CLOUD_SECONDS": "5",
        "ART_CLOUD_TOKEN": "t",
        "ART_CLOUD_ARGUMENTS": shlex.join(["--store", str(tmp_path / "store")]),
        "SKYPILOT_NODE_RANK": "0",
        "HOME": str(tmp_path),
    }
    script = yaml.safe_load(TASK.read_text())["run"]
    job = await asyncio.create_subprocess_exec(
        "bash", "-c", script, env=os.environ | envs, start_new_session=True
    )

    def server() -> list[psutil.Process]:
        process = psutil.Process(job.pid)
        return process.children() if process.name() == "timeout" else []

    await until(lambda: bool(server()))
    [suspended] = server()
    suspended.suspend()
    assert await job.wait() == 124
    assert not suspended.is_running()
