"""Gradient checkpoints between the layers of an equinox module; imports equinox."""

from typing import Any

import equinox

from .policy import RematPolicy
from .segments import checkpoint_segments


class CheckpointedModule(equinox.Module):
    """A module that is called in checkpointed segments.

    Attributes:
        module: The module given; gradients are those of its arrays.
        remat: What is kept between the segments.
    """

    module: Any
    remat: RematPolicy = equinox.field(static=True)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module."""
        arrays, static = equinox.partition(self.module, equinox.is_array)

        def run(arrays: Any, *args: Any, **options: Any) -> Any:
            return equinox.combine(arrays, static)(*args, **options)

        return checkpoint_segments(run, self.remat)(arrays, *args, **options)
