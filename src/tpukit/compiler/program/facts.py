"""What is worth remembering of a lowered program once the program itself is gone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProgramFacts:
    """Names, layout and identity of a program; needs no jax to read.

    Attributes:
        argument_names: A readable name for each flat argument, e.g. `[0]['layers']['w']`.
        argument_copies: On how many devices the same piece of each flat argument lies.
        donated: Flat arguments whose memory the result may reuse.
        mesh_axes: Name and size of each mesh axis, empty for one device.
        fingerprint: A hash of what the compiler is given, whatever line of source it came from.
        source_fingerprint: A hash that changes with those lines too.
    """

    name: str
    argument_names: tuple[str, ...]
    argument_copies: tuple[int, ...]
    donated: tuple[int, ...]
    mesh_axes: tuple[tuple[str, int], ...]
    fingerprint: str
    source_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ProgramFacts":
        """Read what `to_dict` wrote, or the same after a trip through JSON."""
        return cls(
            name=data["name"],
            argument_names=tuple(data["argument_names"]),
            argument_copies=tuple(data["argument_copies"]),
            donated=tuple(data["donated"]),
            mesh_axes=tuple((name, size) for name, size in data["mesh_axes"]),
            fingerprint=data["fingerprint"],
            source_fingerprint=data["source_fingerprint"],
        )
