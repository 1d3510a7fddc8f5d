"""Bad luck with single calls of an API: replies that get lost, outages, slow answers.

A lost reply is the cruel one: the call did its work, and the caller hears of an error.
"""

import fnmatch
import random
import threading
from dataclasses import dataclass
from enum import StrEnum


class Mishap(StrEnum):
    """What goes wrong with a call.

    Attributes:
        LOST_REPLY: It is carried out, and its caller is told that the server went away.
        OUTAGE: It is not carried out; the server is not available.
        SLOW: It is carried out after a pause.
    """

    LOST_REPLY = "lost_reply"
    OUTAGE = "outage"
    SLOW = "slow"


@dataclass
class Fault:
    """A rule by which calls go wrong.

    Attributes:
        calls: Names of methods, with `*` for any letters.
        times: How often it may still strike; None: always.
        share: Share of the calls that it strikes.
        pause_s: Of a slow answer.
    """

    mishap: Mishap
    calls: str = "*"
    times: int | None = 1
    share: float = 1.0
    pause_s: float = 0.0


class Faults:
    """The rules that hold; the first one that strikes decides."""

    def __init__(self, seed: int = 0) -> None:
        self._luck = random.Random(f"{seed}/faults")
        self._lock = threading.Lock()
        self._rules: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Let calls go wrong by one more rule."""
        with self._lock:
            self._rules.append(fault)

    def clear(self) -> None:
        """Let all calls go well."""
        with self._lock:
            self._rules.clear()

    def strike(self, call: str) -> Fault | None:
        """Return what goes wrong with this call, or None."""
        with self._lock:
            for rule in self._rules:
                if not fnmatch.fnmatchcase(call, rule.calls) or rule.times == 0:
                    continue
                if rule.share < 1.0 and self._luck.random() >= rule.share:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None
