"""Save something small, fail to save something large, go on: `filling_process.py DIRECTORY HOW`."""

import resource
import sys

import jax.numpy as jnp
import numpy as np

from tpukit.errors import TPUCheckpointError
from tpukit.training.checkpoint import TPUCheckpointer

SMALL, LARGE = 1 << 18, 1 << 22  # floats


def main():
    directory, how = sys.argv[1:]
    with TPUCheckpointer(directory, max_to_keep=1) as checkpointer:
        checkpointer.save(1, params={"w": jnp.ones(SMALL)})
        checkpointer.wait()
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
        checkpointer.save(2, params={"w": jnp.full(LARGE, 2.0)})
        try:
            checkpointer.wait()
        except TPUCheckpointError as error:
            sys.stdout.write(f"{error}\n")
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore()
        np.testing.assert_array_equal(restored.params["w"], np.ones(SMALL))
        # The failed one made room again, and the same object goes on.
        checkpointer.save(3, params={"w": jnp.full(SMALL, 3.0)})
        assert checkpointer.restore().step == 3
        assert checkpointer.steps() == [3]


if __name__ == "__main__":
    main()
