"""What this user started, or meant to start: an SQLite file beside the clusters' folders.

A cluster is written here, with its token, before a provider is asked for anything. So a crash at
any line leaves a name that `art-cloud status` shows and `art-cloud down` ends.

To read needs nothing that can be written: neither room on the disk nor leave to write there. So
what runs is shown, and ended, also when the end can't be noted.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Literal, TypeVar
from uuid import uuid4

import platformdirs
from filelock import FileLock
from pydantic import BaseModel, SecretStr, ValidationError

from ..shared.errors import NotFoundError, RegistryError
from ..shared.names import check_name
from ..shared.progress import say_once
from ..shared.protocol import ServerInfo
from ..shared.validation import complaint
from .costs import Receipt, Usage, make_receipt
from .spec import ClusterSpec, Instance

F = TypeVar("F", bound=BaseModel)
UNKNOWN = "extra_forbidden"
"""What pydantic says of a field that a model does not have."""
RecordState = Literal["starting", "running", "ending"]

BUSY_TIMEOUT_SECONDS = 30.0
SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS clusters (
    name       TEXT PRIMARY KEY,
    spec       TEXT NOT NULL,
    token      TEXT NOT NULL,
    state      TEXT NOT NULL,
    created_at TEXT NOT NULL
)
""",
    """
CREATE TABLE IF NOT EXISTS phases (
    name       TEXT NOT NULL,
    created_at TEXT NOT NULL,
    label      TEXT NOT NULL,
    seconds    REAL NOT NULL
)
""",
    """
CREATE TABLE IF NOT EXISTS servers (
    name           TEXT NOT NULL,
    created_at     TEXT NOT NULL,
    started_at     TEXT NOT NULL,
    seen_at        TEXT NOT NULL,
    steps          INTEGER NOT NULL,
    tokens_trained INTEGER NOT NULL,
    tokens_sampled INTEGER NOT NULL,
    PRIMARY KEY (name, created_at, started_at)
)
""",
    """
CREATE TABLE IF NOT EXISTS receipts (
    name       TEXT NOT NULL,
    created_at TEXT NOT NULL,
    receipt    TEXT NOT NULL,
    PRIMARY KEY (name, created_at)
)
""",
)


def home() -> Path:
    """The folder for this user's data: `ART_CLOUD_HOME`, or the platform's data folder."""
    chosen = os.environ.get("ART_CLOUD_HOME")
    folder = Path(chosen) if chosen else platformdirs.user_data_path("art-cloud")
    return folder.expanduser().resolve()


def default_name(provider: str) -> str:
    """`art-<user>-<provider>`: the same on every call, so that a second start finds the first."""
    user = re.sub(r"[^A-Za-z0-9]+", "-", getpass.getuser()).strip("-") or "user"
    return check_name(f"art-{user[:40]}-{provider}"[:64], "cluster")


def whoami() -> str:
    """`user@host` of this process: it tells other people who started something."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


class Use:
    """This process's mark on a cluster: as long as it stands, others see that it is in use.

    It is a locked file of its own, and the lock goes with the process, however that ends.
    """

    def __init__(self, name: str) -> None:
        self._path = _uses(name) / uuid4().hex
        self._lock = FileLock(self._path, thread_local=False)
        try:
            for folder in (home(), self._path.parent):  # `mode` is not that of the parents
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise _unwritable(error) from error

    def end(self) -> None:
        self._lock.release()
        _stands(self._path)


def in_use(name: str) -> bool:
    """Whether another process on this machine holds a `Use` of the cluster."""
    try:
        return any(_stands(mark) for mark in _uses(name).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _stands(mark: Path) -> bool:
    """Whether a program holds it; else it is removed. One that can't be opened counts as held."""
    try:
        with FileLock(mark, blocking=False):
            with suppress(OSError):  # on Windows it goes as the lock does
                mark.unlink()
            return False
    except OSError:  # a lock's timeout is one
        return True


def _uses(name: str) -> Path:
    return folder_of(name) / "in-use"


def folder_of(name: str) -> Path:
    """Where what is known here of a cluster lies, beside the registry."""
    return home() / "clusters" / check_name(name, "cluster")


def _unwritable(error: OSError) -> RegistryError:
    return RegistryError(
        f"{error.filename} can't be written: {error.strerror}. Make room there, or set "
        "ART_CLOUD_HOME to a folder of your own."
    )


@dataclass(frozen=True)
class ClusterRecord:
    name: str
    spec: ClusterSpec
    state: RecordState
    created_at: datetime

    @property
    def key(self) -> tuple[str, str]:
        """An id of this cluster alone: a name is given to one cluster after another."""
        return self.name, self.created_at.isoformat()

    def has(self, instance: Instance) -> bool:
        """Whether the instance was started for this cluster, and not by others under its name."""
        named = (instance.provider, instance.name) == (self.spec.provider, self.name)
        return named and instance.owner in (None, self.spec.owner)


