"""A launch by SkyPilot that is killed once there is a machine, and what is left of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from art_cloud.clusters import sweep
from art_cloud.clusters.registry import Registry

from .waiting import until


async def kill_launch(
    name: str, store: str, options: Mapping[str, Any], has_machine: Callable[[], bool]
) -> None:
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from art_cloud.cli.main import main; main()", "up", "skypilot"),
        *("--name", name, "--store", store, *arguments),
    )
    try:
        await until(lambda: has_machine() or process.returncode is not None)
    finally:
        process.kill()
        await process.wait()
    assert has_machine()


async def sweep_the_only(name: str) -> None:
    """It is found without doubt, is nobody's, and goes."""
    found, failures = await sweep.look()
    assert failures == []
    [ghost] = [one for one in found if one.name == name]
    assert ghost.kept is None
    await sweep.end([ghost])
    assert Registry().list() == []
