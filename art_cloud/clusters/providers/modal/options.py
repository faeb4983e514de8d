"""What `up("modal", ...)` takes and costs, and what may go wrong at Modal, said in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from modal.exception import (
    AuthError,
    ImageBuildError,
    InvalidError,
    ResourceExhaustedError,
)
from modal.exception import ConnectionError as ModalConnectionError
from modal.exception import Error as ModalError
from modal.exception import NotFoundError as ModalNotFoundError
from pydantic import Field

from ....shared.config import Frozen
from ....shared.errors import ConfigError, ConflictError, LaunchError, ProviderError
from ...registry import whoami
from ...spec import ClusterSpec
from .. import kit

PYTHON, EXTRAS = "3.12", "server,vllm"
"""Of an image that Modal builds."""
LONGEST_TAG = 63
"""Letters, digits, dashes, periods and underscores (modal/_utils/name_utils.py)."""
OWNER, BY = "art-cloud-owner", "art-cloud-by"
"""Tags: by whose token something was started (half its SHA-256), and from where."""

PRICES = {
    "T4": 0.59,
    "L4": 0.80,
    "A10": 1.10,
    "L40S": 1.95,
    "A100-40GB": 2.10,
    "A100-80GB": 2.50,
    "H100": 3.95,
    "H200": 4.54,
    "B200": 6.25,
}
"""US dollars an hour for one GPU, as https://modal.com/pricing listed them in the middle of 2026.
CPU and memory are billed beside them, and some regions cost more."""


class Options(Frozen):
    """What `up("modal", ...)` takes beside the common arguments."""

    gpu: str
    """A name of Modal's, with ":2" for two of them."""
    image: str | None = None
    """A registry's image that has `art-server`, best by digest ("ghcr.io/me/art@sha256:..."); None:
    Modal builds one of this version, once."""
    region: str | None = None
    cpu: float | None = Field(default=None, gt=0)
    memory: int | None = Field(default=None, gt=0)
    """MiB."""
    serverless: bool = False
    """Scale to zero: a request starts the server, and `idle` without any ends it."""
    replicas: int = Field(default=0, ge=0)
    """Containers beside the one that trains that answer completions, at most; serverless only."""
    snapshot: bool = False
    """Start from a memory snapshot of a server that has imported all it needs; serverless only."""

    @property
    def price(self) -> float:
        """US dollars an hour, while all containers run."""
        name, _, count = self.gpu.partition(":")
        name = {"A100": "A100-40GB", "A10G": "A10"}.get(name.upper(), name.upper().rstrip("!"))
        if name not in PRICES or not (count.isdecimal() or not count) or count == "0":
            near = get_close_matches(name, PRICES, n=3, cutoff=0.3)
            raise ConfigError(
                f"Modal has no GPU {self.gpu!r}. "
                + (f"Did you mean {' or '.join(near)}? " if near else "")
                + f"It has {', '.join(PRICES)}; gpu='H100:2' asks for two."
            )
        return PRICES[name] * int(count or 1) * (1 + self.replicas)


def options_of(spec: ClusterSpec) -> Options:
    options = kit.options_of(spec, Options, "A cluster on Modal")
    if (options.replicas or options.snapshot) and not options.serverless:
        raise ConfigError("A cluster on Modal: replicas= and snapshot= are for serverless=True.")
    return options


def owner_tags(spec: ClusterSpec) -> dict[str, str]:
    by = re.sub(r"[^A-Za-z0-9._-]+", "-", whoami().replace("@", "-at-"))
    return {OWNER: spec.owner, BY: by[:LONGEST_TAG]}


def taken(name: str, by: str | None) -> ConflictError:
    """A name is one for the whole workspace, and somebody has it."""
    return ConflictError(
        f"{name} runs in this workspace of Modal already. It was started from elsewhere, by "
        f"{by or 'somebody'}, so its token is not known here. Give yours another name (name=)."
    )


@contextmanager
def errors(what: str) -> Iterator[None]:
    try:
        yield
    except AuthError as error:
        raise ConfigError(
            f"Could not {what}: Modal does not take your token ({error}). Run `modal setup`, or "
            "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."
        ) from error
    except ResourceExhaustedError as error:
        raise LaunchError(
            f"Could not {what}: Modal has no such GPU free ({error}). Nothing is left running. Try "
            "again later, another gpu=, or no region=."
        ) from error
    except ImageBuildError as error:
        raise LaunchError(f"Could not {what}: the image was not built ({error}).") from error
    except (InvalidError, ModalNotFoundError) as error:
        raise ConfigError(f"Could not {what}: Modal refuses it ({error}).") from error
    except ModalConnectionError as error:
        raise ProviderError(
            f"Could not {what}: Modal can't be reached ({error}). Whether something runs is not "
            "known: look again when you are online."
        ) from error
    except ModalError as error:
        raise ProviderError(f"Could not {what}: {type(error).__name__}: {error}") from error
