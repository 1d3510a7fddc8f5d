"""One host of a job: join, run two collectives, print what came out as one line of JSON.

Usage: multihost_worker.py NUM_HOSTS HOST_ID ADDRESS TIMEOUT_S [raise]
"""

import json
import sys

from tpukit.errors import TPUDistributedError
from tpukit.runtime.multihost import MultiHostConfig


def collectives():
    import jax
    import jax.numpy as jnp
    import psutil
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(jax.devices(), ("hosts",))
    count = len(jax.devices())
    sharding = NamedSharding(mesh, P("hosts"))
    squares = jax.make_array_from_callback(
        (count,), sharding, lambda index: jnp.arange(count, dtype=jnp.float32)[index] ** 2
    )

    def body(x):
        return jax.lax.psum(x, "hosts"), jax.lax.all_gather(x, "hosts", tiled=True)

    total, gathered = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("hosts"), out_specs=(P(), P()), check_vma=False)
    )(squares)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == "LISTEN"
    ]
    return {
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "devices": count,
        "psum": float(total.addressable_data(0)[0]),
        "gathered": [float(x) for x in gathered.addressable_data(0)],
        "listening": listening,
    }


def main():
    num_hosts, host_id, address, timeout_s, *rest = sys.argv[1:]
    config = MultiHostConfig(
        int(num_hosts), int(host_id), address, timeout_s=float(timeout_s), shutdown_timeout_s=20
    )
    try:
        with config:
            if rest == ["raise"] and host_id == "1":
                raise ValueError("the user's own mistake")
            answer = {} if rest else collectives()
    except TPUDistributedError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
