"""What a server on another machine gets to reach the store: short-lived, and for the store only.

Nothing of it is written to disk, logged or put on a command line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from ..shared.progress import say_once
from .spec import ClusterSpec

if TYPE_CHECKING:
    import boto3
    from botocore.credentials import ReadOnlyCredentials

LIFETIMES = 12 * 3600, 3600
"""Lifetimes in seconds that STS is asked for: the first usually; the second for the root user of an
account, who gets no longer one."""
AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")


async def with_secrets(spec: ClusterSpec) -> ClusterSpec:
    """The spec with the secrets that its server needs beside the token. A server on this machine
    reads the user's own."""
    if spec.provider == "local":
        return spec
    return spec.model_copy(update={"secrets": await for_server(spec.store)})


async def for_server(store_url: str) -> dict[str, SecretStr]:
    """Make the variables of the environment with which a server reaches its store.

    Of a user's own keys STS makes credentials that hold for 12 h and for the store's prefix only.
    Where there is no STS, or it refuses, the keys themselves are handed on, and that is said.

    Raises:
        StoreAccessError: there are no credentials here, or they are refused.
    """
    if not store_url.startswith("s3://"):
        return {}
    return await asyncio.to_thread(_for_server, store_url)


def encode_credentials(variables: Mapping[str, SecretStr]) -> bytes:
    """The JSON of a `StoreCredentials` with its secrets, which its own JSON hides."""
    plain = {name: value.get_secret_value() for name, value in variables.items()}
    return json.dumps({"variables": plain}).encode()


def policy(store_url: str, partition: str = "aws") -> dict[str, Any]:
    """The IAM policy of a server: list, read, write and delete under the store's prefix."""
    from ..store.s3 import parse_url

    bucket, prefix = parse_url(store_url)
    arn = f"arn:{partition}:s3:::{bucket}"
    below = f"{prefix}/*" if prefix else "*"
    listing: dict[str, Any] = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": arn}
    if prefix:
        listing |= {"Condition": {"StringLike": {"s3:prefix": below}}}
    return {
        "Version": "2012-10-17",
        "Statement": [
            listing,
            {"Effect": "Allow", "Action": "s3:ListBucketMultipartUploads", "Resource": arn},
            {
                "Effect": "Allow",
                "Action": [
                    "s3:GetObject",
                    "s3:PutObject",
                    "s3:DeleteObject",
                    "s3:AbortMultipartUpload",
                ],
                "Resource": f"{arn}/{below}",
            },
        ],
    }


def _for_server(store_url: str) -> dict[str, SecretStr]:
    import boto3
    from botocore.exceptions import NoCredentialsError

    from ..store.s3_errors import Translator

    errors = Translator(store_url, "the S3 endpoint")
    with errors("get credentials for the server"):
        session = boto3.Session()
        own = session.get_credentials()
        if own is None:
            raise NoCredentialsError
        endpoint = session.client("s3").meta.endpoint_url
        keys = own.get_frozen_credentials()
        if keys.token:
            until = getattr(own, "_expiry_time", None)
            found = _variables(keys.access_key, keys.secret_key, keys.token, until)
            say_once(
                "The server gets the credentials of your session as they are: they can do what "
                "you can. Keys of a user of their own would be narrowed to the store's prefix."
            )
        else:
            found = _narrowed(session, keys, endpoint, store_url)
    if not _of_amazon(endpoint):
        found["AWS_ENDPOINT_URL_S3"] = SecretStr(endpoint)
    if session.region_name:
        found["AWS_DEFAULT_REGION"] = SecretStr(session.region_name)
    return found


def _narrowed(
    session: boto3.Session, own: ReadOnlyCredentials, endpoint: str, store_url: str
) -> dict[str, SecretStr]:
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    from ..store.s3_errors import EXPIRED, SKEWED, WRONG_KEY, code_of

    sts = session.client("sts", region_name=session.region_name or "us-east-1")
    if _of_amazon(sts.meta.endpoint_url) and not _of_amazon(endpoint):
        sts = session.client("sts", region_name=sts.meta.region_name, endpoint_url=endpoint)
    document = json.dumps(policy(store_url, sts.meta.partition), separators=(",", ":"))
    why = ""
    for seconds in LIFETIMES:
        try:
            given = sts.get_federation_token(
                Name="art-cloud", Policy=document, DurationSeconds=seconds
            )["Credentials"]
            return _variables(
                given["AccessKeyId"],
                given["SecretAccessKey"],
                given["SessionToken"],
                given["Expiration"],
            )
        except (ClientError, ResponseParserError, KeyError) as error:
            code = code_of(error) if isinstance(error, ClientError) else "no STS"
            if code in (*WRONG_KEY, *EXPIRED, *SKEWED):
                raise
            why = code
    say_once(
        f"The server gets your own keys for {store_url}, which do not expire and may do more than "
        f"it needs: {sts.meta.endpoint_url} gives no narrower ones ({why}). Allow "
        "sts:GetFederationToken, or use keys that are for this bucket only."
    )
    return _variables(own.access_key, own.secret_key)


def _variables(
    access_key: str | None,
    secret_key: str | None,
    token: str | None = None,
    until: datetime | None = None,
) -> dict[str, SecretStr]:
    found: Mapping[str, str | None] = {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_SESSION_TOKEN": token,
        "AWS_CREDENTIAL_EXPIRATION": until.isoformat() if until else None,
    }
    return {name: SecretStr(value) for name, value in found.items() if value is not None}


def _of_amazon(url: str) -> bool:
    return (urlsplit(url).hostname or "").endswith(AMAZON)
