"""Actions of alerts (a function, a log line, a webhook, a command), and their rules."""

import contextlib
import inspect
import json
import logging
import queue
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from urllib.error import URLError
from urllib.parse import urlsplit

from ...errors import TPUValidationError
from ...hardware.missing import Measured, Missing
from .alert import Alert
from .rule import AlertRule, RuleState

logger = logging.getLogger(__name__)
WEBHOOK_TIMEOUT_S, COMMAND_TIMEOUT_S = 10.0, 60.0
# As users write them: a function with or without the alert, "log", a web address, a command.
Action: TypeAlias = Callable[[], object] | Callable[[Alert], object] | str | Sequence[str] | None
Perform: TypeAlias = Callable[[Alert], object]


def as_action(action: Action) -> Perform:
    """Return an action as a function that takes the alert.

    Raises:
        TPUValidationError: It is no function, 'log', web address or command.
    """
    if action is None or action == "log":
        return log_alert
    if callable(action):
        return _calling(action)
    if isinstance(action, str):
        if urlsplit(action).scheme in ("http", "https"):
            return lambda alert: send_webhook(action, alert)
        raise TPUValidationError(
            f"action={action!r} is neither 'log' nor a web address; a command is given as a list "
            "of its arguments, because no shell reads it."
        )
    arguments = [*action]
    if not arguments or not all(isinstance(argument, str) for argument in arguments):  # pyright: ignore[reportUnnecessaryIsInstance]  users may pass anything
        raise TPUValidationError(
            f"action={action!r} is no command; give its arguments as text: ['notify', '--all']."
        )
    return lambda alert: run_command(arguments, alert)


def log_alert(alert: Alert) -> None:
    """Write the explanation to the log, as a warning."""
    logger.warning("alert: %s", alert.explanation)


def send_webhook(url: str, alert: Alert, *, timeout_s: float = WEBHOOK_TIMEOUT_S) -> None:
    """POST the alert as JSON.

    Raises:
        OSError: The server did not answer in time, or refused.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(alert.to_dict()).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "tpukit"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read(1024)


def run_command(
    arguments: Sequence[str], alert: Alert, *, timeout_s: float = COMMAND_TIMEOUT_S
) -> None:
    """Run a command without a shell, with the alert as JSON on its standard input.

    Raises:
        OSError: The command does not exist.
        subprocess.SubprocessError: It failed, or took too long and was killed.
    """
    subprocess.run(
        [*arguments],
        input=json.dumps(alert.to_dict()).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout_s,
        check=True,
    )


def _calling(function: Callable[..., object]) -> Perform:
    """Pass the alert to a function that takes an argument, and nothing to one that does not."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return function
    try:
        signature.bind()
    except TypeError:
        return cast("Callable[[Alert], Any]", function)
    # A function that takes any number of arguments (print, a variadic lambda) gets the alert.
    takes_any = any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()
    )
    return function if takes_any else lambda _: function()


MOST_WAITING = 16
END_WAIT_S = 2.0


class ActionWorker:
    """Performs one rule's action, alert after alert.

    Alerts wait while the action is busy. When too many wait, the newest are dropped with a warning
    in the log. Each rule has its own worker, so that a hanging action delays no other rule.
    """

    def __init__(self, name: str, perform: Perform) -> None:
        self._name, self._perform = name, perform
        self._waiting: queue.Queue[Alert | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def submit(self, alert: Alert) -> None:
        """Queue an alert for the action; returns at once."""
        if self._thread is None:
            # A daemon thread, so that a hanging action does not keep the program from ending.
            self._thread = threading.Thread(
                target=self._run, name=f"alert {self._name}", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self.dropped += 1
            logger.warning(
                "alert %s: its action is still busy with earlier ones, so this one is dropped "
                "(%d so far): %s",
                self._name,
                self.dropped,
                alert.explanation,
            )

    def close(self, timeout_s: float = END_WAIT_S) -> None:
        """Give the action a moment to finish the queued alerts; a hanging action is abandoned."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                self._perform(alert)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - anything a user's action may raise
                logger.warning("alert %s: its action failed: %s", self._name, _reason(error))


def _reason(error: BaseException) -> str:
    """Return the failure without a command's arguments or an address, which may contain secrets."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"the command exited with code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the command took over {error.timeout:g} s and was killed"
    if isinstance(error, URLError):
        return f"the webhook could not be reached ({error.reason})"
    return f"{type(error).__name__}: {error}"


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
        """Add a rule and its action."""
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
        """The rules that are firing."""
        with self._lock:
            return [entry.state.rule for entry in self._entries if entry.state.is_firing]

    def observe(self, metrics: Mapping[str, Measured], now: float) -> list[Alert]:
        """Check all rules against the newest metrics; return the alerts that were sent."""
        sent: list[Alert] = []
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
            sent.append(alert)
        return sent

    def close(self) -> None:
        """Give the actions a moment to finish."""
        for entry in self._entries:
            entry.worker.close()
