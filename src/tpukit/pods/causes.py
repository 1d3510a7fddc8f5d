"""Causes for which an attempt at a job ends, the same for every provider.

A preemption is not a failure: it does not count against the restart budget, and the lost pod is not
used again. A provider's own states and conditions are more precise than exit codes, so they are
examined first.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..shown import Shown


class Kind(StrEnum):
    """How a supervisor reacts to an ending.

    Attributes:
        DONE: Do nothing.
        EVICTION: Start again, on another pod if this one is gone. The restart budget is not
            charged.
        INFRASTRUCTURE: Start again. A host that fails repeatedly is excluded.
        CAPACITY: Ask in another zone, or later.
        APPLICATION: Stop and show the error, because it would happen again.
    """

    DONE = "done"
    EVICTION = "eviction"
    INFRASTRUCTURE = "infrastructure"
    CAPACITY = "capacity"
    APPLICATION = "application"


class Cause(StrEnum):
    """Why an attempt ended or a pod could not be allocated."""

    kind: Kind
    meaning: str

    def __new__(cls, value: str, kind: Kind, meaning: str) -> "Cause":
        """Make a member with a value, its kind and a sentence that explains it."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.kind, member.meaning = kind, meaning
        return member

    DONE = ("done", Kind.DONE, "finished")
    STOPPED = ("stopped", Kind.DONE, "stopped by its owner")

    NOTICE = ("notice", Kind.EVICTION, "a host was told to stop (SIGTERM)")
    SPOT = ("spot", Kind.EVICTION, "the provider took spot capacity back")
    MAINTENANCE = ("maintenance", Kind.EVICTION, "a host was taken down for maintenance")
    QUEUE = ("queue", Kind.EVICTION, "Kueue gave the quota to a job of higher priority")
    SCHEDULER = ("scheduler", Kind.EVICTION, "the scheduler gave the node to another pod")
    DRAIN = ("drain", Kind.EVICTION, "the node was drained")
    PRESSURE = ("pressure", Kind.EVICTION, "the node ran short of memory, disk or processes")
    NODE_GONE = ("node_gone", Kind.EVICTION, "the node disappeared")

    KILLED = ("killed", Kind.INFRASTRUCTURE, "a process was killed for an unknown reason")
    PEER_LOST = ("peer_lost", Kind.INFRASTRUCTURE, "a process lost another one")
    ABORTED = ("aborted", Kind.INFRASTRUCTURE, "jax's coordination service ended the process")
    HUNG = ("hung", Kind.INFRASTRUCTURE, "no step was completed in time")
    STORAGE = ("storage", Kind.INFRASTRUCTURE, "checkpoints could not be written or read")
    UNREACHABLE = ("unreachable", Kind.INFRASTRUCTURE, "a host could not be reached")
    DIRTY_HOST = ("dirty_host", Kind.INFRASTRUCTURE, "an earlier process still uses a host's TPU")
    SETUP = ("setup", Kind.INFRASTRUCTURE, "a host could not make its Python environment")
    SUPERVISOR_LOST = ("supervisor_lost", Kind.INFRASTRUCTURE, "the supervisor ended")

    STOCKOUT = ("stockout", Kind.CAPACITY, "the zone has no capacity now")
    QUOTA = ("quota", Kind.CAPACITY, "the project's quota is used up")
    UNPLACEABLE = ("unplaceable", Kind.CAPACITY, "no node fits the pod")
    WAITED_TOO_LONG = ("waited_too_long", Kind.CAPACITY, "the request was not granted in time")

    OUT_OF_MEMORY = ("out_of_memory", Kind.APPLICATION, "a process ran out of memory")
    BAD_INPUT = ("bad_input", Kind.APPLICATION, "the job or its data were refused")
    DIVERGED = ("diverged", Kind.APPLICATION, "the loss went bad")
    IMAGE = ("image", Kind.APPLICATION, "the container image cannot be pulled")
    CONFIGURATION = ("configuration", Kind.APPLICATION, "the container cannot be started")
    DEADLINE = ("deadline", Kind.APPLICATION, "the time limit has passed")
    FAILED = ("failed", Kind.APPLICATION, "the program ended with an error")

    @property
    def is_worth_restarting(self) -> bool:
        """Whether starting the job again can help."""
        return self.kind in (Kind.EVICTION, Kind.INFRASTRUCTURE, Kind.CAPACITY)


@dataclass(frozen=True)
class Ending(Shown):
    """How an attempt ended.

    Attributes:
        host: The host that failed, or "" where no single host did.
        evidence: What was observed, for example an exit code or a Kubernetes condition.
    """

    cause: Cause
    host: str = ""
    evidence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "cause": self.cause.value, "kind": self.cause.kind.value}

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        why = f": {self.evidence}" if self.evidence else ""
        return f"{self.cause.meaning}{where}{why}"
