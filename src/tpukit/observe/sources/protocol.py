"""The one protocol of everything that can be read."""

from typing import Protocol, runtime_checkable

from ..readings import Reading


@runtime_checkable
class Source(Protocol):
    """Something that knows numbers about chips, a host or a run.

    Attributes:
        name: What its readings are called by: "libtpu grpc", "jax", "nvml" …
    """

    name: str

    def read(self) -> Reading:
        """Ask now.

        A server that is gone, a driver that is not installed or a file that is not there yet is no
        error: its metrics are missing, with the reason, and the next call asks anew.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files; may be called twice."""
        ...
