"""`Store`: one sqlite file in the state folder; every command and process of a user shares it."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...runtime.files import state_folder
from ..causes import Cause
from ..supervision.journal import Attempt
from .database import Database
from .history import PodHistory
from .records import PodEvent, WantedPod, to_json
from .spend import SpendLedger
from .wanted import WantedPods

FILE = "pods.sqlite"


class Store:
    """Pods wanted and seen, what became of them, attempts, events and spending.

    It is the journal of supervisors (`supervision.journal.Journal`): what they record is there
    for whoever goes on after them.

    Args:
        folder: By default the state folder (`TPUKIT_STATE_DIR`).
        now: The clock, in seconds since the epoch.

    Raises:
        TPUBackendError: The file cannot be opened, is no store, or is of a newer tpukit.
    """

    def __init__(self, folder: Path | None = None, *, now: Callable[[], float] = time.time) -> None:
        self.folder = folder or state_folder()
        self._now = now
        self._database = Database(self.folder / FILE)
        self.wanted = WantedPods(self._database, now)
        self.history = PodHistory(self._database, now)
        self.spend = SpendLedger(self._database, now)
        self.owner = self._owner()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def now(self) -> float:
        """Return the time by the store's clock."""
        return self._now()

    def forget(self, row: WantedPod) -> None:
        """Remove a pod from the store without asking its provider, and count it no longer."""
        if row.zone is not None:
            self.spend.end_unseen(row.provider, zone=row.zone, pod=row.pod_name)
            where = {"zone": row.zone, "pod": row.pod_name}
            self.history.ended(row.provider, **where, cause=Cause.STOPPED)
        self.wanted.forget(row.name)
        self.wanted.forget_unused_provider(row.provider, after_s=0.0)
        self.note(row.name, "forgotten", f"{row.pod_name} was forgotten, whatever became of it")

    # --- journal ---------------------------------------------------------------------------

    def record(self, job: str, attempt: Attempt) -> None:
        """Keep an attempt, instead of one with the same number."""
        self._database.write(
            "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?)",
            *(job, attempt.number, to_json(attempt.to_dict())),
        )

    def attempts(self, job: str) -> Sequence[Attempt]:
        """Return a run's attempts, oldest first."""
        rows = self._database.read(
            "SELECT attempt FROM attempts WHERE run = ? ORDER BY number", job
        )
        return [Attempt.from_dict(json.loads(row["attempt"])) for row in rows]

    # --- events ----------------------------------------------------------------------------

    def note(self, subject: str, kind: str, text: str) -> None:
        """Write down that something happened."""
        self._database.write(
            "INSERT INTO events (at, subject, kind, text) VALUES (?, ?, ?, ?)",
            *(self.now(), subject, kind, text),
        )

    def events(self, subject: str | None = None, *, after: int = 0) -> list[PodEvent]:
        """Return events, oldest first, without the first `after` of them."""
        rows = self._database.read(
            "SELECT at, subject, kind, text FROM events WHERE ? IN ('', subject) ORDER BY id"
            " LIMIT -1 OFFSET ?",
            *(subject or "", after),
        )
        return [PodEvent(*row) for row in rows]

    def _owner(self) -> str:
        """Return the label of every pod of this store: no two stores delete each other's pods."""
        made = f"tpukit-{secrets.token_hex(6)}"
        self._database.write("INSERT OR IGNORE INTO facts VALUES ('owner', ?)", made)
        kept = self._database.read_one("SELECT value FROM facts WHERE name = 'owner'")
        if kept == made:  # a pod whose owner a power cut took away would be nobody's
            self._database.read("PRAGMA wal_checkpoint(FULL)")
        return kept
