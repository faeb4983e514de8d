"""What can't be meant, at the real server: a clear error each, and nothing lost or half-written."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

import art_cloud as art
from art_cloud.shared.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    ContextLengthError,
    RequestTooLargeError,
    StoreFullError,
)
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.synthetic import as_groups, batch

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


def steps_of(server: ServerProcess, model: art.TrainableModel) -> Checkpoints:
    return Checkpoints(open_store(str(server.store)), model.full_name)


# --- tokens


async def test_without_the_token_there_is_nothing(server: ServerProcess) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        await client.models.list()
    await client.close()
    assert TOKEN not in str(caught.value)
    with pytest.raises(AuthError):
        await art.connect(server.url, "wrong")
    routes = ["/", "/v1/models", "/art/v1/server", "/art/v1/jobs/x", "/nonsense"]
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as bare:
        for header in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN[:-1]}"}):
            answers = {
                ((answer := await bare.get(route, headers=header)).status_code, answer.text)
                for route in routes
            }
            [(status, text)] = answers  # not even which routes there are
            assert status == 401
            assert json.loads(text)["error"]["code"] == "invalid_api_key"


# --- inference


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (lambda model: model.get_inference_name(7), r"has no step 7\. It has steps 0\."),
        (lambda model: f"{model.project}/other", "is not registered with this server. Registered:"),
        (lambda model: f"{model.project}/other@3", "is not registered"),
        (lambda model: "gpt-4o", "The model 'gpt-4o' does not exist. There are: "),
        (lambda model: "../../etc/passwd", "does not exist"),
        (lambda model: "", "does not exist"),
    ],
)
async def test_a_model_that_is_not_there(
    client: openai.AsyncOpenAI,
    model: art.TrainableModel,
    name: Callable[[art.TrainableModel], str],
    words: str,
    stream: bool,
) -> None:
    with pytest.raises(openai.NotFoundError, match=words) as caught:
        await client.chat.completions.create(model=name(model), messages=MESSAGES, stream=stream)
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "2048"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 100}, "n is 100"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
async def test_a_request_that_cannot_be_meant(
    client: openai.AsyncOpenAI,
    model: art.TrainableModel,
    request_: dict[str, Any],
    words: str,
    stream: bool,
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await client.chat.completions.create(
            **{
                "model": model.get_inference_name(),
                "messages": MESSAGES,
                "stream": stream,
                **request_,
            }
        )


async def test_a_prompt_over_the_context_has_a_class_of_its_own(
    client: openai.AsyncOpenAI, model: art.TrainableModel
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(
            model=model.get_inference_name(), prompt=[5] * 3000, max_tokens=1
        )
    assert caught.value.code == ContextLengthError.code
    assert "3000" in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"model": 7}', b"{}"]
)
async def test_a_body_that_is_no_request(server: ServerProcess, body: bytes) -> None:
    async with server.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", '{"model": "M", "prompt": "\\ud800"}', "not JSON"),
        (
            "/v1/completions",
            '{"model": "M", "prompt": "x", "temperature": 1e-320}',
            "at least 0.01",
        ),
        ("/v1/completions", '{"model": "M", "prompt": "x", "n": %s}' % ("9" * 4400), "not JSON"),
        ("/v1/completions", '{"model": "M", "prompt": %s}' % ("[" * 300 + "]" * 300), "not JSON"),
        (
            "/v1/chat/completions",
            '{"model": "M", "messages": [{"role": "assistant", "tool_calls": '
            '[{"function": {"name": "f", "arguments": "%s"}}]}]}' % ("[" * 5000),
            "are not JSON",
        ),
        (
            "/art/v1/models/M/log",
            '{"split": "val", "step": 0, "metrics": {}, "trajectories": [{"group": BIG, '
            '"trajectory": 0, "reward": 1, "metrics": {}, "metadata": {}, "messages": [], '
            '"logs": [], "samples": []}]}'.replace("BIG", str(2**70)),
            "trajectories.0.group",
        ),
        (
            "/art/v1/models/M/log",
            '{"split": "val", "step": %s, "metrics": {}}' % ("9" * 300),
            "step",
        ),
        (
            "/art/v1/models/M/fork",
            '{"to_project": "p", "to_model": "m", "step": 9999999999}',
            "step",
        ),
        ("/art/v1/models/M/checkpoints/" + "9" * 4400, None, "no number of a step"),
        ("/art/v1/models/M/checkpoints/" + "9" * 300, None, "no number of a step"),
        ("/art/v1/models/M/checkpoints/-1", None, "no number of a step"),
    ],
)
async def test_odd_numbers_and_texts_are_the_clients_fault(
    server: ServerProcess, model: art.TrainableModel, path: str, body: str | None, words: str
) -> None:
    name = str(model.full_name)
    async with server.http() as http:
        content = None if body is None else body.replace('"M"', f'"{name}"').encode()
        answer = await http.request(
            "DELETE" if body is None else "POST", path.replace("M", name), content=content
        )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [7, [1], {"text": "x"}])
async def test_examples_with_odd_content_are_named(
    server: ServerProcess, model: art.TrainableModel, content: Any
) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "!"}]
    async with server.http() as http:
        job = await http.post(
            f"/art/v1/models/{model.full_name}/sft", json={"examples": [{"messages": messages}]}
        )
        events = await http.get(f"/art/v1/jobs/{job.json()['id']}/events")
    assert "Example 0: messages.content is" in events.text


async def test_a_body_that_is_too_large(server: ServerProcess, backend: art.Backend) -> None:
    large = bytes(20 << 20)

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 20):
            yield large[start : start + (1 << 20)]

    client = server.client()
    with pytest.raises(RequestTooLargeError, match=r"limit of 8 MiB\. Nothing was done"):
        await client.call("POST", "models/p/m/train", large)
    await client.close()
    async with server.http() as http:
        for content in (large, in_pieces()):
            answer = await http.post("/v1/chat/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
    assert (await backend.info()).jobs_queued == 0


async def test_routes_and_ids_that_are_not_there(server: ServerProcess) -> None:
    async with server.http() as http:
        for method, path, status, words in [
            ("GET", "/art/v1/nonsense", 404, "no route"),
            ("POST", "/v1/embeddings", 404, "no route"),
            ("DELETE", "/art/v1/server", 405, "Method Not Allowed"),
            ("GET", "/art/v1/jobs/nonsense", 404, "no job nonsense"),
            ("GET", "/art/v1/jobs/nonsense/events", 404, "no job nonsense"),
            ("GET", "/art/v1/models/p/unknown", 404, "is not registered"),
            ("GET", "/art/v1/models/p/-bad", 400, "not a valid name"),
        ]:
            answer = await http.request(method, path)
            assert (answer.status_code, path) == (status, path)
            assert words in answer.json()["error"]["message"]
        bad_id = await http.post(
            "/art/v1/models/p/m/train", content=b"x", headers={"Art-Call-Id": "seventeen"}
        )
        assert (bad_id.status_code, "not a UUID" in bad_id.text) == (400, True)


async def test_base_models_that_cannot_be_had(
    backend: art.Backend, tiny_model: Path, tmp_path: Path
) -> None:
    model = art.TrainableModel(
        name=uuid4().hex, project="tests", base_model=str(tmp_path / "nothing")
    )
    with pytest.raises(ConflictError, match="One server holds one base model"):
        await model.register(backend)


# --- starting


async def test_a_path_without_a_model_in_it(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with ServerProcess(tmp_path / "one") as server:
        async with server.backend() as backend:
            model = art.TrainableModel(name="m", project="p", base_model=str(missing))
            with pytest.raises(ConfigError, match="could not be loaded"):
                await model.register(backend)
            assert (await backend.info()).base_model is None
        assert steps_of(server, model).steps() == []
    refused(ServerProcess(tmp_path / "two", "--model", missing), "could not be loaded")


def refused(server: ServerProcess, words: str) -> None:
    """It ends at once, with one clear line."""
    server.launch()
    assert server.ended() == 1
    last = server.output.splitlines()[-1]
    assert last.startswith("art-server: ")
    assert words in last
    assert "Traceback" not in server.output
    assert not (server.state / "endpoint.json").exists()


def test_servers_that_do_not_start(tmp_path: Path, server: ServerProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(ServerProcess(tmp_path / "a", "--port", str(port)), f"Port {port}")
    refused(ServerProcess(tmp_path / "b", token=None), "No token: set ART_CLOUD_TOKEN")
    refused(ServerProcess(tmp_path / "c", store=Path("gs://bucket/x")), "no store of kind 'gs'")
    refused(ServerProcess(tmp_path / "d", "--name", "../x"), "not a valid name")
    second = ServerProcess(tmp_path / "e")
    second.state = server.state
    second.launch()
    assert second.ended() == 1
    assert "another server uses this folder" in second.output.splitlines()[-1]
    (tmp_path / "file").touch()
    blocked = ServerProcess(tmp_path / "f")
    blocked.state = tmp_path / "file" / "state"
    refused(blocked, "--state")
    wrong = ServerProcess(tmp_path / "g", "--port", "70000").launch()
    assert wrong.ended() == 2
    assert "not between 0 and 65535" in wrong.output


# --- the disk


async def test_a_disk_without_space_for_the_next_step(tmp_path: Path, tiny_model: Path) -> None:
    """The process may write files of some size only, which is what a full disk looks like to it."""
    server = ServerProcess(tmp_path, "--model", tiny_model)
    model = art.TrainableModel(
        name="m", project="p", base_model=str(tiny_model), lora=art.LoRAConfig(rank=8)
    )
    data = as_groups(batch(model.full_name, 1))
    with server:
        async with server.backend() as backend:
            await model.register(backend)
            await backend.train(model, data)
        assert server.terminate() == 0
    steps = steps_of(server, model)
    before = steps.read(1)
    sizes = {path: blob.size for path, blob in before.files.items()}
    server.largest_file = sizes["adapter/adapter_model.safetensors"] + 1000
    assert sizes["optimizer.safetensors"] > server.largest_file

    # what it can't even fetch is not served, and not lost either
    server.launch()
    assert server.ended() == 1
    assert "no space left" in server.output.splitlines()[-1]

    server.largest_file = None
    with server:
        import resource

        limit = sizes["optimizer.safetensors"] - 1
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        async with server.backend() as backend:
            await model.register(backend)
            with pytest.raises(StoreFullError, match="Free some space"):
                await backend.train(model, data)
            assert steps.newest() == before
            assert await model.get_step() == 1
            infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, infinite)
            assert (await backend.train(model, data)).step == 2
    assert list((server.store / ".staging").iterdir()) == []


async def test_damage_in_the_store_hurts_the_model_that_it_is_in(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path)
    lost, kept = (
        art.TrainableModel(name=name, project="p", base_model=str(tiny_model))
        for name in ("lost", "kept")
    )
    with server:
        async with server.backend() as backend:
            await lost.register(backend)
            await lost.train_sft([[*MESSAGES, {"role": "assistant", "content": "5"}]])
            await kept.register(backend)
        assert server.terminate() == 0
        steps = steps_of(server, lost)
        blob = steps.read(1).files["adapter/adapter_model.safetensors"]
        damaged = server.store / "blobs" / blob.sha256
        damaged.write_bytes(damaged.read_bytes()[::-1])
        server.start()
        async with server.backend() as backend:
            await kept.register(backend)
            with pytest.raises(art.CorruptBlobError, match=blob.sha256):
                await lost.register(backend)
            await kept.train_sft([[*MESSAGES, {"role": "assistant", "content": "5"}]])
            assert await kept.get_step() == 1
