"""What is done when an alert fires: a callable, a log line, a webhook, a command."""

import inspect
import json
import logging
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from ...errors import TPUValidationError
from .alert import Alert

logger = logging.getLogger(__name__)
WEBHOOK_TIMEOUT_S, COMMAND_TIMEOUT_S = 10.0, 60.0
# As people write them: a function with or without the alert, "log", a web address, a command.
Action: TypeAlias = Callable[[], object] | Callable[[Alert], object] | str | Sequence[str] | None
Perform: TypeAlias = Callable[[Alert], object]


def as_action(action: Action) -> Perform:
    """Return the function that does what a person asked for.

    Raises:
        TPUValidationError: It is nothing that can be done.
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
            "of its arguments, which no shell reads."
        )
    arguments = [*action]
    if not arguments or not all(isinstance(one, str) for one in arguments):  # pyright: ignore[reportUnnecessaryIsInstance]  users may pass anything
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
        OSError: Nobody answered in time, or refused.
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
    """Run a command, without a shell; it gets the alert as JSON on its standard input.

    Raises:
        OSError: There is no such command.
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
    except (TypeError, ValueError):  # some built-in functions have none: print is one
        return function
    try:
        signature.bind()
    except TypeError:
        return cast("Callable[[Alert], Any]", function)
    # One that takes any number of them (print, a variadic lambda) is told what happened.
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
    return function if takes_any else lambda _: function()
