"""A whole store: its models, what nothing needs any more, and whether all of it is whole.

Garbage is a blob that no manifest names. A step that is being made has blobs in the store before
its manifest, so a young blob is never garbage: collecting it is safe while servers train, because

- blobs are listed before manifests are read: a step that is finished in between is seen,
- a step whose manifest comes later has put its blobs there within `GRACE`, or has found them there
  and made them young again (`Store.put_blob`), and looks at them once more when its manifest is
  there (`Checkpoints.create`),
- and a blob is looked at once more in the moment in which it is deleted (`Store.delete_blob`): what
  was used since `Garbage.before` stays, be it days until somebody says yes to the deletion.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from .checkpoints import Checkpoints, each
from .errors import CorruptBlobError, NotFoundError
from .names import ModelName
from .store import Blob, Store
from .transfer import Transfer, Watch

STEP = re.compile(r"([^/]+)/([^/]+)/steps/\d{6,}\.json")
BEGUN = re.compile(rf"{STEP.pattern}|([^/]+)/([^/]+)/first\.json")
GRACE = timedelta(hours=24)
"""Longer than a step takes from its first blob to its manifest."""


def models(store: Store) -> list[ModelName]:
    """The models that have steps in a store, in alphabetical order."""
    return _named(STEP, store)


def _named(pattern: re.Pattern[str], store: Store) -> list[ModelName]:
    found = {match.groups() for key in store.list("") if (match := pattern.fullmatch(key))}
    return sorted({ModelName(*filter(None, groups)) for groups in found})


@dataclass(frozen=True)
class Garbage:
    blobs: Sequence[Blob]
    before: datetime
    """None of them was stored, or used again, since."""


def find_garbage(store: Store, older_than: timedelta = GRACE) -> Garbage:
    """The blobs that no manifest names and that were stored, or used again, so long ago.

    Raises:
        StoreError: a manifest can't be read. What it names is not known, so nothing is garbage.
    """
    before = datetime.now(UTC) - older_than
    old = [blob for blob, stored_at in store.blobs() if stored_at < before]
    named = {
        blob.sha256
        for name in _named(BEGUN, store)
        for manifest in Checkpoints(store, name).needed()
        for blob in manifest.files.values()
    }
    return Garbage([blob for blob in old if blob.sha256 not in named], before)


def collect_garbage(store: Store, garbage: Garbage) -> list[Blob]:
    """Delete what `find_garbage` found, but for what was used again meanwhile.

    Returns:
        What was deleted.
    """

    def delete(blob: Blob) -> bool:
        with suppress(NotFoundError):  # somebody else collects too
            return store.delete_blob(blob.sha256, garbage.before)
        return False

    return [blob for blob in garbage.blobs if delete(blob)]


@dataclass(frozen=True)
class Damage:
    blob: Blob
    what: Literal["missing", "corrupt"]
    hurt: Sequence[str]
    """What can't be used: `project/model@step file`."""


def verify(
    store: Store, names: Iterable[ModelName], watch: Watch | None = None
) -> tuple[int, list[Damage]]:
    """Read every blob that the steps of these models name, and compare it with its hash.

    Returns:
        How many blobs there are, and what is wrong with some of them.

    Raises:
        StoreError: the store did not answer: it is not known what is damaged.
    """
    hurt: defaultdict[Blob, list[str]] = defaultdict(list)
    for name in names:
        for manifest in Checkpoints(store, name).manifests():
            for path, blob in manifest.files.items():
                hurt[blob].append(f"{manifest.policy} {path}")
    transfer = Transfer(sum(blob.size for blob in hurt), watch)

    with tempfile.TemporaryDirectory(prefix="art-cloud-") as folder:

        def check(blob: Blob) -> Damage | None:
            copy = Path(folder) / blob.sha256
            try:
                store.get_blob(blob, copy, transfer.moved)
                copy.unlink()
            except NotFoundError:
                return Damage(blob, "missing", hurt[blob])
            except CorruptBlobError:
                return Damage(blob, "corrupt", hurt[blob])
            return None

        return len(hurt), [damage for damage in each(check, hurt) if damage]


def in_bytes(blobs: Iterable[Blob]) -> int:
    return sum(blob.size for blob in blobs)
