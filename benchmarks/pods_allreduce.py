"""What the real TPU compiler makes of each way to add up gradients over two slices.

64 MiB of float32 gradients on every device of 2xv6e-8, no TPU: the collectives that the compiler
wrote, the bytes that each device sends between slices, and the predicted time.

Usage: python benchmarks/pods_allreduce.py [--on 2xv6e-8] [--megabytes 64]
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler import compile_for
from tpukit.compiler.timeline.network import SliceExchange
from tpukit.hardware import Slice
from tpukit.pods.multipod.compression import RoundingResiduals, compressed_sum
from tpukit.pods.multipod.strategy import AllReduceStrategy, PodTopology
from tpukit.pods.multipod.sums import DCN, ICI, sum_over_devices

EVERY = PartitionSpec((DCN, ICI))
WAYS = {
    "flat": (AllReduceStrategy.FLAT, PodTopology.MESH),
    "hierarchical, mesh": (AllReduceStrategy.HIERARCHICAL, PodTopology.MESH),
    "hierarchical, ring": (AllReduceStrategy.HIERARCHICAL, PodTopology.RING),
    "hierarchical, tree": (AllReduceStrategy.HIERARCHICAL, PodTopology.TREE),
    "ring of all devices": (AllReduceStrategy.RING, PodTopology.RING),
    "hierarchical, 8 bits": None,
}


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--on", default="2xv6e-8")
    options.add_argument("--megabytes", type=int, default=64)
    options = options.parse_args()
    on = Slice.parse(options.on)
    pods, chips = on.num_slices, on.devices // on.num_slices
    mesh = AbstractMesh((pods, chips), (DCN, ICI), axis_types=(AxisType.Auto,) * 2)
    shape = (on.devices, options.megabytes * 2**18)
    values = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, EVERY))

    def compiled(way):
        def add_up(rows):
            if way is None:
                piece = jax.lax.psum_scatter(rows[0], ICI, tiled=True)
                piece, _ = compressed_sum(piece, RoundingResiduals.zeros(piece.size, pods), pods)
                return jax.lax.all_gather(piece, ICI, tiled=True)[None]
            strategy, topology = way
            order = range(pods)
            return sum_over_devices(
                rows[0],
                strategy=strategy,
                topology=topology,
                pods=pods,
                chips=chips,
                order=order,
            )[None]

        mapped = jax.shard_map(add_up, mesh=mesh, in_specs=EVERY, out_specs=EVERY, check_vma=False)
        return compile_for(mapped, on, values, dcn_mesh_shape=(pods, 1), until="schedule")

    print(f"{options.megabytes} MiB a device on {on}; bytes by the compiler, times by the model")
    print(f"{'':22} {'between slices':>16} {'predicted':>11}  collectives")
    for name, way in WAYS.items():
        step = compiled(way)
        sent = [
            SliceExchange.of(one)
            for computation in step.module.computations.values()
            for one in computation
            if one.opcode == "send"
        ]
        crossing = sum(one.wire_bytes for one in sent) / 2**20
        took = step.predict().step_time_s * 1e3
        print(f"{name:22} {crossing:9.2f} MiB/dev {took:8.2f} ms  {step.collectives}")


if __name__ == "__main__":
    main()
