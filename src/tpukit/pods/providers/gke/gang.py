"""The gang of a JobSet: reports its logs, steps, restarts and end as they happen."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ....errors import ProviderError
from ....records.reporting import read_report
from ...causes import Cause, Ending
from ...manifests import names
from ...manifests.jobset import CONTAINER
from ...manifests.reading import at, texts
from ...pod import Host, Pod
from ..protocol import Ended, GangEvent, Line, Restarted, StepCompleted
from .api import CORE, JOBSETS, ClusterApi, Object
from .following import Follower, LogStream
from .signals import (
    Signal,
    condition,
    hosts_of,
    is_evicted,
    jobset_signal,
    pod_signal,
    workload_signal,
)

_OVER = ("Succeeded", "Failed")
# From primary causes to those that follow from others.
_ORDER = (
    *(Cause.IMAGE, Cause.CONFIGURATION, Cause.DIRTY_HOST, Cause.OUT_OF_MEMORY, Cause.KILLED),
    *(Cause.DEADLINE, Cause.HUNG, Cause.STORAGE, Cause.BAD_INPUT, Cause.DIVERGED, Cause.FAILED),
    *(Cause.NOTICE, Cause.ABORTED, Cause.PEER_LOST),
)


@dataclass
class RoundMember:
    """A Pod of a round.

    Attributes:
        pod: Its latest document.
        ended_as: Its document when it was first seen ended; None while it runs.
        is_gone: Whether its object is deleted.
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
    def was_deleted_by_job(self) -> bool:
        """Whether the Job deleted it after another Pod had failed."""
        ended = self.ended_as or self.pod
        return bool(at(ended, "metadata", "deletionTimestamp")) and not is_evicted(ended)


@dataclass
class PodRound:
    """The Pods that run together between two restarts.

    Attributes:
        attempt: JobSet's number of the round.
        suspended: Kueue's message when it took the quota back.
        nodes: Nodes at the time when a Pod on them was evicted, by name.
    """

    attempt: int
    members: dict[str, RoundMember] = field(default_factory=dict[str, RoundMember])
    suspended: Signal | None = None
    nodes: dict[str, Object] = field(default_factory=dict[str, Object])

    def see(self, pod: Object, *, is_there: bool) -> RoundMember:
        """Record a Pod."""
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
        """Whether all its Pods have ended, but not all successfully."""
        return bool(self.members) and all(member.is_over for member in self.members.values())

    def stuck(self) -> Ending | None:
        """Return why one of its containers can never start, or None."""
        for member in self.members.values():
            signal = pod_signal(member.pod) if member.ended_as is None else None
            if signal and signal.cause in (Cause.IMAGE, Cause.CONFIGURATION):
                return signal.on(member.host)
        return None

    def ending(self) -> Ending:
        """Return the cause of its end: an evicted Pod, or the one that failed first."""
        seen = [(member, self._signal(member)) for member in self.members.values()]
        evicted = [(member, signal) for member, signal in seen if signal and is_evicted(member.pod)]
        if evicted:
            member, signal = evicted[0]
            return signal.on(member.host)
        if self.suspended:
            return self.suspended.on("")
        failed = [(member, signal) for member, signal in seen if signal]
        first = [
            (member, signal) for member, signal in failed if not member.was_deleted_by_job
        ] or failed
        if first:
            member, signal = min(first, key=lambda pair: _rank(pair[1].cause))
            return signal.on(member.host)
        gone = [member.host for member in self.members.values() if member.ended_as is None]
        if gone:
            return Ending(Cause.NODE_GONE, host=gone[0], evidence="the Pod vanished")
        return Ending(Cause.KILLED, evidence="the Pods ended without a reason")

    def _signal(self, member: RoundMember) -> Signal | None:
        ended = member.ended_as or member.pod
        node = self.nodes.get(str(at(ended, "spec", "nodeName")))
        return pod_signal(ended, node)


def attempt_of(pod: Object) -> int:
    """Return JobSet's attempt number of a Pod."""
    text = str(at(pod, "metadata", "labels", names.RESTART_ATTEMPT) or "0")
    return int(text) if text.isdigit() else 0


def host_of(pod: Object) -> str:
    """Return the host name of a Pod, which is its name without the random suffix."""
    return str(at(pod, "spec", "hostname") or pod["metadata"]["name"].rpartition("-")[0])


def _rank(cause: Cause) -> int:
    return _ORDER.index(cause) if cause in _ORDER else len(_ORDER)


