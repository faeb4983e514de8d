"""What SkyPilot runs on the machine: the shell script of its task, with the real server."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import yaml

import art_cloud as art
from art_cloud.clusters.providers.skypilot.provider import Options, _server
from art_cloud.clusters.spec import CAP_SECONDS, ClusterSpec

from ..rigs.waiting import until

LAUNCH = Path(__file__).parents[2] / "launch" / "skypilot"
TASK = LAUNCH / "server.yaml"


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


async def test_a_login_hands_over_the_secrets_and_is_told_where_the_server_listens(
    tmp_path: Path,
) -> None:
    """Its home is another than the job's, as on Slurm. What another boot left there is not taken
    for the server's."""
    envs = task_of() | {
        "ART_CLOUD_OWNER": uuid4().hex,
        "ART_CLOUD_ARGUMENTS": shlex.join(["--store", str(tmp_path / "store"), "--idle", "300"]),
        "SKYPILOT_NODE_RANK": "0",
        "HOME": str(tmp_path / "job"),
    }
    state = tmp_path / "job" / ".art-cloud" / "clusters" / "one"
    state.mkdir(parents=True)
    stale = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "process": f"boot/{os.getpid()}/7"}
    (state / "endpoint.json").write_text(json.dumps(stale))
    os.mkfifo(state / "secrets")

    async def login(*arguments: str) -> asyncio.subprocess.Process:
        variable = f"ART_CLOUD_OWNER={envs['ART_CLOUD_OWNER']}"
        return await asyncio.create_subprocess_exec(
            *("sh", str(LAUNCH / "reach.sh"), variable, *arguments),
            env=os.environ | {"HOME": str(tmp_path)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    first = await login("take")
    job = await asyncio.create_subprocess_exec(
        *("bash", "-c", yaml.safe_load(TASK.read_text())["run"]),
        env=os.environ | envs,
        start_new_session=True,
    )
    try:
        said, _ = await first.communicate(b"export ART_CLOUD_TOKEN='of a test'\n")
        assert said.splitlines()[:2] == [b"in", b"taken"]
        endpoint = json.loads(said.splitlines()[2])
        assert endpoint == json.loads((state / "endpoint.json").read_text())
        async with art.connect(endpoint["url"], "of a test") as backend:
            assert (await backend.info()).version == art.__version__
        second = await login()
        said, _ = await second.communicate()
        assert [json.loads(line) for line in said.splitlines()[1:]] == [endpoint]
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        assert await job.wait() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
