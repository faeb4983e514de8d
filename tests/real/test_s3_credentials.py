"""The credentials of a server elsewhere: for its prefix only, for a while, never written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from art_cloud.clusters.credentials import encode_credentials, for_server, policy, with_secrets
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import StoreAccessError
from art_cloud.shared.protocol import StoreCredentials
from art_cloud.store.opening import open_store
from art_cloud.store.s3 import S3Store

from ..rigs.s3_servers import S3Server, moto_server

EVERYTHING = {"Effect": "Allow", "Action": "*", "Resource": "*"}
NO_STS = {"Effect": "Deny", "Action": "sts:*", "Resource": "*"}


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[S3Server]:
    """A moto whose policies can be put to the test."""
    with moto_server(tmp_path / "moto") as server:
        yield server


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("art_cloud.clusters.credentials.say_once", said.append)
    return said


def plain(variables: dict[str, SecretStr]) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in variables.items()}


async def test_keys_of_a_user_become_a_token_for_the_prefix(
    strict: S3Server, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    strict.use(monkeypatch)
    access_key, secret_key = strict.make_user("owner", EVERYTHING)
    strict.check_access()
    strict.use(monkeypatch, AWS_ACCESS_KEY_ID=access_key, AWS_SECRET_ACCESS_KEY=secret_key)
    given = plain(await for_server("s3://bucket/team/art"))
    assert given["AWS_SESSION_TOKEN"]
    assert given["AWS_SECRET_ACCESS_KEY"] != secret_key
    assert given["AWS_ENDPOINT_URL_S3"] == strict.endpoint_url
    assert given["AWS_DEFAULT_REGION"] == "us-east-1"
    left = datetime.fromisoformat(given["AWS_CREDENTIAL_EXPIRATION"]) - datetime.now(UTC)
    assert timedelta(hours=11) < left < timedelta(hours=13)
    assert said == []


def test_the_policy_is_enough_for_a_store_and_ends_at_its_prefix(
    strict: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """moto's tokens have no policy of their own, and it reads no conditions: what STS would put on
    the token is put on a user, without the condition on what is listed."""
    strict.use(monkeypatch)
    bucket = strict.make_bucket()
    url = f"s3://{bucket}/team/art"
    document = policy(url)
    assert len(json.dumps(document)) < 2048
    listing = document["Statement"][0]
    assert listing.pop("Condition") == {"StringLike": {"s3:prefix": "team/art/*"}}
    strict.client().put_object(Bucket=bucket, Key="team/other/secret", Body=b"x")
    access_key, secret_key = strict.make_user("server", *document["Statement"])
    strict.check_access()
    strict.use(monkeypatch, AWS_ACCESS_KEY_ID=access_key, AWS_SECRET_ACCESS_KEY=secret_key)
    monkeypatch.setattr("art_cloud.store.s3_transfer.PART", 5 << 20)
    store = S3Store(url, create=True)
    assert not store.single_writer
    assert store.create("p/m/steps/000000.json", b"{}")
    assert store.list("") == ["p/m/steps/000000.json"]
    source = tmp_path / "source"
    source.write_bytes(bytes(11 << 20))
    blob = store.put_blob(source)
    store.get_blob(blob, tmp_path / "target")
    assert store.delete_blob(blob.sha256, datetime.now(UTC) + timedelta(hours=1))
    elsewhere = S3Store(f"s3://{bucket}/team/other")
    for refused in (
        lambda: elsewhere.read("secret"),
        lambda: elsewhere.create("mine", b""),
        lambda: elsewhere.delete("secret"),
        lambda: elsewhere.put_blob(source),
    ):
        with pytest.raises(StoreAccessError, match="lack the permission"):
            refused()


async def test_without_sts_the_keys_go_as_they_are_and_it_is_said(
    strict: S3Server, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    strict.use(monkeypatch)
    access_key, secret_key = strict.make_user("user", EVERYTHING, NO_STS)
    strict.check_access()
    strict.use(monkeypatch, AWS_ACCESS_KEY_ID=access_key, AWS_SECRET_ACCESS_KEY=secret_key)
    given = plain(await for_server("s3://bucket/art"))
    assert given["AWS_SECRET_ACCESS_KEY"] == secret_key
    assert "AWS_SESSION_TOKEN" not in given
    [message] = said
    assert "sts:GetFederationToken" in message
    assert secret_key not in message


@pytest.mark.xdist_group("swift")
async def test_swift_has_no_sts(
    swift: S3Server, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    swift.use(monkeypatch)
    given = plain(await for_server(f"s3://{swift.make_bucket()}/art"))
    assert given["AWS_SECRET_ACCESS_KEY"] == swift.secret_key
    assert len(said) == 1


async def test_a_session_goes_as_it_is(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    until = "2100-01-01T00:00:00+00:00"
    moto.use(monkeypatch, AWS_SESSION_TOKEN="token", AWS_CREDENTIAL_EXPIRATION=until)
    given = plain(await for_server("s3://bucket/art"))
    assert given["AWS_SESSION_TOKEN"] == "token"
    assert given["AWS_CREDENTIAL_EXPIRATION"] == until
    assert "narrowed" in said[0]


async def test_wrong_keys_and_none_are_refused(
    strict: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict.check_access()
    strict.use(monkeypatch)
    with pytest.raises(StoreAccessError, match="does not accept"):
        await for_server("s3://bucket/art")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreAccessError, match="no credentials"):
        await for_server("s3://bucket/art")


@pytest.mark.xdist_group("swift")
async def test_only_a_server_elsewhere_needs_any(
    swift: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    swift.use(monkeypatch)
    assert await for_server("file:///store") == {}
    spec = ClusterSpec(provider="local", store="s3://bucket/art")
    assert (await with_secrets(spec)).secrets == {}
    given = await with_secrets(spec.model_copy(update={"provider": "ssh"}))
    assert given.secrets["AWS_SECRET_ACCESS_KEY"].get_secret_value() == swift.secret_key
    assert swift.secret_key not in f"{given!r} {given.model_dump_json()}"


def test_a_store_goes_on_with_new_credentials(
    strict: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict.use(monkeypatch)
    url = f"s3://{strict.make_bucket()}/art"
    old, new = strict.make_user("old", EVERYTHING), strict.make_user("new", EVERYTHING)
    iam = strict.session().client("iam", endpoint_url=strict.endpoint_url, verify=str(strict.ca))
    strict.use(monkeypatch, AWS_ACCESS_KEY_ID=old[0], AWS_SECRET_ACCESS_KEY=old[1])
    store = open_store(url, create=True)
    assert store.credentials_until is None
    iam.delete_access_key(UserName="old", AccessKeyId=old[0])
    strict.check_access()
    with pytest.raises(StoreAccessError):
        store.create("key", b"")
    until = datetime(2100, 1, 1, tzinfo=UTC)
    sent = encode_credentials(
        {
            "AWS_ACCESS_KEY_ID": SecretStr(new[0]),
            "AWS_SECRET_ACCESS_KEY": SecretStr(new[1]),
            "AWS_CREDENTIAL_EXPIRATION": SecretStr(until.isoformat()),
        }
    )
    store.renew(StoreCredentials.model_validate_json(sent).variables)
    assert store.create("key", b"")
    assert store.credentials_until == until


def test_credentials_are_used_until_their_end(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = datetime.now(UTC) + timedelta(minutes=1)
    moto.use(monkeypatch, AWS_SESSION_TOKEN="token", AWS_CREDENTIAL_EXPIRATION=until.isoformat())
    store = S3Store(f"s3://{moto.make_bucket()}/art")
    assert store.create("key", b"")
    assert store.credentials_until == until
