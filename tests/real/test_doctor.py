"""`art-cloud doctor` and what it finds: a box behind a real sshd, a store, a cluster that ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from art_cloud.cli.main import app
from art_cloud.clusters.registry import Registry

from ..rigs.ssh_box import Box, empty_at_the_end, spec
from ..rigs.sshd import needs_sshd

pytestmark = needs_sshd


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with empty_at_the_end(Box(tmp_path / "box")) as box:
        yield box


async def test_doctor_looks_at_hosts_and_stores(box: Box, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    record, _ = Registry().claim("one", spec(box.asked, store="file:///of/the/box"))
    Registry().set_state(record, "running")
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["doctor", "--json", "--store", str(store)]
    )
    found = {check["subject"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 0, result.output
    assert found["host gpu-box"]["state"] == "ok"
    assert "it runs on the CPU" in found["host gpu-box"]["message"]
    assert found[f"store {store.as_uri()}"]["message"] == "Written, read and removed"
    assert not any(path.is_file() for path in store.rglob("*"))
    assert found["cluster one"]["cure"].endswith("forget it: art-cloud down one")
    assert "store file:///of/the/box" not in found

    box.known_hosts.write_text("")
    result = await asyncio.to_thread(CliRunner().invoke, app, ["doctor"])
    assert result.exit_code == 1
    assert "broken  host gpu-box: The host key of gpu-box is not known" in result.stdout