class Registry:
    """Safe for several processes at once; only its owner can read it.

    Raises, from every call:
        RegistryError: its file can't be read, or not written.
    """

    def __init__(self) -> None:
        self.path = home() / "clusters.sqlite"

    def claim(self, name: str, spec: ClusterSpec) -> tuple[ClusterRecord, bool]:
        """Record the intent to start `name`, with a fresh token.

        Returns the record and True, or the record that was there already and False.
        """
        check_name(name, "cluster")
        with self._transaction() as database:
            found = database.execute("SELECT * FROM clusters WHERE name = ?", [name]).fetchone()
            if found:
                return _record(found), False
            token, now = SecretStr(secrets.token_urlsafe(32)), datetime.now(UTC)
            spec = spec.model_copy(update={"token": token, "launched_at": now})
            record = ClusterRecord(name, spec, "starting", now)
            database.execute(
                "INSERT INTO clusters (name, spec, token, state, created_at)"
                " VALUES (:name, :spec, :token, :state, :created_at)",
                {
                    "name": name,
                    "spec": spec.model_dump_json(),
                    "token": token.get_secret_value(),
                    "state": record.state,
                    "created_at": record.created_at.isoformat(),
                },
            )
            return record, True

    def get(self, name: str) -> ClusterRecord | None:
        return next((record for record in self.list() if record.name == name), None)

    def list(self) -> list[ClusterRecord]:
        """All that can be understood. What can't is told of, and hides no other: its provider still
        lists what runs of it."""
        found = []
        for row in self._read("SELECT * FROM clusters ORDER BY name"):
            try:
                found.append(_record(row))
            except RegistryError as error:
                say_once(str(error))
        return found

    def current(self, record: ClusterRecord) -> ClusterRecord | None:
        """The record of the same cluster as it is now; None if it was ended."""
        now = self.get(record.name)
        return now if now is not None and now.key == record.key else None

    def renew_token(self, record: ClusterRecord) -> ClusterRecord:
        """Give a server that replaces a lost one a fresh token; return the record with it, or with
        the token that another program gave it since `record` was read.

        Raises:
            NotFoundError: the cluster was ended.
        """
        with self._transaction() as database:
            found = database.execute(
                "SELECT * FROM clusters WHERE name = ? AND created_at = ?", record.key
            ).fetchone()
            if found is None:
                raise unknown(record.name)
            now = _record(found)
            if now.spec.token != record.spec.token:
                return now
            token = secrets.token_urlsafe(32)
            database.execute(
                "UPDATE clusters SET token = ? WHERE name = ? AND created_at = ?",
                [token, *record.key],
            )
        spec = now.spec.model_copy(update={"token": SecretStr(token)})
        return replace(now, spec=spec)

    def set_state(self, record: ClusterRecord, state: RecordState) -> None:
        with self._transaction() as database:
            database.execute(
                "UPDATE clusters SET state = ? WHERE name = ? AND created_at = ?",
                [state, *record.key],
            )

    def remove(self, record: ClusterRecord) -> None:
        """Forget a record for which nothing was started; a later cluster of the same name stays."""
        with self._transaction() as database:
            database.execute("DELETE FROM clusters WHERE name = ? AND created_at = ?", record.key)

    def end(self, record: ClusterRecord, *, seen_to_end: bool) -> Receipt:
        """Forget `record` but for its receipt. Its end is now if it was `seen_to_end`; else the
        receipt says that it ended at some time since its server was last asked.

        Its end is now if it was `seen_to_end`, else it has come unseen since it was last asked.
        """
        receipt = self.receipt(record, seen_to_end=seen_to_end)
        with self._transaction() as database:
            database.execute("DELETE FROM clusters WHERE name = ? AND created_at = ?", record.key)
            database.execute(
                "INSERT OR IGNORE INTO receipts VALUES (?, ?, ?)",
                [*record.key, receipt.model_dump_json()],
            )
        return receipt

    def add_phase(self, record: ClusterRecord, label: str, seconds: float) -> None:
        with self._transaction() as database:
            database.execute(
                "INSERT INTO phases VALUES (?, ?, ?, ?)", [*record.key, label, seconds]
            )

    def phases(self, record: ClusterRecord) -> Sequence[tuple[str, float]]:
        """The phases of the launch of `record`, with the seconds that each took."""
        found = self._read(
            "SELECT label, seconds FROM phases WHERE name = ? AND created_at = ? ORDER BY rowid",
            record.key,
        )
        return [(row["label"], row["seconds"]) for row in found]

    def note(self, record: ClusterRecord, server: ServerInfo) -> None:
        """Record what the server of `record` says it has done so far."""
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO servers VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    *record.key,
                    server.started_at.isoformat(),
                    datetime.now(UTC).isoformat(),
                    server.steps_made,
                    server.tokens_trained,
                    server.tokens_sampled,
                ],
            )

    def usage(self, record: ClusterRecord) -> Usage | None:
        """The sum of what all servers of `record` have done; None if none was ever asked."""
        found = self._read(
            "SELECT max(seen_at), sum(steps), sum(tokens_trained), sum(tokens_sampled)"
            " FROM servers WHERE name = ? AND created_at = ?",
            record.key,
        )
        if not found or found[0][0] is None:
            return None
        return Usage(datetime.fromisoformat(found[0][0]), *found[0][1:])

    def receipts(self) -> Sequence[Receipt]:
        """The receipts of all clusters that have ended, the oldest first. Odd ones are told of."""
        found = []
        for row in self._read("SELECT name, receipt FROM receipts ORDER BY created_at"):
            try:
                found.append(_understood(Receipt, row["receipt"]))
            except ValueError as error:
                say_once(f"The receipt of {row['name']} can't be understood: {error}")
        return found

    def receipt(self, record: ClusterRecord, *, seen_to_end: bool) -> Receipt:
        """The receipt that `end` keeps of `record`."""
        return make_receipt(
            record.name,
            record.spec,
            self.usage(record),
            datetime.now(UTC),
            seen_to_end=seen_to_end,
        )

    def _read(self, query: str, values: Sequence[str] = ()) -> Sequence[sqlite3.Row]:
        """The rows of a query; none if nothing was ever written."""
        try:
            if not self.path.exists():
                return []
            try:
                return self._rows("mode=ro", query, values)
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                # what a killed program left is mended first; else nothing is there to be written
                mode = "mode=rw" if self._is_torn() else "mode=ro&immutable=1"
                return self._rows(mode, query, values)
        except OSError as error:
            raise RegistryError(
                f"{self.path} can't be read: {error.strerror}. Set ART_CLOUD_HOME to a folder of "
                "your own."
            ) from error
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _is_torn(self) -> bool:
        left = [Path(f"{self.path}-{what}") for what in ("journal", "wal")]
        return any(path.exists() and path.stat().st_size for path in left)

    def _rows(self, mode: str, query: str, values: Sequence[str]) -> Sequence[sqlite3.Row]:
        with closing(self._connect(mode)) as database:
            return database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise _unwritable(error) from error
        try:
            with closing(self._connect("mode=rw")) as database:
                database.execute("PRAGMA journal_mode = DELETE")  # who reads has nothing to write
                database.execute("PRAGMA synchronous = FULL")
                database.execute("BEGIN IMMEDIATE")
                with database:
                    for table in SCHEMA:
                        database.execute(table)
                    yield database
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        database = sqlite3.connect(
            f"{self.path.as_uri()}?{mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
        )
        database.row_factory = sqlite3.Row
        return database

    def _unusable(self, error: sqlite3.Error) -> RegistryError:
        return RegistryError(
            f"The list of clusters in {self.path} can't be used: {error}. It tells what runs, so "
            "look at it before you remove it."
        )


