"""Tokens or examples per second and MFU of a step, with the convention they are counted by."""

from dataclasses import dataclass
from typing import Any

from ..errors import SliceError
from ..hardware import (
    Chip,
    Figure,
    get_chip,
    mfu_convention,
    model_flop_utilization,
    peak_of_products,
)
from ..models.transformer.config import operand_format
from ..shown import Facts
from ..step.traced_flops import model_flops
from ..step.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Throughput(Facts):
    """Converts step times to rates.

    Attributes:
        devices: Number of JAX devices.
        chips: Number of their chips; equal to `devices` if unknown.
        tokens_per_step: Tokens over all devices; None if the batch has no token sequences.
        flops_per_step: FLOPs of the model over all devices, a figure of origin `model`.
        examples_per_step: Examples over all devices, if the batch has no token sequences.
        mfu_peak: Name of the peak for MFU, by the format of the matmuls, or "the given".
        peak_tflops: That peak, over all devices.
    """

    devices: int
    chips: int
    device_kind: str
    tokens_per_step: int | None
    flops_per_step: Figure
    peak_tflops: Figure
    mfu_peak: str = "bf16"
    examples_per_step: int | None = None
    _facts = (
        *("devices", "chips", "device_kind", "tokens_per_step", "examples_per_step"),
        *("flops_per_step", "peak_tflops", "mfu_convention"),
    )

    @classmethod
    def of(
        cls, work: Workload, devices: list[Any], *, peak_tflops: float | None = None
    ) -> "Throughput":
        """Return the throughput of a workload; `peak_tflops` is the user's peak of one device."""
        kind: str = devices[0].device_kind
        chip = _chip(devices[0])
        formats = () if work.config is None else (operand_format(work.config.matmul),)
        name = "the given"
        if peak_tflops is not None:
            peak = Figure(peak_tflops, "TFLOP/s", "user", "peak_tflops").scaled(len(devices))
        elif chip is not None:
            name = peak_of_products(chip, formats)
            peak = chip.per_device(chip.peak(name)).scaled(len(devices))
        else:
            peak = Figure.missing(
                "TFLOP/s", f"no peak is known for '{kind}'; give peak_tflops of one device"
            )
        # Tracing a user's own model takes a while, and the FLOPs are useless without a peak.
        counted = work.config is not None or peak.value is not None
        flops = model_flops(work) if counted else Figure.missing("FLOP", peak.reason)
        return cls(
            devices=len(devices),
            chips=count_chips(devices),
            device_kind=kind,
            tokens_per_step=work.tokens_per_step,
            flops_per_step=flops,
            peak_tflops=peak,
            mfu_peak=name,
            examples_per_step=work.examples if work.tokens_per_step is None else None,
        )

    def tokens_per_s_per_chip(self, step_time_s: float) -> float | None:
        """Return tokens per second and chip."""
        if self.tokens_per_step is None or step_time_s <= 0:
            return None
        return self.tokens_per_step / step_time_s / self.chips

    def examples_per_s_per_chip(self, step_time_s: float) -> float | None:
        """Return examples per second and chip, for models that read no tokens."""
        if self.examples_per_step is None or step_time_s <= 0:
            return None
        return self.examples_per_step / step_time_s / self.chips

    def mfu(self, step_time_s: float) -> float | None:
        """Return the model's FLOPs as a share of `mfu_peak`; None if either is unknown."""
        flops, peak = self.flops_per_step.value, self.peak_tflops.value
        return model_flop_utilization(flops, step_time_s, peak)

    @property
    def mfu_convention(self) -> str:
        """How the FLOPs of MFU are counted, and over which peak."""
        return mfu_convention(self.mfu_peak)

    @property
    def no_mfu(self) -> str:
        """The reason for a missing MFU, or ""."""
        return self.flops_per_step.reason or self.peak_tflops.reason


def count_chips(devices: list[Any]) -> int:
    """Return the number of chips of some devices; a device that is not a TPU counts as one."""
    chip = _chip(devices[0])
    return len(devices) // chip.devices_per_chip if chip else len(devices)


def _chip(device: Any) -> Chip | None:
    try:
        return get_chip(device.device_kind) if device.platform == "tpu" else None
    except SliceError:
        return None
