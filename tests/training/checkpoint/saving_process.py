"""A run that saves until it is killed: `saving_process.py DIRECTORY [KILOBYTES]`.

The state of step n is n everywhere, so that a mix of two steps can be told from one. Each step
that is complete is written to standard output before the next begins.
"""

import sys

import jax
import jax.numpy as jnp

from tpukit.training.checkpoint import TPUCheckpointer


def main():
    directory, kilobytes = sys.argv[1], int(sys.argv[2])
    with TPUCheckpointer(directory, max_to_keep=1) as checkpointer:
        # Not by catching restore()'s error: a run that lost its checkpoints must not start afresh.
        first = checkpointer.restore().step + 1 if checkpointer.steps() else 1
        grow = jax.jit(lambda tree, by: jax.tree.map(lambda x: x + by, tree), donate_argnums=0)
        params = {f"w{i}": jnp.full(kilobytes * 64, first, jnp.float32) for i in range(4)}
        for step in range(first, 100_000):
            checkpointer.save(step, params=params, data={"step": step})
            params = grow(params, 1)
            checkpointer.wait()
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
