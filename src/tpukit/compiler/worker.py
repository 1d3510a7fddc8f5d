"""The child process that loads libtpu, maps a program onto an offline topology and compiles it.

Started by `compile_for` as `python -m tpukit.compiler.worker`; the parent never imports it.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..plain_data import JsonObject
from ..runtime.child import serve_request


def compile_request(request: JsonObject) -> JsonObject:
    """Compile one program for one topology and return the compiler's answer."""
    import jax

    from ..runtime.device_grid import arrange_devices

    topology = describe_topology(request)
    exported = jax.export.deserialize(bytearray(Path(request["program"]).read_bytes()))
    if request["mesh_axes"]:
        names, sizes = zip(*request["mesh_axes"], strict=True)
        grid = (
            _in_order(request["device_order"], topology.devices, sizes)
            if request["device_order"]
            else arrange_devices(
                request["ici_shape"] or sizes, topology.devices, dcn_shape=request["dcn_shape"]
            )
        )
        types = tuple(jax.sharding.AxisType[name] for name in request["axis_types"])
        mesh = jax.sharding.Mesh(grid, names, axis_types=types)
    else:
        mesh = jax.sharding.Mesh([topology.devices[0]], ("device",))
    _write_places(Path(request["devices"]), mesh.devices.flat)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    lowered = jax.jit(exported.call, donate_argnums=tuple(request["donated"])).lower(*arguments)
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=request["options"] or None)
    compile_s = time.perf_counter() - started
    if "executable" in request:
        return {"executable": _save(compiled, Path(request["executable"]))}
    memory: Any = compiled.memory_analysis()
    return {
        "compile_s": compile_s,
        "hlo": compiled.as_text(),
        # Its other figures overstate what the compiler tests; the memory report is read instead.
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def describe_topology(request: JsonObject) -> Any:
    """Return libtpu's own description of the topology that a request names."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        topology_name=request["topology"], platform="tpu", **_as_tuples(request["topology_options"])
    )


def _in_order(order: list[int], devices: list[Any], sizes: tuple[int, ...]) -> Any:
    """Return the devices in an order of their ids, as an array of the mesh's shape."""
    import numpy as np

    by_id = sorted(devices, key=lambda device: device.id)
    grid = np.empty(len(order), dtype=object)
    grid[:] = [by_id[number] for number in order]
    return grid.reshape(sizes)


def _save(compiled: Any, path: Path) -> JsonObject:
    """Write the serialized program for the parent, and return its part of the header."""
    from dataclasses import asdict

    from .executable.slots import describe_program

    path.write_bytes(compiled.runtime_executable().serialize())
    about = describe_program(compiled)
    for part in ("arguments", "results"):
        about[part] = [asdict(slot) for slot in about[part]]
    return about


def _write_places(path: Path, devices: Iterable[Any]) -> None:
    """Write each device's torus coordinates for the parent, in the program's order."""
    coordinates = [
        [list(device.coords), getattr(device, "slice_index", None) or 0] for device in devices
    ]
    path.write_text(json.dumps(coordinates))


def _as_tuples(options: JsonObject) -> JsonObject:
    """Turn lists into tuples, because JSON has no tuples and libtpu accepts only tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


if __name__ == "__main__":
    serve_request(compile_request)
