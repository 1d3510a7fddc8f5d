"""Checkpoints of a 1 B-parameter training state: what a save costs training, what a restore costs.

The state is that of `small-1b` with AdamW, 1.1 B parameters on eight virtual devices (fsdp=8),
restored onto fsdp=4, tensor=2. Parameters and both moments are bf16 (6.6 GB), so that two copies
fit beside other work on a 23 GB machine; `--parameters 0.1` takes a tenth of the layers.
Targets: a save blocks training for less than 1 s, and the restored state is the same to the bit.

On a CPU the arrays are already in host memory. Where they are copied off a device first, add that
copy to the blocking time: size of a host's shards ÷ its device-to-host rate.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from claims import Claim, report

from tpukit import create_mesh
from tpukit.models import get_preset
from tpukit.step import Workload
from tpukit.training.checkpoint import TPUCheckpointer

GB = 1e9


def bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Words that differ from place to place and from leaf to leaf, the same in every layout."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    words = np.arange(int(np.prod(shape)), dtype=np.uint32)
    words *= np.uint32(2_654_435_761)
    words ^= words >> np.uint32(15)
    words += np.uint32(seed)
    return words.astype(unsigned).view(dtype).reshape(shape)


def filled(shapes):
    """A state of that shape and sharding."""
    leaves, structure = jax.tree.flatten(shapes)
    arrays = []
    for seed, leaf in enumerate(leaves):
        host = bits(leaf.shape, leaf.dtype, seed)
        arrays.append(jax.device_put(host, leaf.sharding))
        arrays[-1].block_until_ready()
    return jax.tree.unflatten(structure, arrays)


def is_same(state) -> bool:
    """Whether every leaf holds the bits it was filled with."""
    for seed, leaf in enumerate(jax.tree.leaves(state)):
        word = np.dtype(f"u{leaf.dtype.itemsize}")
        host = np.ascontiguousarray(leaf).reshape(leaf.shape)
        if not np.array_equal(host.view(word), bits(leaf.shape, leaf.dtype, seed).view(word)):
            return False
    return True


def items_of(work: Workload, mesh) -> dict:
    """What is saved: parameters and optimizer state on a mesh, in bf16."""

    def narrow(leaf):
        dtype = jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    state = work.abstract_args(mesh)[0]
    return jax.tree.map(narrow, {"params": state.params, "opt_state": state.opt_state})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=1.0, help="billions, about")
    parser.add_argument("--directory", type=Path, help="a disk with room for two states")
    options = parser.parse_args()
    preset = get_preset("small-1b")
    layers = max(1, round(preset.n_layers * options.parameters))
    work = Workload(
        get_preset("small-1b", n_layers=layers),
        batch_size=8,
        sequence_length=128,
        strategy="fsdp+megatron",
    )
    before = create_mesh(mesh_shape=(8, 1), axis_names=("fsdp", "tensor"))
    after = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "tensor"))
    state = filled(items_of(work, before))
    like = items_of(work, after)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    folder = Path(tempfile.mkdtemp(prefix="tpukit-checkpoint-", dir=options.directory))
    # The next step replaces the parameters in place while they are being written.
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    try:
        with TPUCheckpointer(folder) as checkpointer:
            checkpointer.save(0, warm_up=jnp.ones(8))
            checkpointer.wait()
            start = time.perf_counter()
            checkpointer.save(1, **state)
            blocked_s = time.perf_counter() - start
            start = time.perf_counter()
            params = step(state["params"])
            del state
            checkpointer.wait()
            background_s = time.perf_counter() - start
            del params
            verification = checkpointer.verify(1)
            start = time.perf_counter()
            restored = checkpointer.restore(1, like=like)
            restore_s = time.perf_counter() - start
            same = is_same(restored.items)
    finally:
        shutil.rmtree(folder)
    report(
        Claim("parameters", num_parameters / 1e9, "billion"),
        Claim("state (bf16 parameters and moments)", num_bytes / GB, "GB"),
        Claim("save blocks training", blocked_s, "s", at_most=1.0),
        Claim("written, digested and recorded behind it in", background_s, "s"),
        Claim("  that is", num_bytes / GB / background_s, "GB/s"),
        Claim("digests of all files (verify)", verification.elapsed_s, "s"),
        Claim("restore on fsdp=4, tensor=2, with verification", restore_s, "s"),
        Claim("restored state is the same to the bit", float(same), "", at_least=1.0),
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
