"""One round of a JobSet: the Pods that run together, from their making to the last one's end.

A JobSet that restarts makes new Pods after the old ones are gone; one that Kueue suspends does the
same later, under the same attempt. So a round is known by its Pods and not by a number.
"""

from dataclasses import dataclass, field
from typing import Any

from ...causes import Cause, Ending
from ...manifests import names
from ...manifests.reading import at
from .signals import Signal, is_evicted, pod_signal

Object = dict[str, Any]

_OVER = ("Succeeded", "Failed")
# What was first comes first: the later ones follow from the earlier.
_ORDER = (
    *(Cause.IMAGE, Cause.CONFIGURATION, Cause.DIRTY_HOST, Cause.OUT_OF_MEMORY, Cause.KILLED),
    *(Cause.DEADLINE, Cause.HUNG, Cause.STORAGE, Cause.BAD_INPUT, Cause.DIVERGED, Cause.FAILED),
    *(Cause.NOTICE, Cause.ABORTED, Cause.PEER_LOST),
)


@dataclass
class RoundMember:
    """A Pod of a round.

    Attributes:
        pod: As it was last seen.
        ended_as: As it was first seen ended; None while it runs.
        is_gone: Whether its object is gone.
    """

    host: str
    pod: Object
    ended_as: Object | None = None
    is_gone: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it runs no more."""
        return self.is_gone or self.ended_as is not None

    @property
    def was_told(self) -> bool:
        """Whether it ended because the Job deleted it, after another one."""
        ended = self.ended_as or self.pod
        return bool(at(ended, "metadata", "deletionTimestamp")) and not is_evicted(ended)


@dataclass
class PodRound:
    """The Pods that run together.

    Attributes:
        attempt: JobSet's own number of it.
        suspended: What Kueue said when it took the quota back.
        nodes: As they were when a Pod on them was evicted, by name.
    """

    attempt: int
    members: dict[str, RoundMember] = field(default_factory=dict[str, RoundMember])
    suspended: Signal | None = None
    nodes: dict[str, Object] = field(default_factory=dict[str, Object])

    def see(self, pod: Object, *, is_there: bool) -> RoundMember:
        """Take note of a Pod."""
        uid = pod["metadata"]["uid"]
        member = self.members.get(uid)
        if member is None:
            member = self.members[uid] = RoundMember(host_of(pod), pod)
        member.pod = pod
        if at(pod, "status", "phase") in _OVER and member.ended_as is None:
            member.ended_as = pod
        member.is_gone = member.is_gone or not is_there
        return member

    @property
    def is_over(self) -> bool:
        """Whether all of its Pods have ended, and not all of them well."""
        return bool(self.members) and all(one.is_over for one in self.members.values())

    def stuck(self) -> Ending | None:
        """Return why a container of it can never start; None where all may."""
        for one in self.members.values():
            signal = pod_signal(one.pod) if one.ended_as is None else None
            if signal and signal.cause in (Cause.IMAGE, Cause.CONFIGURATION):
                return signal.on(one.host)
        return None

    def ending(self) -> Ending:
        """Return the one cause of its end: who was taken away, or who failed first."""
        seen = [(one, self._signal(one)) for one in self.members.values()]
        evicted = [(one, signal) for one, signal in seen if signal and is_evicted(one.pod)]
        if evicted:
            member, signal = evicted[0]
            return signal.on(member.host)
        if self.suspended:
            return self.suspended.on("")
        failed = [(one, signal) for one, signal in seen if signal]
        first = [(one, signal) for one, signal in failed if not one.was_told] or failed
        if first:
            member, signal = min(first, key=lambda pair: _rank(pair[1].cause))
            return signal.on(member.host)
        gone = [one.host for one in self.members.values() if one.ended_as is None]
        if gone:
            return Ending(Cause.NODE_GONE, host=gone[0], evidence="the Pod vanished")
        return Ending(Cause.KILLED, evidence="the Pods ended, and nothing says why")

    def _signal(self, member: RoundMember) -> Signal | None:
        ended = member.ended_as or member.pod
        node = self.nodes.get(str(at(ended, "spec", "nodeName")))
        return pod_signal(ended, node)


def attempt_of(pod: Object) -> int:
    """Return the attempt that a Pod belongs to, as JobSet counts."""
    text = str(at(pod, "metadata", "labels", names.RESTART_ATTEMPT) or "0")
    return int(text) if text.isdigit() else 0


def host_of(pod: Object) -> str:
    """Return the host that a Pod is, by its name without the random ending."""
    return str(at(pod, "spec", "hostname") or pod["metadata"]["name"].rpartition("-")[0])


def _rank(cause: Cause) -> int:
    return _ORDER.index(cause) if cause in _ORDER else len(_ORDER)
