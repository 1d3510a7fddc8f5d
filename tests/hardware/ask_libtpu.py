"""A child process that asks libtpu what it makes of topologies; run by test_against_libtpu.py.

Reads `{"topologies": [[name, options], …], "limits": […], "clocks": […], "products": […]}` from
standard input and writes the answers to the file named in its argument. libtpu must never load in
the test process, which it could block or abort.
"""

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


def describe(name, options):
    try:
        devices = topologies.get_topology_desc(
            topology_name=name, platform="tpu", **options
        ).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return {"error": str(error)}
    return {
        "devices": len(devices),
        "coords": sorted({tuple(device.coords) for device in devices}),
        "cores_on_chip": sorted({device.core_on_chip for device in devices}),
        "cores_per_device": sorted({device.num_cores for device in devices}),
        "slices": sorted({getattr(device, "slice_index", 0) or 0 for device in devices}),
        "hosts": len({device.process_index for device in devices}),
        "chips_by_process": chips_by_process(devices),
        "device_kinds": sorted({device.device_kind for device in devices}),
    }


def chips_by_process(devices):
    """The coordinates of the chips of each process, in its own order; cores of a chip once."""
    found = {}
    for device in devices:
        chips = found.setdefault(device.process_index, [])
        if device.coords not in chips:
            chips.append(device.coords)
    return [found[process] for process in sorted(found)]


def memory_limit(name, options):
    """What the compiler says a program may use, from its refusal of one that needs a terabyte."""
    topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    vector = jax.ShapeDtypeStruct(
        (2**19,), jnp.float32, sharding=SingleDeviceSharding(topology.devices[0])
    )

    def outer_product(x):
        table = jax.lax.optimization_barrier(jnp.sin(x)[:, None] * jnp.cos(x)[None, :])
        return table.sum() + (table @ table).sum()

    try:
        jax.jit(outer_product).lower(vector).compile()
    except jax.errors.JaxRuntimeError as error:
        stated = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(error))
        return float(stated.group(1)) if stated else str(error)[:500]
    return "it compiled"


def clock_mhz(name, options):
    """The clock the scheduler reckons with, from its dump; it needs something to overlap."""
    devices = topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
    mesh = Mesh(np.array(devices), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()
    ring = [(at, (at + 1) % len(devices)) for at in range(len(devices))]

    def overlapped(x, w):
        return jax.lax.ppermute(x, "x", ring) @ w + jnp.tanh(x @ w)

    spread = jax.shard_map(overlapped, mesh=mesh, in_specs=(split, whole), out_specs=split)
    rows = 4096 * len(devices)
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, split))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, whole))
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_latency_hiding_schedule": True}
        jax.jit(spread).lower(x, w).compile(compiler_options=options)
        dumps = (file.read_text(errors="replace") for file in Path(folder).glob("*schedule*"))
        stated = [re.search(r"cycles_per_microsecond: (\d+)", dump) for dump in dumps]
    return [int(found.group(1)) for found in stated if found]


def multiplied_as(name, options, formats, dump):
    """What the operands of the matrix unit's instructions are, for products of each format."""
    topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    place = SingleDeviceSharding(topology.devices[0])
    found = {}
    for dtype in formats:
        matrix = jax.ShapeDtypeStruct((512, 512), dtype, sharding=place)
        wide = jnp.int32 if jnp.issubdtype(matrix.dtype, jnp.integer) else jnp.float32
        jax.jit(partial(jnp.dot, preferred_element_type=wide)).lower(matrix, matrix).compile()
        listings = list(Path(dump).glob("*final_bundles.txt"))
        text = "".join(listing.read_text(errors="replace") for listing in listings)
        found[dtype] = sorted(set(re.findall(r"vmatmul[\w.]*?\.((?:bf|f|s|u)\d\w*)", text)))
        for listing in listings:
            listing.unlink()
    return found


request = json.load(sys.stdin)
answer = {
    "topologies": [describe(*asked) for asked in request["topologies"]],
    "limits_gib": [memory_limit(*asked) for asked in request["limits"]],
    "clocks_mhz": [clock_mhz(*asked) for asked in request["clocks"]],
    "products": [multiplied_as(*asked) for asked in request["products"]],
}
Path(sys.argv[1]).write_text(json.dumps(answer))
