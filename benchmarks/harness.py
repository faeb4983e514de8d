"""What all benchmarks share: the machine in words, and the line that they print last."""

from __future__ import annotations

import json
import os
import platform
from typing import Any


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


def report(
    benchmark: str,
    ours: float,
    peer: float,
    peer_name: str,
    ratio: float,
    unit: str,
    **extra: Any,
) -> None:
    """Print the result as one JSON object; a ratio above 1 means that ours is better."""
    result = {
        "benchmark": benchmark,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": round(ratio, 2),
        "unit": unit,
        "machine": machine(),
        **extra,
    }
    print(json.dumps(result))
