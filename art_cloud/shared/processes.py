"""The identity of a process, which no later process with the same id shares."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

MARK = "ART_CLOUD_MARK"
"""An environment variable that a server hands to all that it starts. By its value, the processes
that a killed server left behind are found."""


def identity_of(pid: int) -> str | None:
    """The boot of this machine, the process id and when the process was started.

    No other process has the same, neither after a reboot nor on another machine. None: there is no
    such process.
    """
    if sys.platform == "linux":
        with suppress(OSError, IndexError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return f"{boot}/{pid}/{stat[19]}"
        return None
    import psutil

    with suppress(psutil.Error):
        return f"{psutil.boot_time():.0f}/{pid}/{psutil.Process(pid).create_time():.2f}"
    return None
