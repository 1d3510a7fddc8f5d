"""A jax function lowered for TPU in a portable form, made without touching a device."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..errors import MeshError, TPUModelError

# Source locations, which change with every edit of the caller and never change the program.
_LOCATION = re.compile(r'^#loc.*$| loc\((?:#loc\d*|unknown|"[^"]*")\)', re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """StableHLO of one function with its shardings, ready to be compiled in another process.

    Attributes:
        serialized: What `jax.export` wrote; a flat buffer, not a pickle.
        argument_names: A readable name for each flat argument, e.g. `[0]['layers']['w']`.
        donated: Flat arguments whose memory the result may reuse.
        mesh_axes: Name and size of each mesh axis, empty for one device.
        fingerprint: A hash of what the compiler is given, whatever line of source it came from.
    """

    serialized: bytes
    argument_names: tuple[str, ...]
    donated: tuple[int, ...]
    mesh_axes: tuple[tuple[str, int], ...]
    name: str
    fingerprint: str


def lower_program(
    function: Callable[..., Any], *args: Any, donate_argnums: Sequence[int] = ()
) -> Program:
    """Trace `function` on abstract arguments and lower it for TPU.

    Args:
        function: Anything jax can trace: plain, jitted, sharded, with Pallas kernels inside.
        *args: Arrays or `jax.ShapeDtypeStruct`s; shardings on them decide the layout and may
            name a `jax.sharding.AbstractMesh`, so no device of that kind is needed.
        donate_argnums: Positions in `args` whose buffers may be reused for the results.

    Raises:
        TPUModelError: The function cannot be traced with these arguments.
        MeshError: The arguments are sharded over different meshes.
    """
    name = getattr(function, "__name__", type(function).__name__)
    leaves_with_paths, structure = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in leaves_with_paths]
    donated = tuple(
        index for index, (path, _) in enumerate(leaves_with_paths) if path[0].idx in donate_argnums
    )

    def flat_function(*flat: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, flat)))

    flat_function.__name__ = name  # the compiler's own names for the program start with it
    jitted = jax.jit(flat_function, donate_argnums=donated)
    try:
        exported = jax.export.export(jitted, platforms=["tpu"])(*leaves)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise TPUModelError(
            f"{name} cannot be traced with the arguments given: {_first_line(error)}"
        ) from error
    mesh_axes = _mesh_axes(leaves, name)
    identity = repr((_LOCATION.sub("", exported.mlir_module()), donated, mesh_axes))
    return Program(
        serialized=bytes(exported.serialize()),
        argument_names=tuple(jax.tree_util.keystr(path) for path, _ in leaves_with_paths),
        donated=donated,
        mesh_axes=mesh_axes,
        name=name,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def _mesh_axes(leaves: Sequence[Any], name: str) -> tuple[tuple[str, int], ...]:
    meshes = {
        tuple(leaf.sharding.mesh.shape.items())
        for leaf in leaves
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    if len(meshes) > 1:
        raise MeshError(
            f"the arguments of {name} are sharded over {len(meshes)} different meshes "
            f"({', '.join(map(str, sorted(meshes)))}); lay all of them out on one."
        )
    return next(iter(meshes), ())


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
