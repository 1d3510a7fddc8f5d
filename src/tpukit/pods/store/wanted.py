"""Pods that are wanted, where they are asked for, and what was last seen of them."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ...errors import ConfigError
from ...hardware import Slice
from ...job.sections import LaunchSettings
from ..config import PodConfig
from ..limits import Hold
from ..pod import Pod, Tier
from .database import Database
from .records import (
    ProviderRecord,
    WantedPod,
    check_run_name,
    pod_name,
    split_pod_name,
    to_json,
)


@dataclass(frozen=True)
class WantedPods:
    """The desired state, and beside it the observed one."""

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
        """Ask for a pod to be there; asking again for the same one changes nothing.

        Raises:
            ConfigError: The name cannot be one, or another pod is wanted under it.
        """
        check_run_name(name)
        with self.database.writing():
            before = self.find(name)
            if before is not None:
                if (before.config, before.provider) != (config, provider.id):
                    raise ConfigError(
                        f"A pod named {name!r} is wanted already, as {before.config.slice} from "
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
        found = self.find(name)
        assert found is not None
        return found

    def release(self, name: str) -> None:
        """Give a pod up: it will be deleted. One that is not wanted is no error."""
        self.database.write(
            "UPDATE wanted SET released_at = ? WHERE name = ? AND released_at IS NULL",
            *(self.now(), name),
        )

    def forget(self, name: str) -> None:
        """Remove all that is known of a pod that is gone."""
        with self.database.writing():
            self.database.write(
                "UPDATE providers SET used_at = ? WHERE id ="
                " (SELECT provider FROM wanted WHERE name = ?)",
                *(self.now(), name),
            )
            self.database.write("DELETE FROM wanted WHERE name = ?", name)

    def ask_in(self, name: str, *, zone: str, attempt: int) -> None:
        """Write down where a pod is asked for, before it is; nothing was seen of it yet."""
        with self.database.writing():
            self.observe(name, None)
            self.database.write(
                "UPDATE wanted SET zone = ?, attempt = ?, asked_at = ? WHERE name = ?",
                *(zone, attempt, self.now(), name),
            )

    def ask_nowhere(self, name: str) -> None:
        """Write down that a pod was refused where it was asked for, so that none is there."""
        with self.database.writing():
            self.observe(name, None)
            self.database.write("UPDATE wanted SET zone = NULL WHERE name = ?", name)

    def keep(self, name: str) -> None:
        """Say that the keeper of a pod is alive."""
        self.database.write("UPDATE wanted SET kept_at = ? WHERE name = ?", self.now(), name)

    def observe(self, name: str, pod: Pod | None) -> None:
        """Write down what was seen of a pod; None: it is not there."""
        if pod is None:
            self.database.write("DELETE FROM observed WHERE name = ?", name)
            return
        self.database.write(
            "INSERT OR REPLACE INTO observed VALUES (?, ?, ?)",
            *(name, to_json(pod.to_dict()), self.now()),
        )

    def find(self, name: str) -> WantedPod | None:
        """Return one, or None where it is not wanted."""
        rows = self.database.read(f"{_SELECT} WHERE wanted.name = ?", name)
        return _wanted(rows[0]) if rows else None

    def find_by_any_name(self, name: str) -> WantedPod | None:
        """Return the pod of that name, or the one of the run of that name."""
        return self.find(name) or self.find(split_pod_name(name)[0])

    def all(self, provider: str | None = None) -> Sequence[WantedPod]:
        """Return every wanted or released pod, of one provider or all, highest priority first."""
        query = f"{_SELECT} WHERE ? IN ('', provider) ORDER BY wanted_at"
        found = [_wanted(row) for row in self.database.read(query, provider or "")]
        return sorted(found, key=lambda one: -one.config.priority)

    def holds(self, provider: ProviderRecord, *, besides: str = "") -> list[Hold]:
        """Return what the pods of a provider's project hold where they are asked for, or were.

        Args:
            provider: Whose project counts.
            besides: A run that is left out: what its pod before this one holds, its provider says.
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
        """Return every provider that was asked lately, by id."""
        return {
            row["id"]: ProviderRecord(row["name"], LaunchSettings(**json.loads(row["launch"])))
            for row in self.database.read("SELECT * FROM providers")
        }

    def answered(self, provider: str, *, is_silent: bool) -> None:
        """Write down whether a provider has answered, or since when it has not."""
        self.database.write(
            "UPDATE providers SET silent_since = CASE WHEN ? THEN coalesce(silent_since, ?) END"
            " WHERE id = ?",
            *(is_silent, self.now(), provider),
        )

    def forget_unused_provider(self, provider: str, *, after_s: float) -> bool:
        """Forget a provider some time after its last pod, when all its pods are known to be gone.

        Returns:
            Whether it was forgotten.
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
