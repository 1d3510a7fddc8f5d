"""`Supervisor`: run a job until it is done, or until restarting cannot help.

An attempt is a gang on a pod. When it ends, its cause decides: after an eviction a pod is requested
elsewhere, after an infrastructure failure the gang restarts from the last checkpoint, after an
error of the program the job stops. Every action is in the journal before it is taken, so another
supervisor can continue after a crash.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import ProviderError
from ...runtime.interruption import undone_if_interrupted
from ...shown import Shown
from ..causes import Cause, Ending, Kind
from ..config import PodConfig
from ..pod import Pod, check_name
from ..providers.protocol import Command, Ended, Gang, Provider, Restarted, StepCompleted
from .journal import (
    Attempt,
    AttemptBegan,
    AttemptEnded,
    Journal,
    Loss,
    MemoryJournal,
    SupervisionEvent,
    losses,
)
from .policy import Policy
from .zone_search import NoPod, PodWatch, Stopped, ZoneSearch, ending_of


@dataclass(frozen=True, kw_only=True)
class Outcome(Shown):
    """How a job ended.

    Attributes:
        ending: Ending of its last attempt.
        reason: Why it was not started again.
        losses: The cost of each interruption.
    """

    job: str
    ending: Ending
    reason: str
    attempts: tuple[Attempt, ...]
    losses: tuple[Loss, ...]
    _facts = ("job", ("done", "is_done"), "ending", "reason", "attempts", "losses")

    @property
    def is_done(self) -> bool:
        """Whether the job finished."""
        return self.ending.cause is Cause.DONE

    def __rich__(self) -> str:
        tries = len(self.attempts)
        return f"{self.job}: {self.ending} after {tries} attempt{'s' * (tries > 1)} ({self.reason})"


logger = logging.getLogger(__name__)

LOOK_S = 0.5  # largest delay until a request to stop or resize is noticed
WRITE_S = 1.0  # largest age of the journal's newest step


class LeftRunning(Exception):
    """The supervisor ends, and the provider goes on with the job."""


class Supervisor:
    """Runs one job on pods of a provider.

    A provider that runs gangs itself (`Capabilities.runs_gangs`) places and restarts the job. The
    supervisor then only submits and reports, and its own end, whatever the reason, changes nothing.

    ```python
    outcome = Supervisor("my-run", PodConfig(tpu_type="v6e-16"), command, LocalProvider()).run()
    ```

    Args:
        job: Name of the job; its pods are called `JOB-aN`. The same name continues from the
            journal.
        config: The request, with its zones.
        command: The command for every host.
        provider: The provider of pods.
        journal: Stores attempts; by default only in this process.
        policy: Limits on restarts and waits.
        tell: Called with every event, in the thread of `run`.
    """

    def __init__(
        self,
        job: str,
        config: PodConfig,
        command: Command,
        provider: Provider,
        journal: Journal | None = None,
        *,
        policy: Policy | None = None,
        tell: Callable[[SupervisionEvent], None] | None = None,
    ) -> None:
        self._job, self._config, self._command = check_name(job), config, command
        self._provider, self._policy = provider, policy or Policy()
        self._journal: Journal = journal or MemoryJournal()
        self._tell: Callable[[SupervisionEvent], None] = tell or (lambda event: None)
        self._stopping = threading.Event()
        self._resize_to: tuple[PodConfig, Command] | None = None
        self._runs_gangs = provider.capabilities.runs_gangs
        self._is_fresh = False
        self._written_at = 0.0
        self._pod: Pod | None = None
        self._gang: Gang | None = None
        self._pods = ZoneSearch(provider, self._policy, tell=self._tell, stopping=self._stopping)

    def stop(self) -> None:
        """Tell the job to save and end; usable from any thread."""
        self._stopping.set()

    def leave(self) -> None:
        """End the supervisor and leave the job to its provider; usable from any thread.

        The same as `stop` where the provider does not run the job itself.
        """
        self._pods.is_leaving = self._runs_gangs
        self._stopping.set()

    def resize(self, config: PodConfig, command: Command | None = None) -> None:
        """Save, stop, and resume on another pod; usable from any thread.

        Args:
            config: The new request.
            command: The new command, if it changes.
        """
        self._resize_to = (config, command or self._command)

    def run(self) -> Outcome:
        """Supervise until the job has ended, and release its pod.

        Raises:
            ProviderError: The provider cannot be reached, or rejects the credentials.
            LeftRunning: `leave` was called, and the job goes on without a supervisor.
        """
        with undone_if_interrupted(self._abandon):
            try:
                outcome = self._supervise()
            except BaseException:
                self._abandon()
                raise
            self._close(releases=True)
            return outcome

    def _supervise(self) -> Outcome:
        try:
            self._recover()
            while (reason := self._why_stop()) is None:
                self._attempt()
            return self._outcome(reason)
        except Stopped:
            if self._pods.is_leaving:
                raise LeftRunning from None
            return self._outcome("a stop was requested", Ending(Cause.STOPPED))
        except NoPod as refused:
            return self._outcome("no zone has capacity", refused.ending)

    # --- one attempt -----------------------------------------------------------------------

    def _attempt(self) -> None:
        """Make an attempt, from the request for a pod to the ending."""
        before = self._attempts()
        if self._stopping.wait(self._policy.pause_s(before)):
            raise Stopped
        number, asked_at = len(before) + 1, time.time()

        def on(pod: str, zone: str) -> Attempt:
            where = str(self._config.slice)
            return Attempt(number=number, pod=pod, zone=zone, slice=where, asked_at=asked_at)

        # Recorded before the request, so that it can be found after a crash.
        pod = self._usable_pod(number, lambda name, zone: self._record(on(name, zone)))
        attempt = self._record(replace(on(pod.name, pod.zone), started_at=time.time()))
        self._tell(AttemptBegan(attempt))
        try:
            self._gang = self._provider.start(pod, self._command, attempt=number)
        except ProviderError as error:
            # The pod existed a moment ago, so its state explains more than the error.
            ending = Ending(Cause.UNREACHABLE, evidence=str(error))
            self._ended(attempt, self._explained(ending))
        else:
            self._follow(attempt, self._gang, pod)

    def _follow(self, attempt: Attempt, gang: Gang, pod: Pod) -> None:
        """Follow a gang until it ends."""
        watch, lost = None, None
        if not self._runs_gangs:
            watch = PodWatch(self._provider, pod, self._policy.poll_s)
        try:
            while True:
                for event in gang.wait(LOOK_S):
                    self._tell(event)
                    if isinstance(event, StepCompleted):
                        attempt = self._progressed(attempt, event)
                    elif isinstance(event, Restarted):
                        self._ended(attempt, event.ending)
                        attempt = self._restarted(attempt)
                    elif isinstance(event, Ended):
                        ending = self._explained(event.ending) if lost is None else ending_of(lost)
                        self._ended(attempt, ending)
                        return
                if watch is not None and watch.lost is not None and lost is None:
                    # Processes may be saving after a preemption notice, so they are told, not
                    # killed.
                    lost = watch.lost
                    gang.stop(self._policy.grace_s)
                if self._pods.is_leaving:
                    raise LeftRunning
                if self._stopping.is_set() or self._resize_to is not None:
                    gang.stop(self._policy.grace_s)
        finally:
            if watch is not None:
                watch.close()
            gang.close()

    def _explained(self, ending: Ending) -> Ending:
        """Replace the cause by the pod's, if a process ended because its pod was lost."""
        if ending.cause is Cause.STOPPED and self._resize_to is not None:
            return replace(ending, evidence=f"to continue as {self._resize_to[0].slice}")
        uncertain = ending.cause.kind in (Kind.EVICTION, Kind.INFRASTRUCTURE)
        if not uncertain or self._runs_gangs or self._pod is None:
            return ending
        now = self._pods.look(self._pod)
        if now is not None and not now.state.is_lost:
            return ending
        lost = ending_of(now) if now is not None else Ending(Cause.NODE_GONE)
        seen = "; ".join(filter(None, (lost.evidence, str(ending))))
        return replace(lost, host=ending.host, evidence=seen)

    # --- pods ------------------------------------------------------------------------------

    def _usable_pod(self, number: int, asking: Callable[[str, str], object]) -> Pod:
        """Return the last attempt's pod if it is still usable, else another one."""
        config = self._config
        bad = self._policy.bad_hosts(self._attempts())
        if self._pod is not None:
            pod = self._pods.look(self._pod)
            fits = pod is not None and pod.is_ready and pod.slice == config.slice
            fits = fits and not self._runs_gangs  # there, the attempt before has ended for good
            if pod is not None and fits and not {host.name for host in pod.hosts} & set(bad):
                return pod
            self._release()
        name = f"{self._job}-a{number}"
        labels = {**config.labels, "job": self._job, "attempt": str(number)}
        request = replace(config, labels=labels, avoid=tuple({*config.avoid, *bad}))
        self._pod = self._pods.get(
            name, request, command=self._command, asking=lambda zone: asking(name, zone)
        )
        return self._pod

    def _release(self) -> None:
        pod, self._pod = self._pod, None
        if pod is not None:
            self._pods.release(pod)

    def _abandon(self) -> None:
        """End before the job has: leave nothing behind, or leave the job to its provider."""
        self._close(releases=not self._runs_gangs)

    def _close(self, *, releases: bool) -> None:
        if self._gang is not None:
            self._gang.close()
        if not releases:
            return
        pod = self._pod
        try:
            self._release()
        except ProviderError as error:
            logger.warning("Pod %s could not be deleted: %s", pod and pod.name, error)

    # --- the journal -----------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over the job and pod of an earlier supervisor, if there was one."""
        attempts = self._attempts()
        if not attempts:
            return
        last = attempts[-1]
        # Also for a finished job, because its supervisor may have died before releasing the pod.
        self._pod = self._provider.get(last.pod, zone=last.zone)
        is_final = last.ending is not None and not last.ending.cause.is_worth_restarting
        if last.ending is not None and (is_final or self._runs_gangs):
            # It had ended. Unless it was done, the caller wants another attempt.
            self._is_fresh = last.ending.cause is not Cause.DONE
            return
        if last.ending is not None:
            return
        if self._pod is not None and self._runs_gangs:
            # The provider kept it running or queued, so follow it.
            self._gang = self._provider.start(self._pod, self._command, attempt=last.number)
            self._follow(last, self._gang, self._pod)
        else:
            self._ended(last, Ending(Cause.SUPERVISOR_LOST))

    def _attempts(self) -> list[Attempt]:
        return list(self._journal.attempts(self._job))

    def _record(self, attempt: Attempt) -> Attempt:
        self._journal.record(self._job, attempt)
        self._written_at = time.monotonic()
        return attempt

    def _progressed(self, attempt: Attempt, event: StepCompleted) -> Attempt:
        now = time.time()
        first = attempt.first_step is None
        attempt = replace(
            attempt,
            first_step=event.step if first else attempt.first_step,
            first_step_at=now if first else attempt.first_step_at,
            last_step=event.step,
            last_step_at=now,
            last_loss=event.loss,
        )
        if first or time.monotonic() > self._written_at + WRITE_S:
            self._record(attempt)
        return attempt

    def _restarted(self, before: Attempt) -> Attempt:
        """Record an attempt that the provider itself has started on the same pod."""
        now = time.time()
        attempt = Attempt(
            number=before.number + 1,
            pod=before.pod,
            zone=before.zone,
            slice=before.slice,
            asked_at=now,
            started_at=now,
        )
        self._tell(AttemptBegan(self._record(attempt)))
        return attempt

    def _ended(self, attempt: Attempt, ending: Ending) -> None:
        ended = self._record(replace(attempt, ended_at=time.time(), ending=ending))
        self._tell(AttemptEnded(ended))

    # --- what follows ----------------------------------------------------------------------

    def _why_stop(self) -> str | None:
        """Return why there is no next attempt, or None."""
        attempts = self._attempts()
        resized, self._resize_to = self._resize_to, None
        if resized is not None:
            self._config, self._command = resized
        if not attempts or self._is_fresh:
            self._is_fresh = False
            return None
        ending = attempts[-1].ending
        if resized is not None and ending is not None and ending.cause is Cause.STOPPED:
            return "a stop was requested" if self._stopping.is_set() else None
        if self._runs_gangs and ending is not None and ending.cause is not Cause.SUPERVISOR_LOST:
            return self._why_ended(ending)
        return self._policy.why_stop(attempts)

    def _why_ended(self, ending: Ending) -> str:
        """Return why a job has ended that its provider restarts itself."""
        if ending.cause.kind is Kind.DONE:
            return ending.cause.meaning
        return "its provider does not restart it any more"

    def _outcome(self, reason: str, ending: Ending | None = None) -> Outcome:
        """Return the outcome; an attempt that never had a pod gets `ending`."""
        attempts = self._attempts()
        if ending is not None and attempts and attempts[-1].ending is None:
            self._ended(attempts[-1], ending)
            attempts = self._attempts()
        final = ending or attempts[-1].ending
        assert final is not None
        return Outcome(
            job=self._job,
            ending=final,
            reason=reason,
            attempts=tuple(attempts),
            losses=tuple(losses(attempts)),
        )
