"""`art-cloud deploy`: what the hub would read, and what Together's API would be sent."""

from __future__ import annotations

import io
import re
import shlex
import ssl
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner, Result

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.files import FileStore
from art_cloud.store.opening import open_store

from ..rigs.s3_servers import S3Server
from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch
from ..unit.stand_in import serve
from ..unit.test_checkpoints import commit

KEY, HF_TOKEN = "together-key-of-a-test", "hf-token-of-a-test"
NAME = ModelName("games", "agent")


def run(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line))


class UploadRequest(BaseModel):
    """`ModelUploadRequest` of https://docs.together.ai/reference/upload-model."""

    model_config = ConfigDict(extra="forbid")

    model_name: str
    model_source: str
    model_type: Literal["model", "adapter"] = "model"
    base_model: str | None = None
    lora_model: str | None = None
    hf_token: str | None = None
    description: str | None = None


class Together:
    """The route of its API that we call. It refuses what the documented schema does not have."""

    def __init__(self) -> None:
        self.requests: list[UploadRequest] = []
        self.answer: Response | None = None

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/models", self.upload, methods=["POST"])])

    async def upload(self, request: Request) -> Response:
        if request.headers["authorization"] != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "Invalid API key provided"}}, 401)
        if self.answer is not None:
            return self.answer
        try:
            self.requests.append(UploadRequest.model_validate_json(await request.body()))
        except ValidationError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        name = self.requests[-1].model_name
        data = {"job_id": "job-1", "model_name": name, "model_source": "remote_archive"}
        return JSONResponse({"data": data, "message": "job created"})


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Together]:
    monkeypatch.chdir(tmp_path)
    receiver = Together()
    with serve(receiver.app()) as url:
        monkeypatch.setenv("TOGETHER_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("TOGETHER_API_KEY", KEY)
        monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
        yield receiver


@pytest.fixture
def in_bucket(moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    moto.use(monkeypatch)
    steps = Checkpoints(open_store(f"s3://{moto.make_bucket()}/art", create=True), NAME)
    commit(steps, tmp_path, 0)
    return steps


@pytest.fixture
def in_folder(tmp_path: Path) -> Checkpoints:
    steps = Checkpoints(FileStore(tmp_path / "store", create=True), NAME)
    commit(steps, tmp_path, 0)
    return steps


async def test_a_repository_for_the_hub(
    server: ServerProcess,
    backend: art.Backend,
    model: art.TrainableModel[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    await backend.train(model, as_groups(batch(model.full_name, 0)))
    await model.log(metrics={"reward": 0.75})
    line = f"deploy hub {model.full_name} --best val/reward --store {server.store} --to out"
    refused = run(line)
    assert refused.exit_code == 1
    assert "--base-model OWNER/NAME" in refused.stderr
    assert not (tmp_path / "out").exists()
    done = run(f"{line} --base-model Qwen/Qwen3-0.6B")
    assert done.exit_code == 0, done.output
    assert f"hf upload OWNER/{model.name} out" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config = LoraConfig.from_pretrained(str(tmp_path / "out"))
    assert (config.base_model_name_or_path, config.r) == ("Qwen/Qwen3-0.6B", 8)
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.library_name == "peft"
    assert "| `val/reward` | 0.75 |" in card.text
    assert str(tmp_path) not in card.content


def test_together_fetches_an_archive_from_the_store(
    in_bucket: Checkpoints, together: Together, moto: S3Server
) -> None:
    for _ in range(2):
        done = run(f"deploy together games/agent --store {in_bucket.store.url}")
        assert done.exit_code == 0, done.output
    assert "games/agent@0 as games-agent-step-0, by its job job-1" in done.stdout
    sent, again = together.requests
    assert (sent.model_name, sent.model_type) == ("games-agent-step-0", "adapter")
    assert sent.base_model == again.base_model == in_bucket.read(0).base_model
    assert sent.hf_token is None
    trust = ssl.create_default_context(cafile=str(moto.ca))
    archive = httpx.get(sent.model_source, verify=trust, trust_env=False).raise_for_status()
    seconds = re.search(r"(?:X-Amz-Expires|Expires)=(\d+)", sent.model_source)
    assert seconds
    assert int(seconds[1]) > 100 * 60
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert {(m.name, m.size) for m in tar} == {
            (path.removeprefix("adapter/"), blob.size)
            for path, blob in in_bucket.read(0).files.items()
            if path.startswith("adapter/")
        }
    assert KEY not in done.output
    assert moto.secret_key not in done.output


def test_together_fetches_from_the_hub(in_folder: Checkpoints, together: Together) -> None:
    line = f"deploy together games/agent --store {in_folder.store.url}"
    refused = run(line)
    assert refused.exit_code == 1
    assert "art-cloud deploy hub" in refused.stderr
    source = "https://huggingface.co/owner/agent"
    done = run(f"{line} --source {source} --base-model Qwen/Qwen3-8B")
    assert done.exit_code == 0, done.output
    [sent] = together.requests
    assert (sent.model_source, sent.base_model) == (source, "Qwen/Qwen3-8B")
    assert sent.hf_token == HF_TOKEN
    assert HF_TOKEN not in done.output


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JSONResponse({"error": {"message": "no such base"}}, 400), "adapter: no such base"),
        (Response("<html>\n  Bad gateway", 502), "status 502"),
        (JSONResponse({"ok": True}), "before you try again"),
    ],
)
def test_what_together_refuses_is_said(
    answer: Response, said: str, in_folder: Checkpoints, together: Together
) -> None:
    together.answer = answer
    line = f"deploy together games/agent --store {in_folder.store.url} --source https://h.co/a/b"
    refused = run(line)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert "Traceback" not in refused.output


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TOGETHER_API_KEY", "wrong", "Invalid API key provided"),
        ("TOGETHER_API_KEY", "", "TOGETHER_API_KEY is not set"),
        ("TOGETHER_BASE_URL", "http://127.0.0.1:9", "did not answer"),
    ],
)
def test_a_wrong_key_or_address_is_said(
    variable: str,
    value: str,
    said: str,
    in_folder: Checkpoints,
    together: Together,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    line = f"deploy together games/agent --store {in_folder.store.url} --source https://h.co/a/b"
    refused = run(line)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert KEY not in refused.output
