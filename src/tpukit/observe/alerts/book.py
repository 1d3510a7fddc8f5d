"""All rules of a monitor: each value goes to each of them, and whoever is to be told is told."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ...hardware.missing import Measured, Missing
from .actions import Action, as_action
from .alert import Alert
from .rule import AlertRule
from .state import RuleState
from .worker import ActionWorker


@dataclass
class _Entry:
    state: RuleState
    worker: ActionWorker


class AlertBook:
    """Rules with their states and actions.

    Args:
        host: Name of this machine, for explanations.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()  # rules are added while a thread observes

    def add(self, rule: AlertRule, action: Action) -> None:
        """Add a rule and what is done when it fires."""
        entry = _Entry(RuleState(rule), ActionWorker(rule.name, as_action(action)))
        with self._lock:
            self._entries.append(entry)

    @property
    def rules(self) -> list[AlertRule]:
        """Every rule."""
        with self._lock:
            return [entry.state.rule for entry in self._entries]

    @property
    def firing(self) -> list[AlertRule]:
        """Those that fire now."""
        with self._lock:
            return [entry.state.rule for entry in self._entries if entry.state.is_firing]

    def observe(self, metrics: Mapping[str, Measured], now: float) -> list[Alert]:
        """Take the newest metrics, at a time that only goes forward; return what was told."""
        told: list[Alert] = []
        with self._lock:
            entries = [*self._entries]
        for entry in entries:
            rule = entry.state.rule
            value = metrics.get(rule.metric, Missing("nobody measures it"))
            if not entry.state.observe(value, now):
                continue
            wall = time.time()
            since = wall - (now - (entry.state.since or now))
            alert = Alert.of(rule, metrics, since=since, time=wall, host=self._host)
            entry.worker.submit(alert)
            told.append(alert)
        return told

    def close(self) -> None:
        """Let actions finish for a moment."""
        for entry in self._entries:
            entry.worker.close()
