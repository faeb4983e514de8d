"""What uv must know of this machine where it runs in another environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KNOWN = ("SSL_CERT_FILE", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "HTTPS_PROXY", "https_proxy")


def uv_settings() -> dict[str, str]:
    """Where packages come from, and those that were fetched before."""
    settings = {
        "UV_CACHE_DIR": said("uv", "cache", "dir"),
        "UV_FIND_LINKS": said("pip", "config", "get", "global.find-links"),  # uv asks no pip
        **{name: os.environ[name] for name in KNOWN if name in os.environ},
    }
    return {name: value for name, value in settings.items() if value}


def said(tool: str, *arguments: str) -> str:
    command = [Path(sys.executable).parent / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