SETTLE_S = 5.0  # for the last lines and states of Pods after the JobSet has ended
LOOK_S = 0.25


class JobSetGang:
    """Follows the processes of a JobSet across its restarts, which are the cluster's own.

    It changes nothing in the cluster, whatever it sees or does not see: this machine may be offline
    for days while the job makes steps. Only `stop` deletes the JobSet, and `wait` does where no
    container of it has ever started and none ever can.

    Args:
        api: The cluster.
        pod: The pod of the JobSet.
        attempt: The supervisor's number of the current attempt.
    """

    def __init__(self, api: ClusterApi, pod: Pod, *, attempt: int) -> None:
        self._api, self._pod = api, pod
        self._hosts = hosts_of(pod.name, pod.slice)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events: list[GangEvent] = []
        self._attempt = attempt
        self._round: PodRound | None = None
        self._streams: dict[str, LogStream] = {}  # keys are Pod uids
        self._handover: threading.Thread | None = None  # of the previous attempt
        self._jobset: Object | None = None
        self._is_gone = False
        self._over = False
        self._stopping = False
        self._ended_at: float | None = None
        namespace = api.namespace
        self._path = f"{JOBSETS}/namespaces/{namespace}/jobsets/{pod.name}"
        self._pods_path = f"{CORE}/namespaces/{namespace}/pods"
        selector = {"labelSelector": f"{names.JOBSET_NAME}={pod.name}"}
        self._pods = Follower(api, self._pods_path, selector, self._see_pod)
        named = {"fieldSelector": f"metadata.name={pod.name}"}
        jobsets = f"{JOBSETS}/namespaces/{namespace}/jobsets"
        self._followers = (self._pods, Follower(api, jobsets, named, self._see_jobset))

    @property
    def hosts(self) -> Sequence[Host]:
        """Its hosts, in the order of process ids."""
        return self._hosts

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return new events as soon as there are any; an empty list after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._decide()
            with self._changed:
                left_s = deadline - time.monotonic()
                if not self._events and not self._over and left_s > 0:
                    self._changed.wait(min(left_s, LOOK_S))
                if self._events or self._over or left_s <= 0:
                    events, self._events = self._events, []
                    return events

    def stop(self, grace_s: float) -> None:
        """Delete the JobSet: its processes save and end, and are killed if they run too long."""
        with self._lock:
            if self._over:
                return
            first, self._stopping = not self._stopping, True
        if first:
            self._api.delete(self._path, propagation="Foreground")
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not self._is_quiet():
            time.sleep(LOOK_S / 5)
        self._kill_pods()
        self._end(Ending(Cause.STOPPED))

    def close(self) -> None:
        """Stop following, and leave the JobSet as it is; repeated calls do nothing."""
        with self._lock:
            self._over = True
        for follower in self._followers:
            follower.close()
        for stream in self._streams.values():
            stream.close()

    # Updates, in the threads of the followers.

    def _see_pod(self, pod: Object, is_there: bool) -> None:
        with self._changed:
            if self._over:
                return
            current = self._round
            uid = pod["metadata"]["uid"]
            if current is None:
                current = self._round = PodRound(attempt_of(pod))
            elif uid not in current.members:
                if attempt_of(pod) > current.attempt or (current.is_over and is_there):
                    is_same = attempt_of(pod) == current.attempt
                    if is_same and self._is_queued and current.suspended is None:
                        # The JobSet was suspended and resumed, not restarted.
                        current.suspended = Signal(Cause.QUEUE, "the JobSet was suspended")
                    self._restart(current)
                    current = self._round = PodRound(attempt_of(pod))
                elif attempt_of(pod) < current.attempt:
                    return
            current.see(pod, is_there=is_there)
            self._record_node(current, pod)
            started = at(pod, "status", "phase") in ("Running", "Succeeded", "Failed")
            if started and uid not in self._streams:
                host = current.members[uid].host
                self._streams[uid] = LogStream(
                    self._api,
                    pod,
                    CONTAINER,
                    lambda text: self._take(host, text),
                    after=self._handover,
                )
            self._changed.notify_all()

    @property
    def _is_queued(self) -> bool:
        return names.QUEUE in texts(at(self._jobset, "metadata", "labels"))

    def _see_jobset(self, jobset: Object, is_there: bool) -> None:
        with self._changed:
            self._jobset, self._is_gone = jobset, not is_there
            is_suspended = at(jobset, "spec", "suspend") is True
            if self._round and is_suspended:
                if self._round.suspended is None:
                    self._round.suspended = self._why_suspended(jobset)
            elif self._round and not self._round.is_over:
                self._round.suspended = None  # it belongs to the previous round
            self._changed.notify_all()

    def _take(self, host: str, text: str) -> None:
        report = read_report(text)
        with self._changed:
            if report is None:
                self._events.append(Line(host, text))
            elif not report.stopped:
                self._events.append(StepCompleted(host, report.step, report.loss))
            self._changed.notify_all()

    def _restart(self, before: PodRound) -> None:
        """Start a new round, and report how the previous one ended."""
        ending = before.ending()
        self._attempt += 1
        event, streams = Restarted(self._attempt, ending), list(self._streams.values())
        handover = threading.Thread(
            target=self._hand_over, args=(streams, event), name="tpukit-restart", daemon=True
        )
        handover.start()
        self._handover = handover  # last, because other threads join these streams

    def _hand_over(self, streams: Sequence[LogStream], event: Restarted) -> None:
        """Report a new attempt after the last line of the previous one was read."""
        deadline = time.monotonic() + SETTLE_S
        for stream in streams:
            stream.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    # Decisions, in the caller's thread.

    def _decide(self) -> None:
        """End the gang if the JobSet has ended, or if none of its containers can ever start."""
        with self._lock:
            if self._over or self._stopping:
                return
            # Once a container has run, a missing image may be an outage of the registry.
            unstartable = self._round.stuck() if self._round and not self._streams else None
            over = self._jobset_ending()
        if over:
            self._end(over)
        elif unstartable:
            with suppress(ProviderError):  # the next call decides again
                self._api.delete(self._path, propagation="Foreground")
                self._kill_pods()
                self._end(unstartable)

    def _jobset_ending(self) -> Ending | None:
        """Return how the JobSet ended, once its Pods' endings are known; None while it runs."""
        never_there = self._jobset is None and self._followers[-1].has_listed
        if self._is_gone or never_there:
            return Ending(Cause.STOPPED, evidence="the JobSet was deleted")
        if self._jobset is None:
            return None
        failed, done = jobset_signal(self._jobset), condition(self._jobset, "Completed")
        if not (failed or done) or not self._are_endings_known():
            return None
        if failed is None:
            return Ending(Cause.DONE)
        if self._round is None or failed.cause is Cause.DEADLINE:
            return failed.on("")
        ending = self._round.ending()
        return Ending(ending.cause, ending.host, f"{ending.evidence}; {failed.evidence}")

    def _are_endings_known(self) -> bool:
        """Return whether the endings of all Pods are known, or will never be."""
        if self._round is not None and self._round.is_over:
            return True
        if self._pods.silent_since is not None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
        return self._ended_at is not None and time.monotonic() > self._ended_at + SETTLE_S

    def _end(self, ending: Ending) -> None:
        """Read the last lines, then report the end."""
        if self._handover is not None:
            self._handover.join()
        deadline = time.monotonic() + SETTLE_S
        for stream in list(self._streams.values()):
            stream.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            if not self._over:
                self._over = True
                self._events.append(Ended(ending))
            self._changed.notify_all()

    # Queries to the cluster.

    def _record_node(self, round_: PodRound, pod: Object) -> None:
        """Record the node of an evicted Pod at that time, if it can be read."""
        name = str(at(pod, "spec", "nodeName"))
        if is_evicted(pod) and name not in round_.nodes:
            with suppress(ProviderError):
                round_.nodes[name] = self._api.get(f"{CORE}/nodes/{name}") or {}

    def _why_suspended(self, jobset: Object) -> Signal:
        uid = jobset["metadata"]["uid"]
        with suppress(ProviderError):
            for workload in self._api.list_workloads():
                owners = workload["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == uid for owner in owners) and (
                    signal := workload_signal(workload)
                ):
                    return signal
        return Signal(Cause.QUEUE, "the JobSet was suspended")

    def _is_quiet(self) -> bool:
        with self._lock:
            return self._round is None or self._round.is_over

    def _kill_pods(self) -> None:
        selector = f"{names.JOBSET_NAME}={self._pod.name}"
        pods, _ = self._api.list(self._pods_path, labelSelector=selector)
        for pod in pods:
            self._api.delete(f"{self._pods_path}/{pod['metadata']['name']}", grace_s=0)