def _record(row: sqlite3.Row) -> ClusterRecord:
    try:
        spec = _understood(ClusterSpec, row["spec"])
        return ClusterRecord(
            name=row["name"],
            spec=spec.model_copy(update={"token": SecretStr(row["token"])}),
            state=row["state"],
            created_at=datetime.fromisoformat(row["created_at"]),
        )
    except ValueError as error:
        why = complaint(error) if isinstance(error, ValidationError) else error
        raise RegistryError(
            f"What is recorded of the cluster {row['name']} can't be understood ({why}). End what "
            f"runs of it: art-cloud sweep. Then delete its row of {home()}/clusters.sqlite."
        ) from error


def _understood(kind: type[F], text: str) -> F:
    """What a program of any version wrote, without the fields that this one does not know."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        content = None
        for *way, last in (one["loc"] for one in error.errors() if one["type"] == UNKNOWN):
            content = content or json.loads(text)
            del reduce(getitem, way, content)[last]
        if content is None:
            raise
        return kind.model_validate_json(json.dumps(content))


def unknown(name: str) -> NotFoundError:
    """The error for a cluster that nobody knows; it says which are known."""
    known = ", ".join(record.name for record in Registry().list()) or "none"
    return NotFoundError(f"There is no cluster {name!r}. Known are: {known}.")
