"""Find the one cause for which a gang ended, from the exit codes of its processes.

When one process ends, the others follow within a fraction of a second: they lose their connection
(201), or jax's coordination client aborts them (134). So causes are ranked, and the highest cause
of any process is the gang's.
"""

import signal
from collections.abc import Mapping, Sequence

from ...exit_codes import SIGNALLED, ExitCode
from ..causes import Cause, Ending
from ..pod import Host

_CAUSES: Mapping[int, Cause] = {
    ExitCode.DONE: Cause.DONE,
    ExitCode.BAD_INPUT: Cause.BAD_INPUT,
    ExitCode.DIVERGED: Cause.DIVERGED,
    ExitCode.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.HUNG: Cause.HUNG,
    ExitCode.PEER_LOST: Cause.PEER_LOST,
    ExitCode.STORAGE: Cause.STORAGE,
    ExitCode.DIRTY_HOST: Cause.DIRTY_HOST,
    ExitCode.SETUP_INTERRUPTED: Cause.SETUP,
    SIGNALLED + signal.SIGKILL: Cause.KILLED,
    SIGNALLED + signal.SIGTERM: Cause.NOTICE,
    # jax's coordination client and Gloo end processes in these ways when a peer is gone.
    SIGNALLED + signal.SIGABRT: Cause.ABORTED,
    SIGNALLED + signal.SIGSEGV: Cause.ABORTED,
    SIGNALLED + signal.SIGBUS: Cause.ABORTED,
}
# From primary causes to those that follow from others.
_ORDER = (
    *(Cause.DIRTY_HOST, Cause.UNREACHABLE, Cause.SETUP, Cause.KILLED, Cause.NOTICE),
    *(Cause.HUNG, Cause.STORAGE, Cause.OUT_OF_MEMORY, Cause.BAD_INPUT, Cause.DIVERGED),
    *(Cause.FAILED, Cause.ABORTED, Cause.PEER_LOST, Cause.DONE),
)
# Causes that may follow from another process's ending which is not known yet.
ECHOES = frozenset({Cause.FAILED, Cause.ABORTED, Cause.PEER_LOST})


def cause_of(code: int, *, unreachable_code: int | None = None) -> Cause:
    """Return the cause for an exit code alone (-n or 128 + n for signal n)."""
    if unreachable_code is not None and code == unreachable_code:
        return Cause.UNREACHABLE
    return _CAUSES.get(SIGNALLED - code if code < 0 else code, Cause.FAILED)


def judge(
    hosts: Sequence[Host],
    exits: Mapping[int, int],
    *,
    last_words: Mapping[int, str] | None = None,
    stopped_early: str = "",
    heartbeat_s: float | None = None,
    unreachable_code: int | None = None,
) -> Ending:
    """Return the ending of a gang, from the exit codes known so far.

    Args:
        hosts: All hosts, in the order of process ids.
        exits: Exit codes by process id; other processes still run.
        last_words: Last line of each process's standard error.
        stopped_early: Why the run stopped before its last step, after saving.
        heartbeat_s: The silence after which jax declares a process lost.
        unreachable_code: The exit code of a broken connection.
    """
    causes = {
        rank: cause_of(code, unreachable_code=unreachable_code) for rank, code in exits.items()
    }
    rank, cause = min(causes.items(), key=lambda item: (_ORDER.index(item[1]), item[0]))
    alive = [host for number, host in enumerate(hosts) if number not in exits]
    if cause is Cause.DONE:
        if stopped_early:
            return Ending(Cause.NOTICE, evidence=f"{stopped_early}, with its last step saved")
        return Ending(Cause.DONE)
    if alive and cause in (Cause.ABORTED, Cause.PEER_LOST):
        # All exits follow from a lost peer, so the processes that still run must be hung.
        waited = "" if heartbeat_s is None else f" within {heartbeat_s:g} s"
        return Ending(
            Cause.HUNG,
            host=alive[0].name if len(alive) == 1 else "",
            evidence=f"{', '.join(host.name for host in alive)} did not answer{waited}",
        )
    # A killed process wrote nothing about its end.
    silent = cause in (Cause.KILLED, Cause.NOTICE)
    words = "" if silent else (last_words or {}).get(rank, "")
    return Ending(cause, host=hosts[rank].name, evidence=_describe(exits[rank], words))


def _describe(code: int, words: str) -> str:
    number = -code if code < 0 else code - SIGNALLED
    signals = {number.value: number.name for number in signal.Signals}
    how = signals.get(number, f"exit code {code}")
    return f"{how}; {words}" if words else how
