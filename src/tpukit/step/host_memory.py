"""Host memory that saving, restoring and exporting a training state takes, by arithmetic.

The rules follow the code: `training.checkpoint` saves and restores through Orbax, and
`training.export` writes one parameter at a time. `benchmarks/memory.py host` compares the rules
with the memory of real processes.

Every byte of a state is written once. Orbax first copies a host's share to host memory, so that
training continues while it is written. A shard that several devices hold is split among them for
writing where it is large; the first device writes it where it is small.
"""

from dataclasses import dataclass

# Bytes that a restore may read at the same time, enough for several streams of a bucket.
READ_AT_ONCE_BYTES = 4 * 10**9
# A shard is in memory twice while it is read, in the stored and in the used format.
HELD_WHILE_READ = 2
# Replicas of a shard can each write a part. Splitting compiles a program while training waits, so
# only large shards are split.
WORTH_CUTTING_BYTES = 16 << 20
# Largest file of an export, as in Hugging Face's own checkpoints.
EXPORT_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a training state.

    Attributes:
        n_bytes: Bytes of the unsharded array.
        copies: Number of devices that hold the same shard.
        is_parameter: Whether an export writes it, as opposed to checkpoints only.
    """

    n_bytes: int
    copies: int = 1
    is_parameter: bool = False


@dataclass(frozen=True)
class HostShare:
    """The share of a training state that one of several equal hosts handles.

    Args:
        arrays: The arrays of the state.
        devices: Devices of all hosts together.
        hosts: Number of hosts.
    """

    arrays: tuple[StoredArray, ...]
    devices: int
    hosts: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that the host with the largest share copies from its devices for a checkpoint."""
        return round(sum(self._written(array) for array in self.arrays))

    @property
    def restored_bytes(self) -> int:
        """Bytes that a host reads for its devices; a shard of several devices counts once."""
        return round(sum(self._held(array) for array in self.arrays))

    def under_way_bytes(self, at_once: int = READ_AT_ONCE_BYTES) -> int:
        """Return the bytes of `restored_bytes` that are read at the same time."""
        largest = max((array.n_bytes for array in self.arrays), default=0)
        return min(self.restored_bytes, read_limit_bytes(largest, at_once))

    @property
    def restoring_bytes(self) -> int:
        """The most host memory that a restore takes."""
        return HELD_WHILE_READ * self.under_way_bytes()

    def exporting_bytes(self, file_bytes: int) -> int:
        """Return the host memory of an export: the parameter being read and the file being filled.

        Args:
            file_bytes: Largest size of one file.
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
    """Return the host memory of an export, given the bytes of the largest and of all parameters."""
    return HELD_WHILE_READ * largest + min(total - largest, file_bytes)


def read_limit_bytes(largest_bytes: int, at_once: int) -> int:
    """Return the limit for concurrent reads, which Orbax needs above the size of any array."""
    return max(at_once, largest_bytes + 1)
