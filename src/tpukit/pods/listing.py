"""Pods and runs as `tpukit pods ls` lists them."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..shown import Shown
from .cost import price_of
from .reconciler import KEEPERS, Reconciler
from .store import Store, WantedPod
from .store.locks import is_held


@dataclass(frozen=True)
class PodRow:
    """A line of the list: one wanted pod.

    Attributes:
        steps: The run's newest step on this pod, or None.
        supervised: Whether a supervisor runs; None if the reconciler manages the pod.
    """

    wanted: WantedPod
    provider: str
    age_s: float
    usd_per_hour: float | None
    steps: int | None
    supervised: bool | None

    @property
    def state(self) -> str:
        """The pod's state in one word."""
        if self.wanted.is_released:
            return "deleting"
        return "wanted" if self.wanted.pod is None else self.wanted.pod.state.value

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **self.wanted.to_dict(),
            "provider": self.provider,
            "tier": str(self.wanted.config.tier),
            "state": self.state,
            "age_s": self.age_s,
            "usd_per_hour": self.usd_per_hour,
            "steps": self.steps,
            "supervised": self.supervised,
        }


@dataclass(frozen=True)
class PodListing(Shown):
    """All pods of a store.

    Attributes:
        problems: Providers or pods that could not be queried, with the reason.
    """

    rows: tuple[PodRow, ...]
    problems: tuple[str, ...] = ()
    _facts = (("pods", "rows"), "problems")

    @classmethod
    def look(cls, store: Store, reconciler: Reconciler) -> "PodListing":
        """Reconcile once, and return all pods."""
        report = reconciler.run_pass()
        problems = dict.fromkeys(str(error) for error in report.errors.values())
        for pod in report.unknown:
            problems[
                f"{pod} has this store's label, but the store has no request for it. A copy of "
                "the store may have requested it, or a power cut lost the record. If it is "
                "unused, delete it with the provider's own tools."
            ] = None
        return cls(cls.last_seen(store).rows, tuple(problems))

    @classmethod
    def last_seen(cls, store: Store) -> "PodListing":
        """Return the pods in the store, without asking a provider or changing anything."""
        records = store.wanted.providers()
        return cls(
            tuple(_row(store, row, records[row.provider].name) for row in store.wanted.all())
        )

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        heads = ("name", "pod", "slice", "provider", "zone", "state", "age", "$/h", "step")
        table = Table(*heads, box=None, pad_edge=False)
        for row in self.rows:
            wanted, price = row.wanted, row.usd_per_hour
            table.add_row(
                wanted.name,
                wanted.pod_name,
                f"{wanted.config.slice} {wanted.config.tier}",
                row.provider,
                wanted.zone or "–",
                row.state + (" (unsupervised)" if row.supervised is False else ""),
                str(timedelta(seconds=int(row.age_s))),
                "–" if price is None else f"{price:.2f}",
                "–" if row.steps is None else str(row.steps),
            )
        problems = [Text(problem, style="yellow") for problem in self.problems]
        return Group(table if self.rows else "no pods", *problems)


def _row(store: Store, wanted: WantedPod, provider: str) -> PodRow:
    price = price_of(wanted.config, zone=wanted.zone or "", provider=provider)
    attempts = store.attempts(wanted.name)
    keeper = wanted.keeper
    return PodRow(
        wanted=wanted,
        provider=provider,
        age_s=max(0.0, store.now() - wanted.wanted_at),
        usd_per_hour=price.value,
        steps=attempts[-1].last_step if attempts else None,
        supervised=None if keeper is None else is_held(store.folder / KEEPERS / keeper),
    )
