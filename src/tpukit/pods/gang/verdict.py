"""From the exit codes of a gang to the one cause: who died, and who only lost somebody.

One process that ends takes the others with it within a fraction of a second: they lose their
connection (201), or jax's coordination client aborts them (134). So causes are ordered, and the
first that any process shows is the one that counts.
"""

import signal
from collections.abc import Mapping, Sequence

from ...runtime.exit_codes import ExitCode
from ..causes import Cause, Ending
from ..pod import Host
from ..worker.order import AgentExit

_SIGNALLED = 128
_CAUSES: Mapping[int, Cause] = {
    ExitCode.DONE: Cause.DONE,
    ExitCode.BAD_INPUT: Cause.BAD_INPUT,
    ExitCode.DIVERGED: Cause.DIVERGED,
    ExitCode.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.HUNG: Cause.HUNG,
    ExitCode.PEER_LOST: Cause.PEER_LOST,
    ExitCode.STORAGE: Cause.STORAGE,
    AgentExit.DIRTY_HOST: Cause.DIRTY_HOST,
    _SIGNALLED + signal.SIGKILL: Cause.KILLED,
    _SIGNALLED + signal.SIGTERM: Cause.NOTICE,
    # jax's coordination client and gloo end processes in these ways when a peer is gone.
    _SIGNALLED + signal.SIGABRT: Cause.ABORTED,
    _SIGNALLED + signal.SIGSEGV: Cause.ABORTED,
    _SIGNALLED + signal.SIGBUS: Cause.ABORTED,
}
# What was first comes first: the later ones follow from the earlier.
_ORDER = (
    *(Cause.DIRTY_HOST, Cause.UNREACHABLE, Cause.KILLED, Cause.NOTICE, Cause.HUNG),
    *(Cause.STORAGE, Cause.OUT_OF_MEMORY, Cause.BAD_INPUT, Cause.DIVERGED),
    *(Cause.FAILED, Cause.ABORTED, Cause.PEER_LOST, Cause.DONE),
)
# Ends that may be the echo of another one which is still to be seen.
ECHOES = frozenset({Cause.FAILED, Cause.ABORTED, Cause.PEER_LOST})


def cause_of(code: int, *, unreachable_code: int | None = None) -> Cause:
    """Return what an exit code says by itself (-n or 128 + n for signal n)."""
    if unreachable_code is not None and code == unreachable_code:
        return Cause.UNREACHABLE
    return _CAUSES.get(_SIGNALLED - code if code < 0 else code, Cause.FAILED)


def judge(
    hosts: Sequence[Host],
    exits: Mapping[int, int],
    *,
    last_words: Mapping[int, str] | None = None,
    stopped_early: str = "",
    heartbeat_s: float | None = None,
    unreachable_code: int | None = None,
) -> Ending:
    """Return the one ending of a gang, from the exit codes that are known.

    Args:
        hosts: All of them, in the order of process ids.
        exits: Exit codes by process id; the others still run.
        last_words: The last line of each process's errors.
        stopped_early: Why the run says it ended before its last step, having saved.
        heartbeat_s: After how long of silence jax gives a process up.
        unreachable_code: The exit code that means that the connection broke.
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
        # Everyone gave up, and not because somebody ended: who is left did not answer.
        waited = "" if heartbeat_s is None else f" within {heartbeat_s:g} s"
        return Ending(
            Cause.HUNG,
            host=alive[0].name if len(alive) == 1 else "",
            evidence=f"{', '.join(host.name for host in alive)} did not answer{waited}",
        )
    # Who was killed had nothing to say about it.
    silent = cause in (Cause.KILLED, Cause.NOTICE)
    words = "" if silent else (last_words or {}).get(rank, "")
    return Ending(cause, host=hosts[rank].name, evidence=_describe(exits[rank], words))


def _describe(code: int, words: str) -> str:
    number = -code if code < 0 else code - _SIGNALLED
    signals = {one.value: one.name for one in signal.Signals}
    how = signals.get(number, f"exit code {code}")
    return f"{how}; {words}" if words else how
