"""How much faster a quantized model runs: measured here, or estimated for a chip.

For an estimate the kernel of each format is compiled for the chip and timed bundle by bundle (see
`tpukit.kernels.timing`); such figures have origin `model`.
"""

import time
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUError
from ...hardware import get_chip
from ...hardware.figure import Figure
from ...hardware.stored_formats import rounded_formats
from ...kernels.ops.quantized_matmul.api import OP, quantized_case
from ...kernels.ops.quantized_matmul.pallas_tpu import can_multiply
from ...kernels.ops.quantized_matmul.weight import Activations
from ...kernels.registry.op import KernelCase
from ...kernels.timing import KernelEstimate, estimate, estimate_kernel
from ...runtime.progress import Progress, silent
from ..formats import parse_vq_format
from ..model import QuantizedModel
from ..plan import SKIP

_ROUNDS = 5


def measured_speedup(model: QuantizedModel, batch: PyTree) -> Figure:
    """Return the full model's time per forward pass over the quantized model's, on this device.

    The figure is missing on a CPU, because its times say nothing about an accelerator.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Figure.missing(
            "×",
            "there is no accelerator here, and a CPU's times say nothing about one; --on v6e "
            "(chip='v6e') estimates it by kernels compiled for that chip",
        )
    full = _median_s(jax.jit(model.subject.apply), model.subject.params, batch)
    quantized = _median_s(jax.jit(model.apply), model.params, batch)
    return Figure(
        full / quantized,
        "×",
        origin="measured",
        source=f"one forward pass of a batch on {device.device_kind}",
        date=time.strftime("%Y-%m-%d"),
    )


def _median_s(function: Any, params: PyTree, batch: PyTree) -> float:
    jax.block_until_ready(function(params, batch))
    times: list[float] = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(function(params, batch))
        times.append(time.perf_counter() - started)
    return sorted(times)[_ROUNDS // 2]


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
    """Estimate the time of (rows, inputs) @ (inputs, outputs) on one device, or return a reason.

    Args:
        shape: (inputs, outputs) of the matrix.
        format: A format of a plan; "bf16" is XLA's matmul.
        chip: A generation: "v5e", "v5p", "v6e", "7x".
        rows: Rows of activations.
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
    if format in rounded_formats():
        if not can_multiply(format):
            return None
        return quantized_case(format, rows, *shape, activations=activations)
    vq_format = parse_vq_format(format)
    if vq_format.layout != "tpu_lane_i32":
        return None
    sizes = {"entries": vq_format.entries, "stages": vq_format.stages}
    return quantized_case("vq", rows, *shape, activations=activations, **sizes)


def _estimated_s(estimated: KernelEstimate | str) -> float | str:
    if isinstance(estimated, str):
        return estimated
    return estimated.reason if estimated.time_s is None else estimated.time_s


def estimated_speedup(
    matrices: Iterable[tuple[tuple[int, int], str]],
    chip: str,
    *,
    rows: int = DECODE_ROWS,
    activations: Activations = "bfloat16",
    progress: Progress = silent,
) -> Figure:
    """Estimate the time of a model's matmuls in bfloat16 over that in their formats, on one device.

    Attention over a cache, norms and the like take the same time in both and are left out, so a
    whole step gains less.

    Args:
        matrices: (inputs, outputs) and format per matrix; "skip" is bfloat16.
        chip: A generation.
        rows: Rows of activations, that is, sequences that are decoded together.
        activations: "int8" rounds them first.
        progress: Called before each kernel is compiled, which takes seconds.
    """
    counts = Counter(matrices)
    full = own = 0.0
    for (shape, format), count in counts.items():
        progress(f"{format} {shape[0]}×{shape[1]} on {chip}")
        kept: Activations = "bfloat16" if format in WIDE else activations
        both = [
            _estimated_s(product_estimate(shape, format_name, chip, rows=rows, activations=how))
            for format_name, how in ((format, kept), ("bf16", "bfloat16"))
        ]
        why = next((seconds for seconds in both if isinstance(seconds, str)), None)
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
