"""Child processes of the doctor: a hang or an abort of jax or libtpu ends only the child."""

import time
from typing import Any

from ...plain_data import JsonObject
from ..child import serve_request

SIZE = 512


def run_task(request: JsonObject) -> JsonObject:
    """Run the task that a request names: "compile" or "open devices"."""
    return compile_matmul(request) if request["task"] == "compile" else open_devices()


def compile_matmul(request: JsonObject) -> JsonObject:
    """Compile a small sharded matmul for a topology, and describe the devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    started = time.monotonic()
    topology: Any = topologies.get_topology_desc(
        topology_name=request["topology"], platform="tpu", **request["options"]
    )
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec("x"))
    operand = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=sharding)
    product: Any = jax.jit(lambda x: x @ x)
    compiled = product.lower(operand).compile()
    return {
        "devices": len(topology.devices),
        "kind": topology.devices[0].device_kind,
        "compile_s": time.monotonic() - started,
        "has_collective": "all-gather" in compiled.as_text(),
    }


def open_devices() -> JsonObject:
    """Open this machine's devices with jax, and describe them."""
    import jax

    started = time.monotonic()
    devices = jax.devices()
    return {
        "jax": jax.__version__,
        "platform": "gpu"
        if devices[0].platform in ("gpu", "cuda", "rocm")
        else devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "open_s": time.monotonic() - started,
    }


if __name__ == "__main__":
    serve_request(run_task)
