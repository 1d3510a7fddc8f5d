"""How fast a quantized matrix is multiplied on a chip nobody has at hand: an estimate by bundles.

The kernel of its format is compiled for the chip and run through bundle by bundle (see
`tpukit.kernels.timing`). Every figure has origin `model`.
"""

import time
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import jax
import jax.numpy as jnp

from ...errors import TPUError
from ...hardware import get_chip
from ...hardware.figure import Figure
from ...kernels.ops.quantized_matmul.activations import Activations
from ...kernels.ops.quantized_matmul.specs import OP, quantized_case
from ...kernels.registry.op import KernelCase
from ...kernels.timing import KernelEstimate, estimate, estimate_kernel
from ...runtime.progress import Progress, silent
from ..formats import parse_vq_format
from ..plan import INTEGERS, SKIP

DECODE_ROWS = 16
"""Sequences that are decoded together, where nobody says how many."""
WIDE = ("bf16", SKIP)


@lru_cache(maxsize=1024)
def product_estimate(
    shape: tuple[int, int],
    format: str,
    chip: str,
    *,
    rows: int = DECODE_ROWS,
    activations: Activations = "bfloat16",
) -> KernelEstimate | str:
    """The time of (rows, inputs) @ (inputs, outputs) on one device, or why there is none.

    Args:
        shape: (inputs, outputs) of the matrix.
        format: Of a plan; "bf16" is the product that XLA makes.
        chip: A generation: "v5e", "v5p", "v6e", "7x".
        rows: Of activations.
        activations: "int8" rounds them first.
    """
    try:
        if format in WIDE:
            inputs = jax.ShapeDtypeStruct((rows, shape[0]), jnp.bfloat16)
            matrix = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            return estimate_kernel(jnp.matmul, (inputs, matrix), chip)
        case = _case(shape, format, rows, activations)
        if case is None:
            return f"no kernel multiplies {format}: it is decoded first"
        return estimate(OP, case, chip)
    except TPUError as error:
        return str(error)


def _case(
    shape: tuple[int, int], format: str, rows: int, activations: Activations
) -> KernelCase | None:
    for known in ("int8", "int4", "fp8"):
        if format == known:
            return quantized_case(known, rows, *shape, activations=activations)
    assert format not in INTEGERS
    found = parse_vq_format(format)
    if found.layout != "tpu_lane_i32":
        return None
    sizes = {"entries": found.entries, "stages": found.stages}
    return quantized_case("vq", rows, *shape, activations=activations, **sizes)


def _seconds(found: KernelEstimate | str) -> float | str:
    if isinstance(found, str):
        return found
    return found.reason if found.time_s is None else found.time_s


def estimated_speedup(
    matrices: Iterable[tuple[tuple[int, int], str]],
    chip: str,
    *,
    rows: int = DECODE_ROWS,
    activations: Activations = "bfloat16",
    progress: Progress = silent,
) -> Figure:
    """All products of a model in bfloat16 over those in their formats, on one device of a chip.

    What lies between products (attention over a cache, norms) is the same on both sides and left
    out, so a whole step gains less.

    Args:
        matrices: (inputs, outputs) and format of each; "skip" is bfloat16.
        chip: A generation.
        rows: Of activations: sequences that are decoded together.
        activations: "int8" rounds them first.
        progress: Called before each kernel is compiled, which takes seconds.
    """
    counts = Counter(matrices)
    full = own = 0.0
    for (shape, format), count in counts.items():
        progress(f"{format} {shape[0]}×{shape[1]} on {chip}")
        kept: Activations = "bfloat16" if format in WIDE else activations
        both = [
            _seconds(product_estimate(shape, one, chip, rows=rows, activations=how))
            for one, how in ((format, kept), ("bf16", "bfloat16"))
        ]
        why = next((one for one in both if isinstance(one, str)), None)
        if why is not None:
            return Figure.missing("×", f"{format} {shape[0]}×{shape[1]} on {chip}: {why}")
        own, full = (
            total + count * seconds
            for total, seconds in zip((own, full), both, strict=True)
            if not isinstance(seconds, str)
        )
    if not own:
        return Figure.missing("×", "the model has no matrices")
    return Figure(
        full / own,
        "×",
        origin="model",
        source=f"kernels compiled for {get_chip(chip).name} and run through by bundles, {rows} "
        "rows; the products of all matrices, nothing between them",
        date=time.strftime("%Y-%m-%d"),
    )
