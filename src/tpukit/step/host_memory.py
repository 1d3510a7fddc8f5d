"""What one host holds in its memory to save, restore and export the state of a training step.

Sizes only, by the rules of the code that does it: `training.checkpoint` saves and restores through
Orbax, `training.export` writes one parameter at a time. `benchmarks/host_memory.py` holds
the rules against what processes take.

Every byte of a state is written once. Orbax copies what a host is to write to its memory first,
so that training goes on while it is written: an array of which several devices hold the same piece
is cut among them where the piece is large, and is the first one's to write where it is small.
"""

from dataclasses import dataclass

# What of a restore may be under way at once: enough for several streams of a bucket.
READ_AT_ONCE_BYTES = 4 * 10**9
# A piece that is read lies in memory as it is stored and as it is used, until it is on a device.
HELD_WHILE_READ = 2
# Of an array that several devices hold alike, each can write a piece; cutting it compiles a
# program, while training waits, so that only large ones are worth it.
WORTH_CUTTING_BYTES = 16 << 20
# The most of a model that an export writes into one file, as Hugging Face cuts them.
EXPORT_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a state.

    Attributes:
        n_bytes: Of the whole array.
        copies: On how many devices the same piece of it lies.
        is_parameter: Whether it is exported too, or only saved.
    """

    n_bytes: int
    copies: int = 1
    is_parameter: bool = False


@dataclass(frozen=True)
class HostShare:
    """What one of equal hosts holds of a state.

    Args:
        arrays: The state.
        devices: Of all hosts together.
        hosts: How many there are.
    """

    arrays: tuple[StoredArray, ...]
    devices: int
    hosts: int

    @property
    def saved_bytes(self) -> int:
        """What the host that has most to write copies from its devices for a save."""
        return round(sum(self._written(array) for array in self.arrays))

    @property
    def restored_bytes(self) -> int:
        """What a host reads for its devices, a piece that several of them hold once."""
        return round(sum(self._held(array) for array in self.arrays))

    def under_way_bytes(self, at_once: int = READ_AT_ONCE_BYTES) -> int:
        """What of that is read at the same time, counted once."""
        largest = max((array.n_bytes for array in self.arrays), default=0)
        return min(self.restored_bytes, read_limit_bytes(largest, at_once))

    @property
    def restoring_bytes(self) -> int:
        """What a restore holds in host memory at most."""
        return HELD_WHILE_READ * self.under_way_bytes()

    def exporting_bytes(self, file_bytes: int) -> int:
        """What an export holds: the parameter that is being read, and the file that is filled.

        Args:
            file_bytes: The most that goes into one file.
        """
        sizes = [array.n_bytes for array in self.arrays if array.is_parameter]
        return exporting_bytes(max(sizes, default=0), sum(sizes), file_bytes)

    def _piece(self, array: StoredArray) -> float:
        return array.n_bytes * array.copies / self.devices

    def _held(self, array: StoredArray) -> float:
        return min(array.n_bytes, self._piece(array) * self.devices / self.hosts)

    def _written(self, array: StoredArray) -> float:
        if array.copies == 1 or self._piece(array) / array.copies >= WORTH_CUTTING_BYTES:
            return array.n_bytes / self.hosts
        return self._held(array)


def exporting_bytes(largest: int, total: int, file_bytes: int = EXPORT_FILE_BYTES) -> int:
    """Host memory of an export of parameters, given the largest of them and all together."""
    return HELD_WHILE_READ * largest + min(total - largest, file_bytes)


def read_limit_bytes(largest_bytes: int, at_once: int) -> int:
    """How much a restore may have under way; Orbax wants more room than its largest array."""
    return max(at_once, largest_bytes + 1)
