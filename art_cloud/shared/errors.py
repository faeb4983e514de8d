"""Everything that art-cloud raises on purpose.

A message says what happened, to what, and what to do next. The same classes are raised on the
server: `code` and `status` carry them over HTTP, and the client raises the class back.

    ArtCloudError
    ├── ConfigError                  a value that can't be meant: raised before anything is sent
    │   └── RegistryError            the list of clusters on this machine can't be read or written
    ├── InvalidRequestError          the server refused the request (400)
    │   ├── ContextLengthError       the prompt does not fit into the model's context
    │   ├── RequestTooLargeError     the body is over the server's limit (413)
    │   └── UntrainableError         trajectories that nothing can be learned from as they are
    ├── AuthError                    wrong or missing token (401)
    ├── NotFoundError                no such model, step, job or cluster (404)
    ├── ConflictError                the same id stands for something else already (409)
    │   └── RivalError               another server committed this step: two trainers, one model
    ├── ServerError
    │   ├── ServerUnavailableError   nobody answers at the address, or it went away
    │   ├── ServerStoppingError      the server is on its way out (503)
    │   └── VersionMismatchError     client and server are of different versions
    ├── JobError                     a job ended without its step
    │   └── CanaryError              the engine would serve other weights than were trained
    ├── StoreError
    │   ├── StoreUnavailableError    the store did not answer: never read as "empty"
    │   ├── StoreAccessError         the store refused the credentials: wrong, expired, not allowed
    │   ├── StoreFullError           no space left; the step before is whole
    │   ├── CorruptBlobError         content does not match its hash; nothing was loaded
    │   └── UnreadableError          a manifest that this version does not understand
    ├── RolloutError
    │   ├── RolloutTimeoutError      one rollout passed its deadline
    │   └── TooManyExceptionsError   more rollouts failed than `max_exceptions` allows
    ├── AnswerError                  a judge or a generator gave no answer that can be used
    └── ProviderError
        ├── LaunchError              the machine or its server did not come up
        │   └── NoMachineError       no machine could be had: nothing was started
        └── IncompleteListError      some machines can't tell what runs there; others did
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar


class ArtCloudError(Exception):
    """Root of the tree. `code` names the class on the wire, `status` is its HTTP status."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500


class ConfigError(ArtCloudError):
    """A value that can't be meant. It is raised before anything is sent or started."""

    code = "invalid_config"
    status = 400


class RegistryError(ConfigError):
    """The record of clusters on this machine can't be read or written."""

    code = "registry_unusable"


class InvalidRequestError(ArtCloudError):
    """The server refused the request: nothing was done (400)."""

    code = "invalid_request"
    status = 400


class ContextLengthError(InvalidRequestError):
    """The prompt and what may be sampled do not fit into the model's context (400)."""

    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """The body of the request is over the server's limit (413)."""

    code = "request_too_large"
    status = 413


class UntrainableError(InvalidRequestError):
    """A group or trajectory can't be trained on as it is. Nothing was sent, or nothing was done."""

    code = "untrainable"


class AuthError(ArtCloudError):
    """The token is missing or wrong (401)."""

    code = "invalid_api_key"
    status = 401


class NotFoundError(ArtCloudError):
    """There is no such model, step, job or cluster (404)."""

    code = "not_found"
    status = 404


class ConflictError(ArtCloudError):
    """The name or id stands for something else already (409)."""

    code = "conflict"
    status = 409


class RivalError(ConflictError):
    """Another server made this step of the model. This server trains the model no further."""

    code = "rival_server"
    call_id = ""
    """The id of the call that made the step; empty where it is not known."""


class ServerError(ArtCloudError):
    """The server failed, or what answered is no art-cloud server."""

    code = "server_error"


class ServerUnavailableError(ServerError):
    """Nobody answers at the address of the server, or the connection broke."""

    code = "server_unavailable"
    status = 502


class ServerStoppingError(ServerError):
    """The server is about to end and takes no new work. The call can be repeated (503)."""

    code = "server_stopping"
    status = 503


class VersionMismatchError(ServerError):
    """Client and server are of different versions. The message says which to upgrade."""

    code = "version_mismatch"
    status = 426


class JobError(ArtCloudError):
    """A call ended without its step. The message says why."""

    code = "job_failed"


class CanaryError(JobError):
    """The engine would serve other weights than were trained, so the step was not made."""

    code = "canary_failed"


class StoreError(ArtCloudError):
    """The store can't be read or written as it is."""

    code = "store_error"


class StoreUnavailableError(StoreError):
    """The store did not answer. Nothing is known of what it holds."""

    code = "store_unavailable"
    status = 503


class StoreAccessError(StoreError):
    """The store refused the credentials: they are wrong, expired, or do not allow this."""

    code = "store_access_denied"


class StoreFullError(StoreError):
    """There is no space left, in the store or on the server's disk. The steps before are whole."""

    code = "store_full"
    status = 507


class CorruptBlobError(StoreError):
    """Content in the store does not match its hash. Nothing was loaded."""

    code = "corrupt_blob"


class UnreadableError(StoreError):
    """A file in the store is damaged, or a newer art-cloud wrote it. Only its model is hurt."""

    code = "unreadable"


class RolloutError(ArtCloudError):
    """A rollout failed, or returned something that is no trajectory."""

    code = "rollout_failed"


class RolloutTimeoutError(RolloutError):
    """One rollout passed its deadline and was cancelled."""

    code = "rollout_timeout"


class TooManyExceptionsError(RolloutError):
    """More rollouts failed than `max_exceptions` allows. The others were cancelled."""

    code = "too_many_exceptions"


class AnswerError(ArtCloudError):
    """A judge or a generator gave no answer that can be used."""

    code = "unusable_answer"


class ProviderError(ArtCloudError):
    """A provider could not do what it was asked, or could not be asked."""

    code = "provider_error"


class LaunchError(ProviderError):
    """A machine or its server did not come up."""

    code = "launch_failed"


class NoMachineError(LaunchError):
    """No machine could be had. Nothing was started, and nothing costs."""

    code = "no_machine"


class IncompleteListError(ProviderError):
    """Some machines could not say what runs there; `instances` has what the others said."""

    code = "incomplete_list"

    def __init__(
        self, message: str = "", instances: Iterable[Any] = (), unsure: Collection[str] = ()
    ) -> None:
        """`instances`: what was found all the same. `unsure`: the recorded clusters that may be
        where nothing could be told."""
        super().__init__(message)
        self.instances = list(instances)
        self.unsure = frozenset(unsure)


def _tree(root: type[ArtCloudError]) -> dict[str, type[ArtCloudError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[ArtCloudError]] = _tree(ArtCloudError)
