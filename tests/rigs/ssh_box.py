"""A machine that can be logged in to, with a home of its own: what the tests of ssh share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
from pydantic import SecretStr

from art_cloud.clusters.spec import ClusterSpec
from art_cloud.links.endpoint import SSHRoute

from .sshd import Sshd


class Box(Sshd):
    """A machine with a home of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        super().__init__(folder, f"SetEnv HOME={self.home} {' '.join(options)}")

    def tool(self, name: str, script: str) -> None:
        """A program that logins find before the machine's own."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    @property
    def asked(self) -> dict[str, Any]:
        """Of a cluster there."""
        return {"host": self.host, "ssh_config": str(self.config), "python": sys.executable}

    @property
    def route(self) -> SSHRoute:
        return SSHRoute(host=self.host, config=str(self.config))

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def processes(self) -> list[psutil.Process]:
        """Those of clusters, and what they left."""
        found = []
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("HOME") == str(self.home):
                found.append(process)
        return [process for process in found if not process.name().startswith("sshd")]


@contextmanager
def empty_at_the_end(box: Box) -> Iterator[Box]:
    """At the end nothing may run there that the test did not end."""
    with box:
        try:
            yield box
            assert box.processes() == []
        finally:
            for process in box.processes():
                process.kill()


def spec(options: dict[str, Any], **changes: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "provider": "ssh",
            "store": "file:///of/the/box",
            "options": options,
            "token": SecretStr("one-token"),
            **changes,
        }
    )
