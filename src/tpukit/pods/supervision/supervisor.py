"""`Supervisor`: keeps a job going until it is done, or until going on would be in vain.

An attempt is a gang on a pod. When one ends, its cause decides: an eviction asks for a pod
elsewhere, a failure of infrastructure starts the gang again from the last checkpoint, an error of
the program stops. Every step of that is in the journal before it is done, so another supervisor
goes on where this one was killed.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ...errors import ProviderError
from ...runtime.interruption import undone_if_interrupted
from ..causes import Cause, Ending, Kind
from ..config import PodConfig
from ..pod import Pod, check_name
from ..providers.protocol import Command, Ended, Gang, Provider, Restarted, StepCompleted
from .events import AttemptBegan, AttemptEnded, SupervisionEvent
from .journal import Attempt, Journal, MemoryJournal, losses
from .outcome import Outcome
from .policy import Policy
from .zone_search import NoPod, PodWatch, Stopped, ZoneSearch, ending_of

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # how late a wish to stop or to resize is seen
WRITE_S = 1.0  # how old the newest step in the journal may be


class Supervisor:
    """Runs one job on pods of a provider.

    ```python
    outcome = Supervisor("my-run", PodConfig(tpu_type="v6e-16"), command, LocalProvider()).run()
    ```

    Args:
        job: Its name; pods are called `JOB-aN`. The same job again goes on from its journal.
        config: Which pod, in which zones.
        command: What every host runs.
        provider: Who gives pods.
        journal: Where attempts are kept; by default only as long as this process lives.
        policy: How much is tried.
        tell: Called with everything that happens, in the thread of `run`.
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
        """Let the job save and end; from any thread."""
        self._stopping.set()

    def resize(self, config: PodConfig, command: Command | None = None) -> None:
        """Go on with another pod: save, stop, ask, reshard, resume; from any thread.

        Args:
            config: Which pod from then on.
            command: What to run there, where that is not the same.
        """
        self._resize_to = (config, command or self._command)

    def run(self) -> Outcome:
        """Supervise until the job has ended; its pod is given back then.

        Raises:
            ProviderError: The provider cannot be reached, or refuses who asks.
        """
        with undone_if_interrupted(self._abandon):
            try:
                self._recover()
                while (reason := self._why_stop()) is None:
                    self._attempt()
                return self._outcome(reason)
            except Stopped:
                return self._outcome("it was asked to stop", Ending(Cause.STOPPED))
            except NoPod as refused:
                return self._outcome("no zone has a pod for it", refused.ending)
            finally:
                self._abandon()

    # --- one attempt -----------------------------------------------------------------------

    def _attempt(self) -> None:
        """Make an attempt, from asking for a pod to its ending."""
        before = self._attempts()
        if self._stopping.wait(self._policy.pause_s(before)):
            raise Stopped
        number, asked_at = len(before) + 1, time.time()

        def on(pod: str, zone: str) -> Attempt:
            where = str(self._config.slice)
            return Attempt(number=number, pod=pod, zone=zone, slice=where, asked_at=asked_at)

        # Written down before it is asked for: whoever comes after a crash knows where to look.
        pod = self._usable_pod(number, lambda name, zone: self._record(on(name, zone)))
        attempt = self._record(replace(on(pod.name, pod.zone), started_at=time.time()))
        self._tell(AttemptBegan(attempt))
        try:
            self._gang = self._provider.start(pod, self._command, attempt=number)
        except ProviderError as error:
            # The pod was there a moment ago: its state says more than the error.
            ending = Ending(Cause.UNREACHABLE, evidence=str(error))
            self._ended(attempt, self._explained(ending))
        else:
            self._follow(attempt, self._gang, pod)

    def _follow(self, attempt: Attempt, gang: Gang, pod: Pod) -> None:
        """Watch a gang to its end."""
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
                    # A notice may run, in which processes save: they are told, not killed.
                    lost = watch.lost
                    gang.stop(self._policy.grace_s)
                if self._stopping.is_set() or self._resize_to is not None:
                    gang.stop(self._policy.grace_s)
        finally:
            if watch is not None:
                watch.close()
            gang.close()

    def _explained(self, ending: Ending) -> Ending:
        """Let the pod's state say why, where a process ended because its pod was lost."""
        if ending.cause is Cause.STOPPED and self._resize_to is not None:
            return replace(ending, evidence=f"to go on as {self._resize_to[0].slice}")
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
        """Return the pod of the last attempt where it is still good, or another one."""
        config = self._config
        bad = self._policy.bad_hosts(self._attempts())
        if self._pod is not None:
            pod = self._pods.look(self._pod)
            fits = pod is not None and pod.is_ready and pod.slice == config.slice
            if pod is not None and fits and not {host.name for host in pod.hosts} & set(bad):
                return pod
            self._release()
        name = f"{self._job}-a{number}"
        labels = {**config.labels, "job": self._job, "attempt": str(number)}
        asked = replace(config, labels=labels, avoid=tuple({*config.avoid, *bad}))
        self._pod = self._pods.get(
            name, asked, command=self._command, asking=lambda zone: asking(name, zone)
        )
        return self._pod

    def _release(self) -> None:
        pod, self._pod = self._pod, None
        if pod is not None:
            self._pods.release(pod)

    def _abandon(self) -> None:
        """Leave nothing behind."""
        if self._gang is not None:
            self._gang.close()
        pod = self._pod
        try:
            self._release()
        except ProviderError as error:
            logger.warning("Pod %s could not be deleted: %s", pod and pod.name, error)

    # --- the journal -----------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over from an earlier supervisor of the job, and its pod, where there was one."""
        attempts = self._attempts()
        if not attempts:
            return
        last = attempts[-1]
        # Also of a job that is over: its supervisor may have died before it gave the pod back.
        self._pod = self._provider.get(last.pod, zone=last.zone)
        if last.ending is not None and not last.ending.cause.is_worth_restarting:
            # It had ended for good; if not by being done, whoever calls wants it again.
            self._is_fresh = last.ending.cause is not Cause.DONE
            return
        if last.ending is not None:
            return
        if self._pod is not None and self._pod.is_ready and self._runs_gangs:
            # The provider kept it running: follow it as if nothing had happened.
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
        """Begin an attempt that the provider itself has started on the same pod."""
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
        """Return why there is no next attempt; None to make one."""
        attempts = self._attempts()
        resized, self._resize_to = self._resize_to, None
        if resized is not None:
            self._config, self._command = resized
        if not attempts or self._is_fresh:
            self._is_fresh = False
            return None
        ending = attempts[-1].ending
        if resized is not None and ending is not None and ending.cause is Cause.STOPPED:
            return "it was asked to stop" if self._stopping.is_set() else None
        return self._policy.why_stop(attempts)

    def _outcome(self, reason: str, ending: Ending | None = None) -> Outcome:
        """Return how it all ended; an attempt that never had a pod ends with `ending`."""
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
