"""Containers of the plane in `modal_plane`: Modal's real entrypoint in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modal_proto import api_pb2 as api

from .modal_sandboxes import new_id

EXIT_SECONDS = 30.0
"""How long a container may take to end after SIGTERM."""


@dataclass
class Container:
    folder: Path
    process: asyncio.subprocess.Process

    @property
    def runs(self) -> bool:
        return self.process.returncode is None

    async def stop(self) -> None:
        """SIGTERM; and a container takes all its processes along, whatever they do."""
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), EXIT_SECONDS)
        self.kill()
        await self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _place(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name.removeprefix("/root/").lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


async def start(
    folder: Path,
    arguments: api.ContainerArguments,
    code: Mapping[str, bytes],
    server_url: str,
    environment: Mapping[str, str],
) -> Container:
    """`code` is by its path in the container, where programs lie in /root."""
    arguments.task_id = new_id("ta")
    written = folder / "arguments"
    _place(folder, {**code, written.name: arguments.SerializeToString()})
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "modal._container_entrypoint"),
            cwd=folder,
            env={
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "HOME": str(folder),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(folder),
                "MODAL_CONTAINER_ARGUMENTS_PATH": str(written),
                "MODAL_IS_REMOTE": "1",
                "MODAL_SERVER_URL": server_url,
                "MODAL_TASK_ID": arguments.task_id,
                "MODAL_IMAGE_ID": arguments.function_def.image_id,
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Container(folder, process)
