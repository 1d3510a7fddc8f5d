"""`Program`: a jax function lowered for TPU without a device, and the facts about it."""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import MeshError, TPUModelError
from ...plain_data import JsonMapping, JsonObject
from ...runtime.progress import Progress, silent
from ...runtime.user_code import errors_in_trace

# Source locations, which change with every edit of the caller and never change the program. They
# nest once: loc("scatter-add:"(#loc118)).
_INSIDE = r'(?:"[^"]*"|[^()"])'
_LOCATION = re.compile(rf"^#loc.*(?:\n|$)| loc\((?:{_INSIDE}|\({_INSIDE}*\))*\)", re.MULTILINE)

# jax.export vouches only for calls that later versions will read too. Ours is read at once, by
# the same version, so these are safe.
_SAME_VERSION_READS_IT = ("ragged_all_to_all",)


@dataclass(frozen=True)
class ProgramFacts:
    """Names, layout and identity of a program; readable without jax.

    Attributes:
        argument_names: A readable name for each flat argument, e.g. `[0]['layers']['w']`.
        argument_copies: Number of devices with the same piece of each flat argument.
        argument_bytes: Bytes of each whole flat argument; empty in older records.
        donated: Flat arguments whose memory the result may reuse.
        mesh_axes: Name and size of each mesh axis, empty for one device.
        fingerprint: A hash of the compiler's input, without source lines.
        source_fingerprint: A hash that includes source lines.
        axis_types: Whether the compiler ("Auto") or the array types ("Explicit") shard along each
            mesh axis; newer versions of jax default to "Explicit".
        argument_purposes: Purpose of each flat argument, where its name does not show it.
        device_order: Ids of the slice's devices in the order of the program's own mesh; empty
            where tpukit arranges them.
        exported_by: The version of jax that exported a captured program; "" for the running one.
    """

    name: str
    argument_names: tuple[str, ...]
    argument_copies: tuple[int, ...]
    donated: tuple[int, ...]
    mesh_axes: tuple[tuple[str, int], ...]
    fingerprint: str
    source_fingerprint: str
    axis_types: tuple[str, ...] = ()
    argument_bytes: tuple[int, ...] = ()
    argument_purposes: tuple[str, ...] = ()
    device_order: tuple[int, ...] = ()
    exported_by: str = ""

    def to_dict(self) -> JsonObject:
        """Return plain data that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "ProgramFacts":
        """Read the data of `to_dict`, also after a round trip through JSON."""
        return cls(
            name=data["name"],
            argument_names=tuple(data["argument_names"]),
            argument_copies=tuple(data["argument_copies"]),
            donated=tuple(data["donated"]),
            mesh_axes=tuple((name, size) for name, size in data["mesh_axes"]),
            fingerprint=data["fingerprint"],
            source_fingerprint=data["source_fingerprint"],
            axis_types=tuple(data["axis_types"]),
            argument_bytes=tuple(data.get("argument_bytes", ())),
            argument_purposes=tuple(data.get("argument_purposes", ())),
            device_order=tuple(data.get("device_order", ())),
            exported_by=data.get("exported_by", ""),
        )


@dataclass(frozen=True)
class Program:
    """StableHLO of one function with its shardings, ready to compile in another process.

    Attributes:
        serialized: Output of `jax.export`; a flat buffer, not a pickle.
        facts: Its facts, which are kept without the program itself.
    """

    serialized: bytes
    facts: ProgramFacts

    @property
    def name(self) -> str:
        """The function's name."""
        return self.facts.name

    @property
    def argument_names(self) -> tuple[str, ...]:
        """A readable name for each flat argument."""
        return self.facts.argument_names

    @property
    def fingerprint(self) -> str:
        """A hash of the compiler's input."""
        return self.facts.fingerprint


def lower_program(
    function: Callable[..., Any],
    *args: Any,
    donate_argnums: Sequence[int] = (),
    progress: Progress = silent,
) -> Program:
    """Trace `function` on abstract arguments and lower it for TPU.

    Args:
        function: Anything jax can trace: plain, jitted, sharded, with Pallas kernels inside.
        *args: Arrays or `jax.ShapeDtypeStruct`s; shardings on them decide the layout and may
            name a `jax.sharding.AbstractMesh`, so no device of that kind is needed.
        donate_argnums: Positions in `args` whose buffers may be reused for the results.
        progress: Called as tracing and lowering start.

    Raises:
        TPUModelError: The function cannot be traced with these arguments.
        MeshError: The arguments are sharded over different meshes.
    """
    import jax

    name = getattr(function, "__name__", type(function).__name__)
    leaves_with_paths, structure = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in leaves_with_paths]
    donated = tuple(
        index for index, (path, _) in enumerate(leaves_with_paths) if path[0].idx in donate_argnums
    )

    def flat_function(*flat: Any) -> list[Any]:
        with errors_in_trace(name):
            return jax.tree.leaves(function(*jax.tree.unflatten(structure, flat)))

    flat_function.__name__ = name  # the compiler's own names for the program start with it
    jitted = jax.jit(flat_function, donate_argnums=donated)
    mesh_axes, axis_types = _mesh_axes(leaves, name)
    try:
        progress("trace")
        jitted.trace(*leaves)  # jit remembers it: the export below does not trace again
        progress("lower")
        allowed = [
            jax.export.DisabledSafetyCheck.custom_call(call) for call in _SAME_VERSION_READS_IT
        ]
        exported = jax.export.export(jitted, platforms=["tpu"], disabled_checks=allowed)(*leaves)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise TPUModelError(
            f"{name} cannot be traced with the arguments given: {_first_line(error)}"
        ) from error
    serialized = bytes(exported.serialize())
    identity = repr((_LOCATION.sub("", exported.mlir_module()), donated, mesh_axes))
    return Program(
        serialized=serialized,
        facts=ProgramFacts(
            name=name,
            argument_names=tuple(jax.tree_util.keystr(path) for path, _ in leaves_with_paths),
            argument_copies=tuple(_copies(leaf, mesh_axes) for leaf in leaves),
            argument_bytes=tuple(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
            donated=donated,
            mesh_axes=mesh_axes,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            source_fingerprint=hashlib.sha256(serialized).hexdigest(),
            axis_types=axis_types,
        ),
    )


def _copies(leaf: Any, mesh_axes: tuple[tuple[str, int], ...]) -> int:
    """Return the number of devices with the same piece of an argument."""
    from jax.sharding import NamedSharding

    sizes = dict(mesh_axes)
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return math.prod(sizes.values())
    used: set[str] = set()
    for entry in sharding.spec:
        used.update((entry,) if isinstance(entry, str) else entry or ())  # pyright: ignore[reportArgumentType]  an entry is a name or names
    return math.prod(size for axis, size in sizes.items() if axis not in used)


def _mesh_axes(
    leaves: Sequence[Any], name: str
) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return name and size of each axis of the arguments' mesh, and their types."""
    from jax.sharding import NamedSharding

    meshes = {
        leaf.sharding.mesh.abstract_mesh
        for leaf in leaves
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    if len(meshes) > 1:
        seen = sorted(str(tuple(mesh.shape.items())) for mesh in meshes)
        raise MeshError(
            f"the arguments of {name} are sharded over {len(meshes)} different meshes "
            f"({', '.join(seen)}); shard all of them over one mesh."
        )
    for mesh in meshes:
        return tuple(mesh.shape.items()), tuple(axis_type.name for axis_type in mesh.axis_types)
    return (), ()


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
