"""Whether kernels for one NVIDIA GPU can be used: they see a single device."""

import jax

from ..hardware.target import current_target


def on_one_gpu() -> bool:
    """Whether a program traced now will run on a GPU that is the only device."""
    return current_target() is None and jax.default_backend() == "gpu" and jax.device_count() == 1
