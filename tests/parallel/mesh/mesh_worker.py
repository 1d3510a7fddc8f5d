"""One of several processes: make a mesh across them, shard a model over it, report what came out.

Usage: python mesh_worker.py PORT PROCESSES RANK
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from tpukit.parallel import create_mesh, make_layout, reshard, shard_model, validate_sharding

EMBED, MLP, BATCH = 16, 64, 16


def params():
    rng = np.random.default_rng(0)
    return {
        "up_proj": {"kernel": rng.normal(size=(EMBED, MLP)).astype(np.float32)},
        "down_proj": {"kernel": rng.normal(size=(MLP, EMBED)).astype(np.float32)},
    }


def loss(weights, x):
    hidden = jnp.tanh(x @ weights["up_proj"]["kernel"])
    return jnp.mean((hidden @ weights["down_proj"]["kernel"]) ** 2)


def batch():
    return np.linspace(-1, 1, BATCH * EMBED, dtype=np.float32).reshape(BATCH, EMBED)


def main(port, processes, rank):
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, rank, coordinator_bind_address=f"127.0.0.1:{port}"
    )
    mesh = create_mesh(
        mesh_shape=(1, 2), axis_names=("fsdp", "model"), dcn_mesh_shape=(processes, 1)
    )
    strategy = "fsdp+megatron"
    layout = make_layout(params(), mesh, strategy)
    weights = shard_model(params(), mesh, strategy)
    validate_sharding(weights, mesh, layout)
    x = jax.make_array_from_callback(
        (BATCH, EMBED), layout.batch_sharding, lambda index: batch()[index]
    )
    value, gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, layout.shardings))(
        weights, x
    )
    # Every process sees the whole gradient once it is moved to a replicated layout.
    whole = reshard(gradient, make_layout(params(), mesh, "data"))
    checksums = [float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(whole)]
    owners = [[device.process_index for device in row] for row in mesh.devices]
    sys.stdout.write(
        json.dumps({"loss": float(value), "checksums": checksums, "owners": owners}) + "\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
