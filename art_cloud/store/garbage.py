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

from ..shared.errors import CorruptBlobError, NotFoundError, UnreadableError
from ..shared.names import ModelName
from .base import Blob, Store
from .checkpoints import Checkpoints, Manifest, each
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
        UnreadableError: there are manifests that can't be read. What they name is not known, so
            nothing is garbage.
    """
    before = datetime.now(UTC) - older_than
    old = [blob for blob, stored_at in store.blobs() if stored_at < before]
    manifests, unreadable = _manifests(store, _named(BEGUN, store))
    if unreadable:
        raise UnreadableError(
            f"Nothing was removed from {store.url}, since what these name is not known: "
            f"{', '.join(unreadable.values())}. Restore them from a copy, upgrade if a newer "
            "art-cloud wrote them, or give their steps up and delete these files; then repeat."
        )
    named = {blob.sha256 for manifest in manifests for blob in manifest.files.values()}
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


def _manifests(store: Store, names: Iterable[ModelName]) -> tuple[list[Manifest], dict[str, str]]:
    """All steps of these models, and what a model without steps is about to begin with; and of
    those that can't be read, by their policy, the key."""
    unreadable: dict[str, str] = {}

    def read(place: tuple[Checkpoints, int | None]) -> Manifest | None:
        steps, step = place
        try:
            return steps.beginning() if step is None else steps.read(step)
        except NotFoundError:  # removed meanwhile
            return None
        except UnreadableError:
            if step is None:
                unreadable[str(steps.name)] = f"{steps.name}/first.json"
            else:
                unreadable[str(steps.name.at(step))] = f"{steps.name}/steps/{step:06d}.json"
            return None

    places: list[tuple[Checkpoints, int | None]] = []
    for steps in (Checkpoints(store, name) for name in names):
        places += [(steps, step) for step in steps.steps()] or [(steps, None)]
    found = each(read, places)
    return [manifest for manifest in found if manifest], dict(sorted(unreadable.items()))


@dataclass(frozen=True)
class Damage:
    blob: Blob | None
    """None: it is the step's manifest that can't be read."""
    what: Literal["missing", "corrupt", "unreadable"]
    hurt: Sequence[str]
    """What can't be used: `project/model@step file`."""


def verify(
    store: Store, names: Iterable[ModelName], watch: Watch | None = None
) -> tuple[int, list[Damage]]:
    """Read every blob that the steps of these models name, and compare it with its hash.

    Returns:
        How many blobs there are, and what is wrong with some of them. Of a step whose manifest
        can't be read, it is not known which it has.

    Raises:
        StoreError: the store did not answer: it is not known what is damaged.
    """
    hurt: defaultdict[Blob, list[str]] = defaultdict(list)
    manifests, unreadable = _manifests(store, names)
    for manifest in manifests:
        for path, blob in manifest.files.items():
            hurt[blob].append(f"{manifest.policy} {path}")
    lost = [Damage(None, "unreadable", [f"{policy} {key}"]) for policy, key in unreadable.items()]
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

        return len(hurt), lost + [damage for damage in each(check, hurt) if damage]


def in_bytes(blobs: Iterable[Blob]) -> int:
    return sum(blob.size for blob in blobs)
