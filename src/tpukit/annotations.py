"""Names for signatures where jax has no class of its own."""

from typing import Any, Protocol, TypeAlias

from jax.sharding import AbstractMesh, Mesh

# Arrays, or what stands for arrays, in nested dicts, lists, tuples and dataclasses.
PyTree: TypeAlias = Any
# A mesh of devices that are here, or of devices that are only described.
AnyMesh: TypeAlias = Mesh | AbstractMesh


class Device(Protocol):
    """A jax device of any platform."""

    @property
    def id(self) -> int:
        """Number among all devices."""
        ...

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu."""
        ...

    @property
    def device_kind(self) -> str:
        """The vendor's name for it."""
        ...

    @property
    def process_index(self) -> int:
        """The process that drives it."""
        ...
