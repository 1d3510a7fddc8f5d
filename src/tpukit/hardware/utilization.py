"""Model FLOP utilization (MFU): one formula and one convention for every place that shows it."""

from collections.abc import Iterable

from .catalog import Chip
from .formats import NumberFormat, PeakName, parse_format


def peak_of_products(chip: Chip, formats: Iterable[str | NumberFormat] = ()) -> PeakName:
    """Return the peak that a step's MFU refers to: that of the fastest format of its matmuls.

    A format that the matrix unit widens is multiplied no faster than bfloat16. A step with only
    some matmuls in 8 bits cannot reach this peak, but no step exceeds it.

    Args:
        chip: The chip it runs on.
        formats: Number formats of its matmuls; bfloat16 if empty.
    """
    own: list[PeakName | None] = [
        parse_format(format).peak for format in formats if chip.multiplies(format)
    ]
    known: list[PeakName] = ["bf16", *filter(None, own)]
    return max(known, key=lambda name: chip.peak_tflops[name].value or 0.0)


COUNTED_BY_MODEL = "model FLOPs (causal attention counted once, no recomputation)"


def mfu_convention(peak: str, counted: str = COUNTED_BY_MODEL) -> str:
    """Describe how FLOPs are counted, and the peak: of `peak_of_products`, or "the given"."""
    return f"{counted} over {peak} peak"


def model_flop_utilization(
    model_flops: float | None, step_time_s: float, peak_tflops: float | None
) -> float | None:
    """Return the share of the peak that a step's model FLOPs reach; None if either is unknown.

    Args:
        model_flops: FLOPs of one step over all devices, counted as in `mfu_convention`.
        step_time_s: Duration of the step.
        peak_tflops: The peak of `peak_of_products` for all devices together.
    """
    if model_flops is None or not peak_tflops or step_time_s <= 0:
        return None
    return model_flops / step_time_s / (peak_tflops * 1e12)
