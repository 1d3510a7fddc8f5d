"""One sqlite file with a schema version, for many readers and one writer at a time."""

import contextlib
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ...errors import TPUBackendError
from ...runtime.files import private_folder

_FIRST = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- Who to ask: enough to open the same provider again after a restart, and nothing secret.
CREATE TABLE providers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    launch TEXT NOT NULL,
    used_at REAL NOT NULL
) WITHOUT ROWID;

-- What should be there. `zone` and `asked_at` are written before a provider is asked, so that
-- whoever comes after a crash knows where something may have been made. `keeper` is who replaces
-- the pod when it is lost, where that is not the reconciler; `kept_at` when it last said so.
CREATE TABLE wanted (
    name TEXT PRIMARY KEY,
    provider TEXT NOT NULL REFERENCES providers (id),
    config TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    zone TEXT,
    asked_at REAL,
    wanted_at REAL NOT NULL,
    released_at REAL,
    keeper TEXT,
    kept_at REAL
) WITHOUT ROWID;

-- What was there when it was last looked at.
CREATE TABLE observed (
    name TEXT PRIMARY KEY REFERENCES wanted (name) ON DELETE CASCADE,
    pod TEXT NOT NULL,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

-- One pod from being asked for to its end, whether it was ever there or not.
CREATE TABLE lives (
    id INTEGER PRIMARY KEY,
    provider TEXT NOT NULL,
    zone TEXT NOT NULL,
    pod TEXT NOT NULL,
    slice TEXT NOT NULL,
    tier TEXT NOT NULL,
    asked_at REAL NOT NULL,
    ready_at REAL,
    ended_at REAL,
    cause TEXT
);
CREATE UNIQUE INDEX lives_once ON lives (provider, zone, pod) WHERE ended_at IS NULL;
CREATE INDEX lives_by_end ON lives (provider, slice, tier, zone, ended_at);

-- Attempts at a run, as `supervision.journal` describes them.
CREATE TABLE attempts (
    run TEXT NOT NULL,
    number INTEGER NOT NULL,
    attempt TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    subject TEXT NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX events_by_subject ON events (subject, id);

-- From ready to released, with the price that held when it began.
CREATE TABLE spend (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    pod TEXT NOT NULL,
    provider TEXT NOT NULL,
    zone TEXT NOT NULL,
    slice TEXT NOT NULL,
    tier TEXT NOT NULL,
    price TEXT NOT NULL,
    ready_at REAL NOT NULL,
    released_at REAL
);
CREATE UNIQUE INDEX spend_once ON spend (provider, zone, pod) WHERE released_at IS NULL;
"""

_SEEN = """
-- When a pod was last seen, and since when its provider has not answered: what nobody can see is
-- not counted.
ALTER TABLE spend ADD COLUMN seen_at REAL;
ALTER TABLE providers ADD COLUMN silent_since REAL;
"""

VERSIONS = (_FIRST, _SEEN)
"""Scripts that upgrade a store from each version to the next; a new store runs all of them."""


PATIENCE_S = 10.0
"""How long a writer waits for another writer."""


class Database:
    """An open sqlite file that all threads may use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            private_folder(path.parent)
            path.touch(mode=0o600)  # sqlite creates its other files with the same mode
            self._connection = sqlite3.connect(
                path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._upgrade()
            # A power cut may lose the last writes. A pod that is lost from the store is then found
            # by its label and reported. Syncing every write would cost more.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        except (OSError, sqlite3.Error) as error:
            raise TPUBackendError(
                f"The store of pods {path} cannot be opened ({error}); repair it, move it away, "
                "or choose another folder with TPUKIT_STATE_DIR."
            ) from error

    def read(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of a query; none if a value cannot be encoded as UTF-8."""
        with self._lock, contextlib.suppress(UnicodeEncodeError):
            return self._connection.execute(query, values).fetchall()
        return []

    def read_one(self, query: str, *values: object) -> Any:
        """Return the first column of the first row, or None."""
        rows = self.read(query, *values)
        return rows[0][0] if rows else None

    @contextlib.contextmanager
    def writing(self) -> Generator[sqlite3.Connection]:
        """Run a transaction; other writers wait. Transactions may be nested."""
        with self._lock:
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.rollback()
                raise
            self._connection.commit()

    def write(self, query: str, *values: object) -> None:
        """Execute one statement in a transaction."""
        with self.writing() as connection:
            connection.execute(query, values)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _upgrade(self) -> None:
        with self.writing():
            version: int = self.read_one("PRAGMA user_version")
            if version > len(VERSIONS):
                raise TPUBackendError(
                    f"{self.path} was written by a newer tpukit (store version {version}; this one "
                    f"supports up to {len(VERSIONS)}); upgrade tpukit, or set TPUKIT_STATE_DIR."
                )
            for script in VERSIONS[version:]:
                for statement in _statements(script):
                    self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def _statements(script: str) -> list[str]:
    """Split a script into statements, because `executescript` would commit the transaction."""
    statements: list[str] = []
    rest = ""
    for line in script.splitlines():
        rest += line.partition("--")[0] + "\n"
        if sqlite3.complete_statement(rest):
            statements.append(rest)
            rest = ""
    return statements
