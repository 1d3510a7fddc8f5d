"""`Store`: one sqlite file in the state folder that all of a user's processes share."""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from ...errors import ConfigError
from ...hardware import Slice
from ...job.sections import LaunchSettings
from ...runtime.files import state_folder
from ..causes import Cause, Kind
from ..config import PodConfig
from ..limits import Hold
from ..pod import Pod, Tier
from ..supervision.journal import Attempt
from .database import Database
from .records import (
    PodEvent,
    ProviderRecord,
    WantedPod,
    check_run_name,
    pod_name,
    split_pod_name,
    to_json,
)
from .spend import SpendLedger


@dataclass(frozen=True)
class WantedPods:
    """The wanted pods and their observed states."""

    database: Database
    now: Callable[[], float]

    def want(
        self,
        name: str,
        config: PodConfig,
        provider: ProviderRecord,
        *,
        keeper: str | None = None,
    ) -> WantedPod:
        """Add a wanted pod; repeating the same request changes nothing.

        Raises:
            ConfigError: The name is not valid, or another request uses it.
        """
        check_run_name(name)
        with self.database.writing():
            before = self.find(name)
            if before is not None:
                if (before.config, before.provider) != (config, provider.id):
                    raise ConfigError(
                        f"A pod named {name!r} is already wanted, as {before.config.slice} from "
                        f"{before.provider}; release it first, or choose another name."
                    )
                if before.is_released:
                    raise ConfigError(
                        f"The pod named {name!r} is being deleted; wait until it is gone, or "
                        "choose another name."
                    )
                return before
            self.database.write(
                "INSERT OR REPLACE INTO providers (id, name, launch, used_at) VALUES (?, ?, ?, ?)",
                *(provider.id, provider.name),
                *(provider.launch.model_dump_json(exclude_unset=True), self.now()),
            )
            self.database.write(
                "INSERT INTO wanted (name, provider, config, attempt, wanted_at, keeper, kept_at)"
                " VALUES (?, ?, ?, 1, ?, ?, ?)",
                *(name, provider.id, to_json(config.to_dict()), self.now(), keeper, self.now()),
            )
        row = self.find(name)
        assert row is not None
        return row

    def release(self, name: str) -> None:
        """Mark a pod for deletion; an unknown pod is no error."""
        self.database.write(
            "UPDATE wanted SET released_at = ? WHERE name = ? AND released_at IS NULL",
            *(self.now(), name),
        )

    def forget(self, name: str) -> None:
        """Remove a pod that is gone from the store."""
        with self.database.writing():
            self.database.write(
                "UPDATE providers SET used_at = ? WHERE id ="
                " (SELECT provider FROM wanted WHERE name = ?)",
                *(self.now(), name),
            )
            self.database.write("DELETE FROM wanted WHERE name = ?", name)

    def ask_in(self, name: str, *, zone: str, attempt: int) -> None:
        """Record a request in a zone before it is made, with nothing observed so far."""
        with self.database.writing():
            self.observe(name, None)
            self.database.write(
                "UPDATE wanted SET zone = ?, attempt = ?, asked_at = ? WHERE name = ?",
                *(zone, attempt, self.now(), name),
            )

    def ask_nowhere(self, name: str) -> None:
        """Record that the request was refused, so that no pod exists."""
        with self.database.writing():
            self.observe(name, None)
            self.database.write("UPDATE wanted SET zone = NULL WHERE name = ?", name)

    def keep(self, name: str) -> None:
        """Record that the keeper of a pod is alive."""
        self.database.write("UPDATE wanted SET kept_at = ? WHERE name = ?", self.now(), name)

    def observe(self, name: str, pod: Pod | None) -> None:
        """Record a pod's observed state; None if it does not exist."""
        if pod is None:
            self.database.write("DELETE FROM observed WHERE name = ?", name)
            return
        self.database.write(
            "INSERT OR REPLACE INTO observed VALUES (?, ?, ?)",
            *(name, to_json(pod.to_dict()), self.now()),
        )

    def find(self, name: str) -> WantedPod | None:
        """Return a wanted pod, or None."""
        rows = self.database.read(f"{_SELECT} WHERE wanted.name = ?", name)
        return _wanted(rows[0]) if rows else None

    def find_by_any_name(self, name: str) -> WantedPod | None:
        """Return the wanted pod with that pod name or run name, or None."""
        return self.find(name) or self.find(split_pod_name(name)[0])

    def all(self, provider: str | None = None) -> Sequence[WantedPod]:
        """Return all wanted or released pods, optionally of one provider, by priority."""
        query = f"{_SELECT} WHERE ? IN ('', provider) ORDER BY wanted_at"
        pods = [_wanted(row) for row in self.database.read(query, provider or "")]
        return sorted(pods, key=lambda row: -row.config.priority)

    def holds(self, provider: ProviderRecord, *, besides: str = "") -> list[Hold]:
        """Return the chips in use or requested by the pods of a provider's project.

        Args:
            provider: The provider whose project counts.
            besides: A run to exclude, because the provider reports its present pod itself.
        """
        records = self.providers().items()
        alike = {id_ for id_, record in records if record.may_share_quota_with(provider)}
        rows = self.database.read(
            "SELECT name, attempt, zone, provider, config ->> 'tpu_type' AS tpu_type,"
            " config ->> 'tier' AS tier FROM wanted WHERE zone IS NOT NULL AND name <> ?",
            besides,
        )
        return [
            Hold(
                pod_name(row["name"], row["attempt"]),
                row["zone"],
                _slice_of(row["tpu_type"]),
                Tier(row["tier"]),
            )
            for row in rows
            if row["provider"] in alike
        ]

    def providers(self) -> dict[str, ProviderRecord]:
        """Return all recently used providers, by id."""
        return {
            row["id"]: ProviderRecord(row["name"], LaunchSettings(**json.loads(row["launch"])))
            for row in self.database.read("SELECT * FROM providers")
        }

    def answered(self, provider: str, *, is_silent: bool) -> None:
        """Record whether a provider has answered, or since when it has not."""
        self.database.write(
            "UPDATE providers SET silent_since = CASE WHEN ? THEN coalesce(silent_since, ?) END"
            " WHERE id = ?",
            *(is_silent, self.now(), provider),
        )

    def forget_unused_provider(self, provider: str, *, after_s: float) -> bool:
        """Remove a provider some time after its last pod, if all its pods are known to be gone.

        Returns:
            Whether it was removed.
        """
        with self.database.writing() as connection:
            forgotten = connection.execute(
                "DELETE FROM providers WHERE id = ? AND used_at <= ?"
                " AND NOT EXISTS (SELECT 1 FROM wanted WHERE provider = providers.id)"
                " AND NOT EXISTS (SELECT 1 FROM lives WHERE provider = providers.id"
                " AND ended_at IS NULL)",
                (provider, self.now() - after_s),
            )
            return forgotten.rowcount > 0


