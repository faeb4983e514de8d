#!/usr/bin/env python3
"""Look at a machine that you can log in to, and install art-cloud there. By hand: see README.md.

    prepare.py check [PYTHON]               what the machine has
    prepare.py wheels KEY                   the folder for a wheel that is to be installed
    prepare.py install KEY REQUIREMENT [LOCK]    an environment of that name, made once

Answers are JSON on standard output; a failure is a sentence on standard error and exit code 1.
Everything lies in ~/.art-cloud, which only its owner can read: environments in `envs/KEY`.

Needs Linux, Python 3.8 and nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path.home() / ".art-cloud"
OUTPUT_LINES = 15


class PrepareError(Exception):
    pass


def check(options: argparse.Namespace) -> dict[str, Any]:
    memory = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "memory_bytes": int(memory["MemAvailable"].split()[0]) * 1024,
        "disk_bytes": shutil.disk_usage(ROOT if ROOT.exists() else Path.home()).free,
        "time": time.time(),
        "poweroff_problem": _poweroff_problem(),
        "art_cloud": _version_of(options.python) if options.python else None,
        "environments": sorted(done.parent.name for done in (ROOT / "envs").glob("*/installed")),
        **_gpus(),
    }


def _poweroff_problem() -> str | None:
    """Why this user can't switch the machine off; None: it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if shutil.which("poweroff", path=path) is None:
        return "there is no poweroff"
    if os.geteuid() == 0:
        return None
    if shutil.which("sudo") is None:
        return "there is no sudo"
    code, output = _output_of("sudo", "-n", "-l", "poweroff", PATH=path)
    return f"sudo -n -l poweroff: {output or f'code {code}'}" if code else None


def _version_of(python: str) -> str:
    """The version of art-cloud that an environment has, with its server."""
    ask = "import art_cloud, art_server; print(art_cloud.__version__)"
    code, output = _output_of(python, "-P", "-c", ask)
    if code:
        why = output.splitlines()[-1] if output else "it says nothing"
        raise PrepareError(f"{python} has no art-cloud[server]: {why}")
    return output


def _gpus() -> dict[str, Any]:
    query = "--query-gpu=name,memory.total,driver_version"
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "gpu_problem": None}
    code, output = _output_of("nvidia-smi", query, "--format=csv,noheader")
    if code:
        return {"gpus": [], "gpu_problem": output}
    rows = [line.split(", ") for line in output.splitlines()]
    gpus = [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]
    return {"gpus": gpus, "gpu_problem": None}


def _output_of(*command: str, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return ended.returncode, ended.stdout.decode(errors="replace").strip()


def wheels(options: argparse.Namespace) -> dict[str, Any]:
    folder = ROOT / "wheels" / options.key
    folder.mkdir(parents=True, exist_ok=True)
    return {"path": str(folder)}


def install(options: argparse.Namespace) -> dict[str, Any]:
    folder = ROOT / "envs" / options.key
    done, python = folder / "installed", str(folder / "bin" / "python")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{options.key}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            uv = _uv()
            shutil.rmtree(folder, ignore_errors=True)  # of an installation that was killed
            _run(uv, "venv", "--quiet", "--python", ">=3.11", str(folder))
            # the build of torch that the driver can run
            backend = {"UV_TORCH_BACKEND": "auto"} if _gpus()["gpus"] else {}
            pins = ["--constraint", options.lock] if options.lock else []
            _run(uv, "pip", "install", "--python", python, options.requirement, *pins, **backend)
            done.touch()
    return {"python": python}


def _uv() -> str:
    """uv, which also gets a Python where the machine's own is too old."""
    tools = ROOT / "tools"
    places = [os.environ.get("PATH", ""), str(Path.home() / ".local" / "bin"), str(tools / "bin")]
    found = shutil.which("uv", path=os.pathsep.join(places))
    if found is None:
        _run(sys.executable, "-m", "venv", str(tools))
        _run(str(tools / "bin" / "pip"), "install", "--quiet", "uv")
    return found or str(tools / "bin" / "uv")


def _run(*command: str, **environment: str) -> None:
    code, output = _output_of(*command, **environment)
    if code:
        lines = output.splitlines()[-OUTPUT_LINES:]
        raise PrepareError("\n".join([f"{' '.join(command)} failed:", *lines]))


def main() -> None:
    os.umask(0o077)
    parser = argparse.ArgumentParser("prepare.py", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    checking = commands.add_parser("check")
    checking.set_defaults(call=check)
    checking.add_argument("python", nargs="?")
    placing = commands.add_parser("wheels")
    placing.set_defaults(call=wheels)
    placing.add_argument("key")
    installing = commands.add_parser("install")
    installing.set_defaults(call=install)
    installing.add_argument("key")
    installing.add_argument("requirement")
    installing.add_argument("lock", nargs="?")
    options = parser.parse_args()
    try:
        print(json.dumps(options.call(options)))
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
