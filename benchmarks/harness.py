"""What all benchmarks share: the machine in words, and the line that they print last."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
MACHINE = f"{platform.machine()}, {CORES} cores, Python {platform.python_version()}"


def report(
    benchmark: str,
    ours: float,
    peer: float,
    peer_name: str,
    ratio: float,
    unit: str,
    machine: str = MACHINE,
    **extra: Any,
) -> None:
    """Print the result as one JSON object; a ratio above 1 means that ours is better.

    With SAVE=1 in the environment it is kept in `results/` too, under its date.
    """
    result = {
        "benchmark": benchmark,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": round(ratio, 2),
        "unit": unit,
        "machine": machine,
    } | extra
    if os.environ.get("SAVE") == "1":
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        path = RESULTS / f"{benchmark}-{date}.json"
        path.write_text(json.dumps({"date": date, **result}, indent=2) + "\n")
    print(json.dumps(result))
