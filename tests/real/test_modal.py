"""The Modal provider: the real `modal` client against a control plane on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import art_cloud as art
from art_cloud import fleet
from art_cloud.errors import ConfigError, LaunchError, ProviderError
from art_cloud.providers import ClusterSpec, get_provider

from ..modal_plane import ModalPlane

modal = pytest.importorskip("modal", reason="pip install 'art-cloud[modal]'")
NAME = "agent"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    from art_cloud.providers import modal as provider

    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(provider, "PORT", free.getsockname()[1])
    sandboxes = tmp_path / "sandboxes"
    sandboxes.mkdir()
    with ModalPlane(sandboxes) as plane:
        for key, value in plane.environment.items():
            monkeypatch.setenv(key, value)
        yield plane
        assert plane.running == []


def spec(**options: str) -> ClusterSpec:
    return ClusterSpec(provider="modal", store="file:///nowhere", options={"gpu": "H100"} | options)


async def test_from_up_to_down(plane: ModalPlane, tiny_model: Path, tmp_path: Path) -> None:
    model = art.TrainableModel(name="agent", project="modal", base_model=str(tiny_model))
    store = (tmp_path / "store").as_uri()
    async with art.up("modal", name=NAME, gpu="H100", store=store) as backend:
        [sandbox] = plane.running
        assert backend.url.startswith("https://127.0.0.2:")
        await model.register(backend)
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
        )
        assert answer.choices[0].message.content is not None
        async with art.connect(name=NAME) as again:
            assert again.url == backend.url
        [found] = await fleet.status()
        assert (found.name, found.provider, found.state) == (NAME, "modal", "running")
        assert found.detail == sandbox.id
        lines = [line async for line in fleet.logs(NAME)]
        assert any("listens on" in line for line in lines)
        assert backend._token not in "\n".join([*lines, *sandbox.definition.entrypoint_args])
    assert await fleet.status() == []
