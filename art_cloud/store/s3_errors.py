"""What went wrong with an S3 store, told apart: what a retry helps with, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError as URLLib3Error

from ..shared.errors import StoreAccessError, StoreError, StoreFullError, StoreUnavailableError
from .base import NO_SPACE

BROKEN_BODY = (
    boto.IncompleteReadError,
    boto.ReadTimeoutError,
    boto.ResponseStreamingError,
    URLLib3Error,
)
"""An answer that began and did not end."""
NOT_THERE = ("NoSuchKey", "404", "NotFound")
LOST = ("PreconditionFailed", "412")
"""Somebody else's write was first."""
MEANWHILE = ("ConditionalRequestConflict", "OperationAborted", "409")
"""Somebody else's write is under way: who won is known once it is over."""
REFUSED_CONDITION = ("NotImplemented", "501")
WRONG_KEY = (
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "AuthorizationHeaderMalformed",
)
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken")
DENIED = ("AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden")
DAMAGED = ("XAmzContentSHA256Mismatch", "BadDigest")
"""What arrived is not what was sent."""
SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge", "507")
BUSY = ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "TooManyRequests")
ELSEWHERE = ("PermanentRedirect", "301", "IllegalLocationConstraintException")

ACTIONS = {
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}
"""Operations whose action in an IAM policy has another name."""


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def check_whole(announced: int | None, arrived: int) -> None:
    """Raise one of `BROKEN_BODY` for an answer that was cut, be it within its headers."""
    if announced != arrived:
        raise boto.IncompleteReadError(actual_bytes=arrived, expected_bytes=announced or 0)


class Translator:
    """Names the store, its endpoint and what was tried in every error; credentials in none."""

    def __init__(self, url: str, endpoint: str) -> None:
        self.url = url
        self.endpoint = endpoint
        self.bucket = url.removeprefix("s3://").partition("/")[0]

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Raise what boto3 raises in the block as a `StoreError`; `what` could not be done."""
        try:
            yield
        except ClientError as error:
            raise self.of_answer(what, error) from error
        except ResponseParserError as error:
            raise self._no_s3(what) from error
        except (BotoCoreError, URLLib3Error) as error:
            raise self.of_connection(what, error) from error
        except OSError as error:
            raise _of_this_machine(what, error) from error

    def of_answer(self, what: str, error: ClientError) -> StoreError:  # noqa: PLR0911
        code = code_of(error)
        about: dict[str, Any] = dict(error.response.get("ResponseMetadata", {}))
        status = int(about.get("HTTPStatusCode", 0))
        failed = f"Could not {what}"
        if code in WRONG_KEY:
            return StoreAccessError(
                f"{failed}: {self.endpoint} does not accept the access key or its secret ({code}). "
                "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and "
                "AWS_DEFAULT_REGION."
            )
        if code in EXPIRED:
            return StoreAccessError(
                f"{failed}: the credentials for {self.url} have expired or were revoked ({code}). "
                "Log in again (aws sso login) or give new ones, and repeat. Nothing is lost."
            )
        if code in SKEWED:
            return StoreError(
                f"{failed}: this machine's clock differs too much from that of {self.endpoint}, "
                f"which has {_date(about)}. Set the clock (timedatectl set-ntp true) and repeat."
            )
        if code in DENIED:
            action = ACTIONS.get(error.operation_name, f"s3:{error.operation_name}")
            return StoreAccessError(
                f"{failed}: the credentials lack the permission {action} in {self.url}. Have it "
                "added to the policy of the user or role, or use other credentials."
            )
        if code == "NoSuchBucket":
            return StoreUnavailableError(
                f"{failed}: {self.endpoint} has no bucket {self.bucket}. Check the store's URL and "
                f"the endpoint, or make the bucket: aws s3 mb s3://{self.bucket}"
            )
        if code in FULL:
            return StoreFullError(
                f"{failed}: no space left in {self.url} ({code}). The steps before it are whole. "
                "Free some space (`art-cloud checkpoints rm`) and repeat."
            )
        if code in ELSEWHERE:
            return StoreError(
                f"{failed}: bucket {self.bucket} is in another region. Name it in "
                "AWS_DEFAULT_REGION."
            )
        if code in BUSY or status >= 500 or status == 429:
            return StoreUnavailableError(
                f"{failed}: {self.endpoint} is overloaded or failing ({code or status}), also "
                f"after {about.get('RetryAttempts', 0)} repeats. Repeat later; what is stored is "
                "whole."
            )
        if code in DAMAGED:
            return StoreUnavailableError(
                f"{failed}: the content was damaged on its way to {self.endpoint}, which refused "
                "it each time. Check the network and proxies, then repeat."
            )
        if code in NOT_THERE or not code:
            return self._no_s3(what)
        return StoreError(f"{failed}: {self.endpoint} refused {error.operation_name} ({code}).")

    def _no_s3(self, what: str) -> StoreError:
        return StoreUnavailableError(
            f"Could not {what}: what answers at {self.endpoint} is no S3 server. Check "
            "AWS_ENDPOINT_URL_S3, and proxies on the way."
        )

    def of_connection(self, what: str, error: BotoCoreError | URLLib3Error) -> StoreError:
        failed = f"Could not {what}"
        if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return StoreError(
                f"{failed}: the certificate of {self.endpoint} could not be verified. If an "
                "authority of your own signed it, name that one's file in AWS_CA_BUNDLE."
            )
        if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
            return StoreAccessError(
                f"{failed}: there are no credentials. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, name a profile in AWS_PROFILE, or run `aws configure`."
            )
        if isinstance(error, _CREDENTIALS):
            return StoreAccessError(
                f"{failed}: the credentials for {self.url} can't be had "
                f"({type(error).__name__}). Check AWS_PROFILE, or log in again (aws sso login)."
            )
        if isinstance(error, boto.ParamValidationError):
            return StoreError(f"{failed}: boto3 does not accept the request for {self.url}.")
        return StoreUnavailableError(
            f"{failed}: {self.endpoint} did not answer ({_reason(error)}). Check its address and "
            "the network, then repeat. What is stored is whole."
        )


_CREDENTIALS = (
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.MetadataRetrievalError,
)


def _of_this_machine(what: str, error: OSError) -> StoreError:
    if error.errno in NO_SPACE:
        return StoreFullError(
            f"Could not {what}: no space left on this machine's disk ({error.strerror}). Free "
            "some and repeat. The store is whole."
        )
    return StoreError(f"Could not {what}: {error}. Check the file on this machine, and repeat.")


def _reason(error: BotoCoreError | URLLib3Error) -> str:
    if isinstance(error, (boto.ReadTimeoutError, boto.ConnectTimeoutError)):
        return "too slow: timed out"
    if isinstance(error, (*BROKEN_BODY, boto.ConnectionClosedError)):
        return "the connection broke"
    if isinstance(error, boto.EndpointConnectionError):
        unknown = "resolve" in str(error.kwargs["error"])
        return "its name is not known" if unknown else "no connection"
    return type(error).__name__


def _date(about: dict[str, Any]) -> str:
    return str(about.get("HTTPHeaders", {}).get("date", "another time"))
