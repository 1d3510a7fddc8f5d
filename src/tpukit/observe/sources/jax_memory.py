"""Memory of this process's devices, as the jax runtime counts it."""

from ...runtime.environment import jax_state
from ..readings import Reading, ReadingBuilder

# jax's name of each.
STATISTICS = {
    "memory_used": "bytes_in_use",
    "memory_total": "bytes_limit",
    "memory_peak": "peak_bytes_in_use",
}


class JaxSource:
    """Reads `memory_stats()` of each local device, once the program has opened them.

    Args:
        process: Index of the process of the run.
    """

    name = "jax"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process

    def read(self) -> Reading:
        """Ask the runtime; never opens the devices of a program that has not."""
        found = ReadingBuilder(self.name, STATISTICS, process=self._process)
        if jax_state() != "initialised":
            return found.build(otherwise="jax has not opened its devices in this process")
        import jax

        reason = "jax has no local devices"
        for chip, device in enumerate(jax.local_devices()):
            try:
                counted = device.memory_stats() or {}
            except (jax.errors.JaxRuntimeError, RuntimeError) as error:
                reason = f"{device.device_kind} no longer answers: {str(error).splitlines()[0]}"
                continue
            if not counted:
                reason = f"the runtime of {device.device_kind} counts no memory"
            for metric, statistic in STATISTICS.items():
                if statistic in counted:
                    found.add(metric, counted[statistic], chip=chip)
        return found.build(otherwise=reason)

    def close(self) -> None:
        """Do nothing: the devices belong to the program."""
