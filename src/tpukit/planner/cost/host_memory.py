"""What a host of a candidate holds in its own memory, by arithmetic.

The rules are those of `step.host_memory`, which `check` applies to the arrays of a compiled step;
here a candidate's state is as large as the memory model says.
"""

from typing import Any

import numpy as np

from ...hardware.formats import FLOAT32
from ...step.host_memory import HELD_WHILE_READ, READ_AT_ONCE_BYTES, read_limit_bytes
from .memory_model import MemorySplit
from .model_shape import ModelShape

Numbers = Any  # a number or an array of them


def host_bytes(memory: MemorySplit, shape: ModelShape, devices_per_host: Numbers) -> Numbers:
    """Bytes that one host needs at most: to train and save, or to restore.

    An export may run on another machine with more memory, so no slice is refused for it; `check`
    says what it takes.

    A state that several devices hold alike is counted on each, though they share its writing:
    where it matters, with activations beside it on the hosts, states are split.

    Args:
        memory: Of one device.
        shape: The model.
        devices_per_host: Of each candidate.
    """
    largest = max(FLOAT32.nbytes(int(np.prod(size))) for size in shape.parameter_shapes)
    state = (memory.weights + memory.optimizer) * devices_per_host
    training = memory.host * devices_per_host + state
    under_way = np.minimum(state, read_limit_bytes(largest, READ_AT_ONCE_BYTES))
    return np.maximum(training, HELD_WHILE_READ * under_way)
