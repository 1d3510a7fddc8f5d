"""Model FLOP utilization (MFU): one formula and one convention for every place that shows it."""

from collections.abc import Iterable

from .chip import Chip
from .formats import NumberFormat, PeakName, parse_format


def peak_of_products(chip: Chip, formats: Iterable[str | NumberFormat] = ()) -> PeakName:
    """The peak that a step is held against: that of the fastest format its products have.

    A format that the matrix unit widens first is multiplied no faster than bfloat16. With some
    products in eight bits no step reaches the peak, and none passes it.

    Args:
        chip: What it runs on.
        formats: Of its products; bfloat16 where none is given.
    """
    own: list[PeakName | None] = [parse_format(one).peak for one in formats if chip.multiplies(one)]
    known: list[PeakName] = ["bf16", *filter(None, own)]
    return max(known, key=lambda name: chip.peak_tflops[name].value or 0.0)


COUNTED_BY_MODEL = "model FLOPs (causal attention counted once, no recomputation)"


def mfu_convention(peak: str, counted: str = COUNTED_BY_MODEL) -> str:
    """How FLOPs are counted, and over which peak: one of `peak_of_products`, or "the given"."""
    return f"{counted} over {peak} peak"


def model_flop_utilization(
    model_flops: float | None, step_time_s: float, peak_tflops: float | None
) -> float | None:
    """Share of the peak that a step's model FLOPs reach; None where either is not known.

    Args:
        model_flops: Of one step over all devices, counted as `mfu_convention` says.
        step_time_s: How long the step takes.
        peak_tflops: Of `peak_of_products`, of all devices together.
    """
    if model_flops is None or not peak_tflops or step_time_s <= 0:
        return None
    return model_flops / step_time_s / (peak_tflops * 1e12)
