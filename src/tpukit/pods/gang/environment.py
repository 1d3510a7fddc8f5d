"""The variables of each process of a job, computed anew for every attempt.

A slice that was replaced has other addresses, and a process that still knows the old ones waits
for ever: nothing of an earlier attempt is kept.
"""

from collections.abc import Sequence

from ...records.reporting import VARIABLE as PROGRESS
from ...records.reporting import WANTED
from ..pod import Host
from ..providers.protocol import Command

MEGASCALE_PORT = 8080


def process_environment(
    hosts: Sequence[Host], rank: int, command: Command, *, coordinator: str, attempt: int
) -> dict[str, str]:
    """Return what the process on `hosts[rank]` gets, beside its host's own variables.

    Args:
        hosts: All of them, in the order of process ids.
        rank: Which of them it is.
        command: Its own variables come first; those that say who a process is win.
        coordinator: `host:port` of jax's coordinator on the first host.
        attempt: From 1.
    """
    variables = {
        **command.environment,
        "TPUKIT_NUM_HOSTS": str(len(hosts)),
        "TPUKIT_HOST_ID": str(rank),
        "TPUKIT_COORDINATOR": coordinator,
        "TPUKIT_HEARTBEAT_S": str(command.heartbeat_s),
        "TPUKIT_ATTEMPT": str(attempt),
        PROGRESS: WANTED,
        "PYTHONUNBUFFERED": "1",
    }
    slices = 1 + max(host.slice_index for host in hosts)
    if slices > 1:
        first = coordinator.rpartition(":")[0]
        variables |= {
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(hosts[rank].slice_index),
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first}:{MEGASCALE_PORT}",
        }
    return variables
