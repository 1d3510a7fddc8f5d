"""Let all processes of a job come to the same answer."""

import jax
import numpy as np


def smallest_of_all(value: int) -> int:
    """The smallest of what the processes say; every process must ask."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    said = multihost_utils.process_allgather(np.asarray(value, np.int32))
    return int(np.min(said))