_slice_of = cache(Slice.parse)
_SELECT = "SELECT wanted.*, observed.pod FROM wanted LEFT JOIN observed USING (name)"


def _wanted(row: sqlite3.Row) -> WantedPod:
    return WantedPod(
        name=row["name"],
        provider=row["provider"],
        config=PodConfig.from_dict(json.loads(row["config"])),
        attempt=row["attempt"],
        zone=row["zone"],
        asked_at=row["asked_at"],
        wanted_at=row["wanted_at"],
        released_at=row["released_at"],
        keeper=row["keeper"],
        kept_at=row["kept_at"],
        pod=None if row["pod"] is None else Pod.from_dict(json.loads(row["pod"])),
    )


@dataclass(frozen=True, kw_only=True)
class PodLife:
    """A requested pod from request to end; times are seconds since the epoch.

    Attributes:
        ready_at: None if it never was ready.
        ended_at: None while it is wanted.
        cause: Why it ended or could not be allocated; None while it is wanted.
    """

    slice: str
    zone: str
    tier: Tier
    asked_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    cause: Cause | None = None


class PodLives(Protocol):
    """A record of earlier pods, such as the manager's store."""

    def lives(self, *, since: float) -> Iterable[PodLife]:
        """Return the pods that were wanted at some time after `since`."""
        ...


class NoLives:
    """An empty record, so that only the public record counts."""

    def lives(self, *, since: float) -> Iterable[PodLife]:
        """Return no pods."""
        return ()


HALF_LIFE_S = 600.0
FORGIVEN = 0.5
"""Refusals with a weight up to this do not change the order of zones."""
_COUNTED_S = 20 * HALF_LIFE_S
_AGAINST_A_ZONE = tuple(
    cause.value for cause in Cause if cause.kind in (Kind.CAPACITY, Kind.EVICTION)
)


