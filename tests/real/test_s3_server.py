"""A real server whose steps are in a bucket: new credentials, and another machine that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

import art_cloud as art
from art_cloud.client.http import ServerClient
from art_cloud.clusters.credentials import encode_credentials
from art_cloud.shared.errors import InvalidRequestError
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.s3_servers import S3Server
from ..rigs.server_process import STARTING_SECONDS, TOKEN
from ..rigs.waiting import wait_until

NAME = ModelName("games", "bucket")


@contextmanager
def server(folder: Path, tiny_model: Path, store: str, env: dict[str, str]) -> Iterator[str]:
    """`art-server` with these variables and no others of AWS: its URL. Killed with the block."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command = [sys.executable, "-m", "art_server", "--model", str(tiny_model)]
    command += ["--state", str(folder / "state"), "--store", store]
    endpoint = folder / "state" / "endpoint.json"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=inherited | env | {"ART_CLOUD_TOKEN": TOKEN}, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: endpoint.exists() or process.poll() is not None, STARTING_SECONDS)
        assert process.poll() is None, (folder / "server.log").read_text()
        yield json.loads(endpoint.read_text())["url"]
    finally:
        process.kill()
        process.wait()


def secret_in(folder: Path, secret: str) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if secret.encode() in path.read_bytes()]


async def test_a_step_is_in_the_bucket_and_another_machine_goes_on(
    moto: S3Server, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{moto.make_bucket()}/art"
    until = "2100-01-01T00:00:00+00:00"
    secret, renewed = "the-first-secret", "the-second-secret"
    env = moto.env | {"AWS_SECRET_ACCESS_KEY": secret, "AWS_CREDENTIAL_EXPIRATION": until}
    env |= {"AWS_SESSION_TOKEN": "the-first-token"}
    model = art.TrainableModel(name=NAME.model, project=NAME.project, base_model=str(tiny_model))
    examples = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]]

    with server(tmp_path / "first", tiny_model, url, env) as address:
        client = ServerClient(address, TOKEN, patience=60)
        async with art.Backend(address, TOKEN) as backend:
            await model.register(backend)
            assert (await backend.train_sft(model, examples)).step == 1
            info = await backend.info()
            assert info.store == url
            assert not info.single_writer
            assert info.credentials_until == datetime.fromisoformat(until)
            given = {
                "AWS_ACCESS_KEY_ID": "AKIANEW",
                "AWS_SECRET_ACCESS_KEY": renewed,
                "AWS_CREDENTIAL_EXPIRATION": "2101-01-01T00:00:00+00:00",
            }
            body = encode_credentials({name: SecretStr(value) for name, value in given.items()})
            await client.call("PUT", "credentials", body)
            assert (await backend.info()).credentials_until == datetime(2101, 1, 1, tzinfo=UTC)
            with pytest.raises(InvalidRequestError) as caught:
                await client.call("PUT", "credentials", body.replace(b"variables", b"other"))
            assert renewed not in str(caught.value)
            assert (await backend.train_sft(model, examples)).step == 2
        await client.close()
    for value in (secret, "the-first-token", renewed, TOKEN):
        assert secret_in(tmp_path / "first", value) == []

    with server(tmp_path / "second", tiny_model, url, moto.env) as address:
        async with art.Backend(address, TOKEN) as backend:
            await model.register(backend)
            assert await model.get_step() == 2
            assert (await backend.train_sft(model, examples)).step == 3

    moto.use(monkeypatch)
    assert Checkpoints(open_store(url), NAME).steps() == [0, 1, 2, 3]
