"""What this user started, or meant to start: an SQLite file beside the clusters' folders.

A cluster is written here, with its token, before a provider is asked for anything. So a crash at
any line leaves a name that `art-cloud status` shows and `art-cloud down` ends.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

import platformdirs
from pydantic import SecretStr

from .errors import ConfigError, NotFoundError
from .names import check_name
from .providers import ClusterSpec

RecordState = Literal["starting", "running", "ending"]

BUSY_TIMEOUT_SECONDS = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS clusters (
    name       TEXT PRIMARY KEY,
    spec       TEXT NOT NULL,
    token      TEXT NOT NULL,
    state      TEXT NOT NULL,
    created_at TEXT NOT NULL
)
"""


def home() -> Path:
    """Where art-cloud keeps this user's things: `ART_CLOUD_HOME`, or the platform's data folder."""
    chosen = os.environ.get("ART_CLOUD_HOME")
    folder = Path(chosen) if chosen else platformdirs.user_data_path("art-cloud")
    return folder.expanduser().resolve()


def default_name(provider: str) -> str:
    """`art-<user>-<provider>`: the same on every call, so that a second start finds the first."""
    user = re.sub(r"[^A-Za-z0-9]+", "-", getpass.getuser()).strip("-") or "user"
    return check_name(f"art-{user[:40]}-{provider}"[:64], "cluster")


class Use:
    """This process's mark on a cluster: as long as it stands, others see that it is in use.

    It is a shared lock on a file, so it goes with the process, however that ends.
    """

    def __init__(self, name: str) -> None:
        self._file = _open_uses(name)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def end(self) -> None:
        self._file.close()


def in_use(name: str) -> bool:
    """Whether somebody else on this machine has a `Use` of the cluster."""
    with _open_uses(name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _open_uses(name: str) -> TextIO:
    path = home() / "clusters" / check_name(name, "cluster") / "uses"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.open("a")


@dataclass(frozen=True)
class ClusterRecord:
    name: str
    spec: ClusterSpec
    state: RecordState
    created_at: datetime


class Registry:
    """Safe for several processes at once; only its owner can read it."""

    def __init__(self) -> None:
        self.path = home() / "clusters.sqlite"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise ConfigError(
                f"{error.filename} can't be written: {error.strerror}. Set ART_CLOUD_HOME to a "
                "folder of your own."
            ) from error
        with self._transaction() as database:
            database.execute(SCHEMA)

    def claim(self, name: str, spec: ClusterSpec) -> tuple[ClusterRecord, bool]:
        """Record the intent to start `name`, with a fresh token.

        Returns the record and True, or the record that was there already and False.
        """
        check_name(name, "cluster")
        with self._transaction() as database:
            found = database.execute("SELECT * FROM clusters WHERE name = ?", [name]).fetchone()
            if found:
                return _record(found), False
            token = SecretStr(secrets.token_urlsafe(32))
            record = ClusterRecord(
                name, spec.model_copy(update={"token": token}), "starting", datetime.now(UTC)
            )
            database.execute(
                "INSERT INTO clusters VALUES (:name, :spec, :token, :state, :created_at)",
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
        with self._transaction() as database:
            return [
                _record(row) for row in database.execute("SELECT * FROM clusters ORDER BY name")
            ]

    def set_state(self, name: str, state: RecordState) -> None:
        with self._transaction() as database:
            database.execute("UPDATE clusters SET state = ? WHERE name = ?", [state, name])

    def remove(self, record: ClusterRecord) -> None:
        """Forget `record`; a later cluster of the same name has another token, and stays."""
        token = record.spec.token.get_secret_value()
        with self._transaction() as database:
            database.execute(
                "DELETE FROM clusters WHERE name = ? AND token = ?", [record.name, token]
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
        database.row_factory = sqlite3.Row
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            with database:
                yield database
        except sqlite3.Error as error:
            raise ConfigError(
                f"The list of clusters in {self.path} can't be used: {error}. It tells what "
                "runs, so look at it before you remove it."
            ) from error
        finally:
            database.close()


def _record(row: sqlite3.Row) -> ClusterRecord:
    spec = ClusterSpec.model_validate_json(row["spec"])
    return ClusterRecord(
        name=row["name"],
        spec=spec.model_copy(update={"token": SecretStr(row["token"])}),
        state=row["state"],
        created_at=datetime.fromisoformat(row["created_at"]),
    )


def unknown(name: str) -> NotFoundError:
    """The error for a cluster that nobody knows; it says which are known."""
    known = ", ".join(record.name for record in Registry().list()) or "none"
    return NotFoundError(f"There is no cluster {name!r}. Known are: {known}.")
