"""How many bytes an optimizer keeps between steps: plain arithmetic that needs no jax."""

import math
from collections.abc import Iterable

from ...hardware.formats import FLOAT32
from ...hardware.stored_formats import MOMENT_FORMATS
from .spec import OptimizerSpec

# Adafactor keeps rows and columns of the second moment where two dimensions have so many entries.
SMALLEST_FACTORED = 128
_A_MATRIX = (1024, 1024)

Shape = tuple[int, ...]


def state_bytes(spec: OptimizerSpec, shape: Shape, *, param_bytes: int = FLOAT32.itemsize) -> int:
    """Bytes that `build_optimizer(spec)` keeps for one parameter, counters of steps left out.

    Args:
        spec: The optimizer.
        shape: Of the whole parameter, stacked layers included.
        param_bytes: Of one of its numbers, which second moments are as wide as.
    """
    if spec.name == "adafactor":
        return _factored_size(shape) * param_bytes
    size, last = math.prod(shape), shape[-1] if shape else 1
    first, second = (one.nbytes(last, size // last) for one in MOMENT_FORMATS[spec.moment_dtype])
    if spec.moment_dtype == "int8":
        return first + second
    return first + (size * param_bytes if spec.name == "adamw" else 0)


def state_bytes_per_parameter(
    spec: OptimizerSpec,
    shapes: Iterable[Shape] = (_A_MATRIX,),
    *,
    param_bytes: int = FLOAT32.itemsize,
) -> float:
    """The mean over the numbers of parameters of these shapes; by default of one matrix."""
    known = list(shapes)
    kept = sum(state_bytes(spec, shape, param_bytes=param_bytes) for shape in known)
    return kept / sum(math.prod(shape) for shape in known)


def _factored_size(shape: Shape) -> int:
    """Numbers adafactor keeps; optax fills what it does not use with one number each."""
    size = math.prod(shape)
    *_, second, largest = (0, 0, *sorted(shape))
    if second < SMALLEST_FACTORED:
        return size + 2
    return size // largest + size // second + 1