@dataclass(frozen=True)
class PodHistory:
    """When each pod was requested, ready and ended, and why it ended."""

    database: Database
    now: Callable[[], float]

    def asked(self, provider: str, config: PodConfig, *, zone: str, pod: str) -> None:
        """Record a request; repeating it adds no second pod."""
        self.database.write(
            "INSERT OR IGNORE INTO lives (provider, zone, pod, slice, tier, asked_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            *(provider, zone, pod, str(config.slice), config.tier.value, self.now()),
        )

    def askers(self, *, zone: str, pod: str) -> set[str]:
        """Return the ids of all provider records that requested a pod."""
        rows = self.database.read(
            "SELECT DISTINCT provider FROM lives WHERE zone = ? AND pod = ?", zone, pod
        )
        return {row["provider"] for row in rows}

    def ready(self, provider: str, *, zone: str, pod: str) -> None:
        """Record that all hosts of a pod are ready."""
        self.database.write(
            "UPDATE lives SET ready_at = ? WHERE provider = ? AND zone = ? AND pod = ?"
            " AND ended_at IS NULL AND ready_at IS NULL",
            *(self.now(), provider, zone, pod),
        )

    def ended(self, provider: str, *, zone: str, pod: str, cause: Cause) -> None:
        """Record that a pod was refused, lost or released; the first cause counts."""
        self.database.write(
            "UPDATE lives SET ended_at = ?, cause = ? WHERE provider = ? AND zone = ? AND pod = ?"
            " AND ended_at IS NULL",
            *(self.now(), cause.value, provider, zone, pod),
        )

    def order(self, provider: str, config: PodConfig, zones: Sequence[str]) -> list[str]:
        """Return the zones in the given order, with those that refuse last."""
        weights = {zone: self._weight(provider, config, zone) for zone in zones}
        return sorted(zones, key=lambda zone: weights[zone] if weights[zone] > FORGIVEN else 0.0)

    def lives(self, *, since: float) -> list[PodLife]:
        """Return the pods that were wanted at some time after `since`, oldest first."""
        rows = self.database.read(
            "SELECT * FROM lives WHERE ended_at IS NULL OR ended_at >= ? ORDER BY asked_at", since
        )
        return [
            PodLife(
                slice=row["slice"],
                zone=row["zone"],
                tier=Tier(row["tier"]),
                asked_at=row["asked_at"],
                ready_at=row["ready_at"],
                ended_at=row["ended_at"],
                cause=None if row["cause"] is None else Cause(row["cause"]),
            )
            for row in rows
        ]

    def _weight(self, provider: str, config: PodConfig, zone: str) -> float:
        """Return the present weight of a zone's refusals and losses; a new one weighs 1."""
        rows = self.database.read(
            "SELECT ended_at, cause FROM lives WHERE provider = ? AND slice = ? AND tier = ?"
            " AND zone = ? AND ended_at >= ?",
            *(provider, str(config.slice), config.tier.value, zone, self.now() - _COUNTED_S),
        )
        return sum(
            0.5 ** ((self.now() - row["ended_at"]) / HALF_LIFE_S)
            for row in rows
            if row["cause"] in _AGAINST_A_ZONE
        )


FILE = "pods.sqlite"


class Store:
    """Wanted and observed pods, their history, attempts, events and spending.

    It is also the supervisors' journal (`supervision.journal.Journal`), from which a later
    supervisor continues.

    Args:
        folder: By default the state folder (`TPUKIT_STATE_DIR`).
        now: The clock, in seconds since the epoch.

    Raises:
        TPUBackendError: The file cannot be opened, is not a store, or was written by a newer
            tpukit.
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
        """Remove a pod from the store without asking its provider, and stop counting its cost."""
        if row.zone is not None:
            self.spend.end_unseen(row.provider, zone=row.zone, pod=row.pod_name)
            where = {"zone": row.zone, "pod": row.pod_name}
            self.history.ended(row.provider, **where, cause=Cause.STOPPED)
        self.wanted.forget(row.name)
        self.wanted.forget_unused_provider(row.provider, after_s=0.0)
        self.note(
            row.name,
            "forgotten",
            f"{row.pod_name} was removed from the store without asking the provider",
        )

    # --- journal ---------------------------------------------------------------------------

    def record(self, job: str, attempt: Attempt) -> None:
        """Store an attempt, replacing one with the same number."""
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
        """Record an event."""
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
        """Return the label of this store's pods, so that no store deletes another's pods."""
        owner = f"tpukit-{secrets.token_hex(6)}"
        self._database.write("INSERT OR IGNORE INTO facts VALUES ('owner', ?)", owner)
        kept = self._database.read_one("SELECT value FROM facts WHERE name = 'owner'")
        if kept == owner:  # a power cut must not lose the owner of existing pods
            self._database.read("PRAGMA wal_checkpoint(FULL)")
        return kept
