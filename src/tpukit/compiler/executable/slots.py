"""What goes into and comes out of a compiled program, as plain data and back."""

import hashlib
import platform
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import TPUValidationError
from ...plain_data import JsonObject
from .file import ArraySlot


def describe_program(compiled: Any) -> JsonObject:
    """Shapes, shardings and devices of a `jax.stages.Compiled`, as keywords of a header.

    Raises:
        TPUValidationError: Something in it cannot be written down.
    """
    import jax

    arguments = jax.tree_util.tree_flatten_with_path(compiled.args_info)[0]
    placed = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    results = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    shardings = [one for one in placed if one is not None]
    shardings += [leaf.sharding for _, leaf in results]
    devices, mesh_axes = _devices(shardings)
    inputs = tuple(
        _slot(path[1:], info, sharding)  # the first step is into (args, kwargs)
        for (path, info), sharding in zip(arguments, placed, strict=True)
    )
    kept = sum(slot.kept for slot in inputs)
    if kept != len(compiled.runtime_executable().get_parameter_layouts()):
        raise TPUValidationError(
            "this program takes more than its arguments (ordered effects or captured constants), "
            "which a file cannot hold; pass them as arguments."
        )
    if any(getattr(path[0], "idx", 0) == 1 for path, _ in arguments):
        raise TPUValidationError("this program has keyword arguments; pass them by position.")
    first = devices[0]
    return {
        "platform": "cuda" if first.platform == "gpu" else first.platform,
        "device_kind": first.device_kind,
        "host": host_features() if first.platform == "cpu" else "",
        "devices": tuple(place_of(device) for device in devices),
        "mesh_axes": mesh_axes,
        "arguments": inputs,
        "results": tuple(_slot(path, leaf, leaf.sharding) for path, leaf in results),
        "structure": encode_structure(compiled.out_tree),
    }


def place_of(device: Any) -> tuple[int, ...]:
    """What tells a device from the others: its place on a TPU's torus, elsewhere its number."""
    if device.platform != "tpu":
        return (device.id,)
    return (
        *device.coords,
        getattr(device, "core_on_chip", 0),
        getattr(device, "slice_index", None) or 0,
    )


def host_features() -> str:
    """A hash of what this machine's CPU can do: code for one CPU may crash another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    words = " ".join([platform.machine(), *sorted(found.partition(":")[2].split())])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def encode_structure(tree: Any) -> str | None:
    """Return a PyTreeDef as text; None where it has other containers than jax's own."""
    try:
        return b64encode(tree.serialize_using_proto()).decode()
    except ValueError:
        return None


def decode_structure(text: str) -> Any:
    """Return the PyTreeDef that `encode_structure` wrote."""
    from jax.tree_util import PyTreeDef, default_registry

    return PyTreeDef.deserialize_using_proto(default_registry, b64decode(text))


def _slot(path: Sequence[Any], info: Any, sharding: Any) -> ArraySlot:
    import jax

    return ArraySlot(
        path=jax.tree_util.keystr(tuple(path)),
        shape=tuple(info.shape),
        dtype=str(info.dtype),
        spec=None if sharding is None else _spec(sharding, len(info.shape)),
        memory=None if sharding is None else sharding.memory_kind,
        kept=sharding is not None,
    )


def _spec(sharding: Any, dimensions: int) -> tuple[tuple[str, ...], ...] | None:
    from jax.sharding import NamedSharding

    if not isinstance(sharding, NamedSharding):
        return None
    entries = [*sharding.spec, *[None] * (dimensions - len(sharding.spec))]
    return tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)  # pyright: ignore[reportArgumentType]  an entry is a name or names


def _devices(shardings: Sequence[Any]) -> tuple[list[Any], tuple[tuple[str, int], ...]]:
    """The devices in the program's order, and the mesh they form."""
    from jax.sharding import NamedSharding, SingleDeviceSharding

    meshes = {one.mesh for one in shardings if isinstance(one, NamedSharding)}
    alone = {one for one in shardings if isinstance(one, SingleDeviceSharding)}
    others = {type(one).__name__ for one in shardings} - {"NamedSharding", "SingleDeviceSharding"}
    if others or len(meshes) > 1 or (meshes and alone) or not (meshes or alone):
        seen = ", ".join(sorted(others)) or "arrays on one device beside arrays on a mesh"
        raise TPUValidationError(
            f"the arrays of this program are laid out by {seen}; give every argument and result "
            "a NamedSharding over one mesh (in_shardings and out_shardings of jax.jit)."
        )
    if meshes:
        mesh: Any = meshes.pop()
        return list(mesh.devices.flat), tuple(mesh.shape.items())
    return list(next(iter(alone)).device_set), ()
