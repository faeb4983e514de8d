"""One server for each worker of pytest, shared by all tests that leave it standing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import openai
import pytest

import art_cloud as art

from ..rigs.server_process import TOKEN, ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, "--model", tiny_model, "--max-body", "8") as server:
        yield server
        assert server.terminate() == 0, server.output
    assert TOKEN not in server.output
    assert "Traceback" not in server.output


@pytest.fixture
async def backend(server: ServerProcess) -> AsyncIterator[art.Backend]:
    async with server.backend() as backend:
        yield backend


@pytest.fixture
async def model(backend: art.Backend, tiny_model: Path) -> art.TrainableModel:
    """A model of the test's own, at step 0."""
    model = art.TrainableModel(
        name=uuid4().hex, project="tests", base_model=str(tiny_model), lora=art.LoRAConfig(rank=8)
    )
    await model.register(backend)
    return model


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0
    ) as client:
        yield client
