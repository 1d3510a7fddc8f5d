"""The child that compiles one small sharded product with the real TPU compiler."""

import time
from typing import Any

from ..child import serve_request

SIZE = 512


def compile_product(request: dict[str, Any]) -> dict[str, Any]:
    """Compile for the topology asked for and say what the compiler made of it."""
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


if __name__ == "__main__":
    serve_request(compile_product)
