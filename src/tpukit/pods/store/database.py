"""One sqlite file with a schema version: many readers, one writer at a time."""

import contextlib
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ...errors import TPUBackendError
from ...runtime.files import private_folder
from .schema import VERSIONS

PATIENCE_S = 10.0
"""How long a writer waits for another process that writes."""


class Database:
    """An open sqlite file; any thread may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            private_folder(path.parent)
            path.touch(mode=0o600)  # sqlite gives its other files the same mode
            self._connection = sqlite3.connect(
                path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._upgrade()
            # A power cut may take the last writes: a pod of which nothing is known any more is
            # found by its label and reported. Waiting for the disk each time would cost more.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        except (OSError, sqlite3.Error) as error:
            raise TPUBackendError(
                f"The store of pods {path} cannot be opened ({error}); mend it, move it away, or "
                "choose another folder with TPUKIT_STATE_DIR."
            ) from error

    def read(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of a query; what is no text (a stray byte typed as a name) is in none."""
        with self._lock, contextlib.suppress(UnicodeEncodeError):
            return self._connection.execute(query, values).fetchall()
        return []

    def read_one(self, query: str, *values: object) -> Any:
        """Return the first column of the first row, or None where there is none."""
        rows = self.read(query, *values)
        return rows[0][0] if rows else None

    @contextlib.contextmanager
    def writing(self) -> Generator[sqlite3.Connection]:
        """Write all or nothing; whoever else wants to write waits. May be nested."""
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
        """Write with one statement."""
        with self.writing() as connection:
            connection.execute(query, values)

    def close(self) -> None:
        """Close the file; nothing can be read or written any more."""
        with self._lock:
            self._connection.close()

    def _upgrade(self) -> None:
        with self.writing():
            found: int = self.read_one("PRAGMA user_version")
            if found > len(VERSIONS):
                raise TPUBackendError(
                    f"{self.path} was written by a newer tpukit (version {found} of the store; "
                    f"this one knows {len(VERSIONS)}); upgrade tpukit, or set TPUKIT_STATE_DIR."
                )
            for script in VERSIONS[found:]:
                for statement in _statements(script):
                    self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def _statements(script: str) -> list[str]:
    """Return the statements of a script; `executescript` would commit what is under way."""
    found: list[str] = []
    rest = ""
    for line in script.splitlines():
        rest += line.partition("--")[0] + "\n"
        if sqlite3.complete_statement(rest):
            found.append(rest)
            rest = ""
    return found
