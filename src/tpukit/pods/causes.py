"""Why an attempt at a job ended, and what follows: one vocabulary for every provider.

A preemption is not a failure: it is nobody's fault, costs no restart of the budget, and the same
pod is not asked again. What a provider knows (API states, conditions of Kubernetes) says more than
an exit code, so conditions are tested before codes.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..shown import Shown


class Kind(StrEnum):
    """What to do after an ending.

    Attributes:
        DONE: Nothing.
        EVICTION: Start again, elsewhere if the pod is gone; the budget of restarts is not touched.
        INFRASTRUCTURE: Start again; a host that is to blame again and again is left out.
        CAPACITY: Ask elsewhere, or later.
        APPLICATION: The same would happen again; stop and show the error.
    """

    DONE = "done"
    EVICTION = "eviction"
    INFRASTRUCTURE = "infrastructure"
    CAPACITY = "capacity"
    APPLICATION = "application"


class Cause(StrEnum):
    """Why an attempt ended, or a pod was not to be had."""

    kind: Kind
    meaning: str

    def __new__(cls, value: str, kind: Kind, meaning: str) -> "Cause":
        """Make a member whose value is the word, with its kind and a sentence beside it."""
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

    KILLED = ("killed", Kind.INFRASTRUCTURE, "a process was killed by something unknown")
    PEER_LOST = ("peer_lost", Kind.INFRASTRUCTURE, "a process lost another one")
    ABORTED = ("aborted", Kind.INFRASTRUCTURE, "jax's coordination service ended the process")
    HUNG = ("hung", Kind.INFRASTRUCTURE, "no step was completed in time")
    STORAGE = ("storage", Kind.INFRASTRUCTURE, "checkpoints could not be written or read")
    UNREACHABLE = ("unreachable", Kind.INFRASTRUCTURE, "a host could not be reached")
    DIRTY_HOST = ("dirty_host", Kind.INFRASTRUCTURE, "a host's TPU is held by an earlier process")
    SUPERVISOR_LOST = ("supervisor_lost", Kind.INFRASTRUCTURE, "the supervisor itself ended")

    STOCKOUT = ("stockout", Kind.CAPACITY, "the zone has no such capacity now")
    QUOTA = ("quota", Kind.CAPACITY, "the project's quota is used up")
    UNPLACEABLE = ("unplaceable", Kind.CAPACITY, "no node can ever take it")
    WAITED_TOO_LONG = ("waited_too_long", Kind.CAPACITY, "it was not granted in time")

    OUT_OF_MEMORY = ("out_of_memory", Kind.APPLICATION, "a process used more memory than there is")
    BAD_INPUT = ("bad_input", Kind.APPLICATION, "the job or its data were refused")
    DIVERGED = ("diverged", Kind.APPLICATION, "the loss went bad")
    IMAGE = ("image", Kind.APPLICATION, "the container image cannot be pulled")
    CONFIGURATION = ("configuration", Kind.APPLICATION, "the container cannot be started")
    DEADLINE = ("deadline", Kind.APPLICATION, "the time limit that was set is over")
    FAILED = ("failed", Kind.APPLICATION, "the program ended with an error")

    @property
    def is_worth_restarting(self) -> bool:
        """Whether starting again can help."""
        return self.kind in (Kind.EVICTION, Kind.INFRASTRUCTURE, Kind.CAPACITY)


@dataclass(frozen=True)
class Ending(Shown):
    """How an attempt ended.

    Attributes:
        host: The host to blame, or "" where none is.
        evidence: What was seen, in the words of whoever said it: an exit status, a condition.
    """

    cause: Cause
    host: str = ""
    evidence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "cause": self.cause.value, "kind": self.cause.kind.value}

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        why = f": {self.evidence}" if self.evidence else ""
        return f"{self.cause.meaning}{where}{why}"
